"""What plain modules make of a step's rows, and graphs held against it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from modelworker.graphs.dispatch import Choice, Reason
from modelworker.graphs.shapes import GraphKey
from modelworker.worker.arrays import IndexArray, Int32Array
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.step_buffers import NULL_BLOCK
from modelworker.worker.step_runner import PLAIN_WAY, StepRunner, Way
from modelworker.worker.twin_steps import TwinStep

# Exact in every dtype, and unlike any key or value that a model computes.
_CANARY = 1024.0
# Of the blocks that no row owns, evenly spread, so many are watched: all of a small cache, of a large one those that cost little.
_MAX_WATCHED_BLOCKS = 64
_INTEGERS: Final = MappingProxyType({2: torch.int16, 4: torch.int32})
# Of what slots hold, so many elements of some caches are compared at a time: 16 MiB as fp32. No budget counts them.
_CHUNK_ELEMENTS = 2**22
STRAY_WRITE = "keys or values were written outside of the step's slots"


class Comparison(NamedTuple):
    """What came of running rows in another way than by plain modules.

    Attributes:
        difference: the largest one of a hidden state, key or value in units of their root mean square, NaN where one is.
        fault: what is wrong whatever that is, "" where nothing is.
        seconds: that the run took, the first one on these rows.
    """

    difference: float
    fault: str
    seconds: float


class CheckReference:
    """Rows that plain modules run over the first set of blocks, and graphs over the second.

    The contexts of both sets hold the same random keys and values. Only the slots of new tokens are written, and they hold garbage
    before every run. Before a graph runs, a step over a block of garbage is staged: what the buffers hold of the step before leads
    there.

    Beside the cache it takes what the slots of all caches hold, three times what a set holds in one cache, and a chunk.

    Args:
        runner: of the decoder.
        kv_cache: whose blocks the rows have. They, and up to 64 others, hold garbage from now on.
        step: with all rows.
    """

    def __init__(self, runner: StepRunner, kv_cache: KvCache, step: TwinStep) -> None:
        self.step = step
        self._runner = runner
        self._caches = [cache for layer in kv_cache.layers for cache in layer]
        device = self._caches[0].device
        self._first = torch.from_numpy(step.first_blocks).long().to(device)
        self._second = torch.from_numpy(step.second_blocks).long().to(device)
        self._watched = _watched_blocks(kv_cache.num_blocks, step).to(device)
        # The null block, the last one, and where the step before leads.
        nearest = self._watched[[0, len(self._watched) // 2, -1]]
        self._before = step.over_block(int(nearest[1]))
        self._nearest = _Rows([cache.flatten(1) for cache in self._caches], nearest)
        block_size = kv_cache.geometry.block_size
        slots = step.over_first().slots(block_size)
        self._first_slots = _slots(slots, self._caches)
        self._second_slots = _slots(step.over_second().slots(block_size), self._caches)
        self._indices: tuple[int, ...] = ()
        self._hidden = torch.empty(0)
        # What plain modules left in the slots of their rows' tokens, and what is read of some caches: both flat.
        self._stored = self._caches[0].new_empty(len(self._caches) * self._first_slots.num_elements)
        widest = max(self._first_slots.num_elements, self._nearest.num_elements)
        self._chunk = self._caches[0].new_empty(max(widest, min(len(self._caches) * widest, _CHUNK_ELEMENTS)))
        # What a set holds: of every cache other noise, with garbage in the slots.
        self._content = self._caches[0].new_empty(len(self._first), *self._caches[0].shape[1:])
        self._noise = torch.randn(self._content.numel() + len(self._caches), dtype=self._content.dtype, device=self._content.device)
        self._content_slots = _slots(_within(step.first_blocks, slots, block_size), [self._content])
        with one_thread():
            self._fill()

    def _fill(self) -> None:
        """Fills the blocks of both sets alike, in every cache with other noise, and those that are watched."""
        for index, cache in enumerate(self._caches):
            content = self._content_of(index)
            cache.index_copy_(0, self._first, content)
            cache.index_copy_(0, self._second, content)
            cache.index_fill_(0, self._watched, _CANARY)

    def _content_of(self, cache: int) -> Tensor:
        """Returns [num_blocks, num_kv_heads, block_size, head_dim], what a set holds; the next call overwrites it."""
        self._content.copy_(self._noise[cache : cache + self._content.numel()].view_as(self._content))
        self._content_slots.fill(_CANARY)
        return self._content

    def run_plain(self, indices: Sequence[int]) -> None:
        """Lets plain modules run some of the rows: what graphs are compared with until this is called again."""
        with one_thread():
            # Whoever reads a block that no row has must not find the same as a graph that does it too.
            self._nearest.fill(-_CANARY)
        self._indices = tuple(indices)
        batch = self.step.over_first(indices)
        self._hidden = self._runner.decode(batch, self._runner.stage(batch, None), PLAIN_WAY).hidden_states.clone()
        with one_thread():
            written = self._first_slots.some(self._tokens(run=True))
            written.read(written.viewed(self._stored))
            self._first_slots.fill(_CANARY)
            self._nearest.fill(_CANARY)

    def compare(self, key: GraphKey, way: Way | None = None) -> Comparison:
        """Runs the rows that plain modules ran in another way.

        Args:
            key: whose sizes they are padded to.
            way: how; None: with the graph of the key.
        """
        self._runner.stage(self._before, None)
        actual, seconds = self._run(key, way or Way(Choice(key, Reason.NONE)))
        expected = self._hidden
        with one_thread():
            fault = "" if bool(actual.isfinite().all()) else "hidden states are not finite"
            others = self._second_slots.some(self._tokens(run=False))
            if not (others.hold(_CANARY, self._chunk) and self._nearest.hold(_CANARY, self._chunk)):
                fault = STRAY_WRITE
            differences = [relative_difference(actual[: len(expected)][None], expected[None])]
            written = self._second_slots.some(self._tokens(run=True))
            stored = written.viewed(self._stored)
            differences += [relative_difference(found, stored[part]) for part, found in written.chunks(self._chunk)]
            self._second_slots.fill(_CANARY)
        # A NaN anywhere must not get lost in a maximum.
        return Comparison(float(np.max(differences)), fault, seconds)

    def time_again(self, key: GraphKey) -> float:
        """Returns the seconds that the graph of a key takes for the rows that were compared last."""
        _, seconds = self._run(key, Way(Choice(key, Reason.NONE)))
        with one_thread():
            self._second_slots.fill(_CANARY)
        return seconds

    def _run(self, key: GraphKey, way: Way) -> tuple[Tensor, float]:
        """Runs the rows over the second set; returns hidden states, those of padding included, and the seconds that it took."""
        inputs = self._runner.stage(self.step.over_second(self._indices), key)
        begun = time.perf_counter()
        (hidden_states,) = self._runner.run(inputs, way)
        synchronize(hidden_states.device)
        return hidden_states, time.perf_counter() - begun

    def _tokens(self, *, run: bool) -> Tensor:
        """Returns int64, which tokens of the step belong to the rows that are run, or which do not."""
        tokens = self.step.tokens_of(self._indices)
        if not run:
            tokens = np.setdiff1d(np.arange(self.step.num_tokens), tokens)
        return torch.from_numpy(tokens).to(self._first.device)

    def has_stray_writes(self) -> bool:
        """Returns whether graphs wrote to contexts, or to blocks that no row has."""
        with one_thread():
            # Memory that is new to the process would cost more than the comparison.
            owned, watched = torch.empty_like(self._content), self._caches[0][self._watched]
            canaries = torch.full_like(watched, _CANARY)
            for index, cache in enumerate(self._caches):
                content = self._content_of(index)
                for blocks, found, expected in (
                    (self._first, owned, content),
                    (self._second, owned, content),
                    (self._watched, watched, canaries),
                ):
                    torch.index_select(cache, 0, blocks, out=found)
                    if not torch.equal(_bits(found), _bits(expected)):
                        return True
        return False


class _Rows:
    """The same rows of every cache.

    Args:
        caches: each as [num_rows of a cache, width].
        indices: [num_groups, num_rows of a group], int64, of the rows.
    """

    def __init__(self, caches: Sequence[Tensor], indices: Tensor) -> None:
        self._caches = caches
        self._groups = indices
        self._indices = indices.flatten()

    @property
    def num_elements(self) -> int:
        """Of the rows of one cache."""
        return len(self._indices) * self._caches[0].shape[1]

    def some(self, groups: Tensor) -> "_Rows":
        """Returns the rows of some groups."""
        return _Rows(self._caches, self._groups[groups])

    def viewed(self, memory: Tensor) -> Tensor:
        """Returns [num_caches, num_rows, width], so much of flat memory."""
        return self._view(memory, len(self._caches))

    def read(self, into: Tensor, first: int = 0) -> None:
        """Reads the rows of as many caches as there is room for: [n, num_rows, width]."""
        for cache, rows in zip(self._caches[first : first + len(into)], into, strict=True):
            torch.index_select(cache, 0, self._indices, out=rows)

    def chunks(self, memory: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yields some caches at a time, and [n, num_rows, width], what their rows hold.

        Args:
            memory: flat, with room for the rows of a cache; the next chunk overwrites it.
        """
        if not self.num_elements:
            return
        size = memory.numel() // self.num_elements
        for first in range(0, len(self._caches), size):
            rows = self._view(memory, min(size, len(self._caches) - first))
            self.read(rows, first)
            yield slice(first, first + len(rows)), rows

    def hold(self, value: float, memory: Tensor) -> bool:
        """Returns whether every element of every row is that value; memory as for `chunks`."""
        return all(torch.equal(_bits(rows), _bits(torch.full_like(rows, value))) for _, rows in self.chunks(memory))

    def fill(self, value: float) -> None:
        """Fills the rows of all caches."""
        for rows in self._caches:
            rows.index_fill_(0, self._indices, value)

    def _view(self, memory: Tensor, num_caches: int) -> Tensor:
        return memory[: num_caches * self.num_elements].view(num_caches, len(self._indices), -1)


def _slots(slots: IndexArray, caches: Sequence[Tensor]) -> _Rows:
    """Returns what slots hold: of each a row per KV head."""
    _, num_kv_heads, block_size, head_dim = caches[0].shape
    places = torch.from_numpy(slots).to(caches[0].device)[:, None]
    heads = torch.arange(num_kv_heads, device=places.device)
    indices = (places // block_size * num_kv_heads + heads) * block_size + places % block_size
    return _Rows([cache.view(-1, head_dim) for cache in caches], indices)


def _within(blocks: Int32Array, slots: IndexArray, block_size: int) -> IndexArray:
    """Returns where slots are in a cache that has but some blocks, in their order; without those that are in none of them."""
    order = np.argsort(blocks)
    places = np.searchsorted(blocks, slots // block_size, sorter=order)
    found = order[np.minimum(places, len(blocks) - 1)]
    within: IndexArray = (found * block_size + slots % block_size)[blocks[found] == slots // block_size]
    return within


def _watched_blocks(num_blocks: int, step: TwinStep) -> Tensor:
    """Returns the null block, the last one, where slot -1 leads if it is taken for an index, and some between."""
    owned = np.concatenate((step.first_blocks, step.second_blocks))
    others = np.setdiff1d(np.arange(NULL_BLOCK, num_blocks), owned)
    places = np.linspace(0, len(others) - 1, min(len(others), _MAX_WATCHED_BLOCKS)).round().astype(np.int64)
    return torch.from_numpy(others[places]).long()


@contextmanager
def one_thread() -> Iterator[None]:
    """Keeps torch's own ops on this thread. They are many and small: while another process has a core, waiting would cost more."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _bits(tensor: Tensor) -> Tensor:
    """Returns a tensor as integers, which are compared four times as fast."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def synchronize(device: torch.device) -> None:
    """Waits until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Returns the largest difference, each tensor's in units of its own expected root mean square; NaN where a value is NaN.

    Args:
        actual: [num_tensors, ...].
        expected: likewise.
    """
    if torch.equal(actual, expected):
        return 0.0
    expected = expected.flatten(1).float()
    scale = (torch.linalg.vector_norm(expected, dim=1) / expected.shape[1] ** 0.5).clamp(min=1e-6)
    difference = actual.flatten(1).to(torch.float32, copy=True).sub_(expected).abs_()
    return float((difference.amax(1) / scale).amax())
