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
from modelworker.worker.batch import StepBatch
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.step_buffers import NULL_BLOCK
from modelworker.worker.step_runner import PLAIN_WAY, StepRunner, Way
from modelworker.worker.twin_steps import TwinStep

# Exact in every dtype, and unlike any key or value that a model computes.
_CANARY = 1024.0
# Of the blocks that no row owns, evenly spread, so many are watched: all of a small cache, of a large one those that cost little.
_MAX_WATCHED_BLOCKS = 64
_INTEGERS: Final = MappingProxyType({2: torch.int16, 4: torch.int32})
STRAY_WRITE = "keys or values were written outside of the step's slots"


class Comparison(NamedTuple):
    """What came of running rows in another way than by plain modules.

    Attributes:
        difference: the largest one of a hidden state, key or value in units of their root mean square, NaN where one is.
        fault: what is wrong whatever that is, "" where nothing is.
        seconds: that the run took.
    """

    difference: float
    fault: str
    seconds: float


class CheckReference:
    """Rows that plain modules run over the first set of blocks, and graphs over the second.

    The contexts of both sets hold the same random keys and values. Only the slots of new tokens are written, and they hold garbage
    before every run. Before a graph runs, a step over a block of garbage is staged: what the buffers hold of the step before leads
    there.

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
        self._first_slots = _slots(step.over_first(), self._caches)
        self._second_slots = _slots(step.over_second(), self._caches)
        self._hidden = torch.empty(0)
        self._stored = torch.empty(0)
        with one_thread():
            self._content = self._fill()

    def _fill(self) -> Tensor:
        """Fills the blocks of both sets alike, in every cache with other noise, and those that are watched.

        Returns:
            [num_caches, num_blocks, num_kv_heads, block_size, head_dim], what a set holds.
        """
        shape = (len(self._first), *self._caches[0].shape[1:])
        contents = self._caches[0].new_empty(len(self._caches), *shape)
        noise = torch.randn(contents[0].numel() + len(self._caches), dtype=contents.dtype, device=contents.device)
        for index, (cache, content) in enumerate(zip(self._caches, contents, strict=True)):
            cache.index_copy_(0, self._first, noise[index : index + content.numel()].view(shape))
            self._first_slots.fill(_CANARY, index)
            torch.index_select(cache, 0, self._first, out=content)
            cache.index_copy_(0, self._second, content)
            cache.index_fill_(0, self._watched, _CANARY)
        return contents

    def run_plain(self, indices: Sequence[int]) -> None:
        """Lets plain modules run some of the rows: what graphs are compared with until this is called again."""
        with one_thread():
            # Whoever reads a block that no row has must not find the same as a graph that does it too.
            self._nearest.fill(-_CANARY)
        batch = self.step.over_first(indices)
        self._hidden = self._runner.decode(batch, self._runner.stage(batch, None), PLAIN_WAY).hidden_states.clone()
        with one_thread():
            self._stored = self._by_token(self._first_slots)
            self._first_slots.fill(_CANARY)
            self._nearest.fill(_CANARY)

    def compare(self, key: GraphKey, indices: Sequence[int], way: Way | None = None) -> Comparison:
        """Runs the rows that plain modules ran in another way.

        Args:
            key: whose sizes they are padded to.
            indices: of the rows.
            way: how; None: with the graph of the key.
        """
        self._runner.stage(self._before, None)
        batch = self.step.over_second(indices)
        inputs = self._runner.stage(batch, key)
        begun = time.perf_counter()
        (actual,) = self._runner.run(inputs, way or Way(Choice(key, Reason.NONE)))
        synchronize(actual.device)
        seconds = time.perf_counter() - begun
        tokens = torch.from_numpy(self.step.tokens_of(indices)).to(actual.device)
        others = torch.ones(self.step.num_tokens, dtype=torch.bool, device=actual.device).index_fill_(0, tokens, False)
        with one_thread():
            fault = "" if bool(actual.isfinite().all()) else "hidden states are not finite"
            found = self._by_token(self._second_slots)
            if not (bool((found[:, others] == _CANARY).all()) and self._nearest.hold(_CANARY)):
                fault = STRAY_WRITE
            self._second_slots.fill(_CANARY)
            hidden = relative_difference(actual[: batch.num_tokens][None], self._hidden[None])
            stored = relative_difference(found[:, tokens], self._stored[:, tokens])
        # A NaN anywhere must not get lost in a maximum.
        return Comparison(float(np.max((hidden, stored))), fault, seconds)

    def _by_token(self, slots: "_Rows") -> Tensor:
        """Returns [num_caches, num_tokens, num_kv_heads * head_dim], what the slots of all tokens hold."""
        return slots.read().view(len(self._caches), self.step.num_tokens, -1)

    def has_stray_writes(self) -> bool:
        """Returns whether graphs wrote to contexts, or to blocks that no row has."""
        with one_thread():
            # Memory that is new to the process would cost more than the comparison.
            owned, watched = torch.empty_like(self._content[0]), self._caches[0][self._watched]
            canaries = torch.full_like(watched, _CANARY)
            for cache, content in zip(self._caches, self._content, strict=True):
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
        indices: [num_rows], int64, of the rows.
    """

    def __init__(self, caches: Sequence[Tensor], indices: Tensor) -> None:
        self._caches = caches
        self._indices = indices
        self._read = caches[0].new_empty(len(caches), len(indices), caches[0].shape[1])

    def read(self) -> Tensor:
        """Returns [num_caches, num_rows, width]; the next call overwrites it."""
        for cache, rows in zip(self._caches, self._read, strict=True):
            torch.index_select(cache, 0, self._indices, out=rows)
        return self._read

    def hold(self, value: float) -> bool:
        """Returns whether every element of every row is that value."""
        rows = self.read()
        return torch.equal(_bits(rows), _bits(torch.full_like(rows, value)))

    def fill(self, value: float, cache: int | None = None) -> None:
        """Fills the rows of one cache, or of all."""
        for rows in self._caches if cache is None else [self._caches[cache]]:
            rows.index_fill_(0, self._indices, value)


def _slots(batch: StepBatch, caches: Sequence[Tensor]) -> _Rows:
    """Returns the slots of a step's tokens: of each token a row per KV head."""
    _, num_kv_heads, block_size, head_dim = caches[0].shape
    slots = torch.from_numpy(batch.slots(block_size)).to(caches[0].device)[:, None]
    heads = torch.arange(num_kv_heads, device=slots.device)
    indices = (slots // block_size * num_kv_heads + heads) * block_size + slots % block_size
    return _Rows([cache.view(-1, head_dim) for cache in caches], indices.flatten())


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
    actual, expected = actual.flatten(1).float(), expected.flatten(1).float()
    scale = expected.square().mean(1).sqrt().clamp(min=1e-6)
    return float(((actual - expected).abs().amax(1) / scale).amax())
