"""What plain modules make of a step's rows, and graphs held against it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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
STRAY_WRITE = "keys or values were written outside of the step's slots"


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
        self._first = torch.from_numpy(step.first_blocks).long()
        self._second = torch.from_numpy(step.second_blocks).long()
        self._watched = _watched_blocks(kv_cache.num_blocks, step)
        # The null block, the last one, and where the step before leads.
        self._nearest = self._watched[[0, len(self._watched) // 2, -1]]
        self._before = step.over_block(int(self._nearest[1]))
        block_size = kv_cache.geometry.block_size
        self._first_slots = _Slots(step.over_first(), block_size)
        self._second_slots = _Slots(step.over_second(), block_size)
        self._hidden = torch.empty(0)
        self._stored: list[Tensor] = []
        with one_thread():
            _fill_alike(self._caches, self._first, self._second)
            for cache in self._caches:
                self._first_slots.write(cache, _CANARY)
                self._second_slots.write(cache, _CANARY)
                cache[self._watched] = _CANARY
            self._content = [cache[self._first] for cache in self._caches]

    def run_plain(self, indices: Sequence[int]) -> None:
        """Lets plain modules run some of the rows: what graphs are compared with until this is called again."""
        with one_thread():
            for cache in self._caches:
                # Whoever reads a block that no row has must not find the same as a graph that does it too.
                cache[self._nearest] = -_CANARY
        batch = self.step.over_first(indices)
        self._hidden = self._runner.decode(batch, self._runner.stage(batch, None), PLAIN_WAY).hidden_states.clone()
        with one_thread():
            self._stored = [self._first_slots.read(cache) for cache in self._caches]
            for cache in self._caches:
                self._first_slots.write(cache, _CANARY)
                cache[self._nearest] = _CANARY

    def compare(self, key: GraphKey, indices: Sequence[int], way: Way | None = None) -> tuple[float, str]:
        """Runs the rows that plain modules ran in another way.

        Args:
            key: whose sizes they are padded to.
            indices: of the rows.
            way: how; None: with the graph of the key.

        Returns:
            the largest difference of a hidden state, key or value in units of their root mean square, NaN where one is; and what is
            wrong whatever that is, "" where nothing is.
        """
        self._runner.stage(self._before, None)
        batch = self.step.over_second(indices)
        (actual,) = self._runner.run(self._runner.stage(batch, key), way or Way(Choice(key, Reason.NONE)))
        fault = "" if bool(actual.isfinite().all()) else "hidden states are not finite"
        tokens = torch.from_numpy(self.step.tokens_of(indices)).to(actual.device)
        others = torch.ones(self.step.num_tokens, dtype=torch.bool, device=actual.device).index_fill_(0, tokens, False)
        with one_thread():
            differences = [relative_difference(actual[: batch.num_tokens], self._hidden)]
            for cache, stored in zip(self._caches, self._stored, strict=True):
                found = self._second_slots.read(cache)
                differences.append(relative_difference(found[tokens], stored[tokens]))
                if not bool((found[others] == _CANARY).all() & (cache[self._nearest] == _CANARY).all()):
                    fault = STRAY_WRITE
                self._second_slots.write(cache, _CANARY)
        # A NaN anywhere must not get lost in a maximum.
        return float(np.max(differences)), fault

    def has_stray_writes(self) -> bool:
        """Returns whether graphs wrote to contexts, or to blocks that no row has."""
        with one_thread():
            return not all(
                torch.equal(cache[self._first], content)
                and torch.equal(cache[self._second], content)
                and bool((cache[self._watched] == _CANARY).all())
                for cache, content in zip(self._caches, self._content, strict=True)
            )


class _Slots:
    """The slots of a step's tokens in any cache."""

    def __init__(self, batch: StepBatch, block_size: int) -> None:
        slots = torch.from_numpy(batch.slots(block_size))
        self._blocks, self._offsets = slots // block_size, slots % block_size

    def read(self, cache: Tensor) -> Tensor:
        """Returns [num_tokens, num_kv_heads, head_dim]."""
        return cache[self._blocks, :, self._offsets]

    def write(self, cache: Tensor, value: float) -> None:
        cache[self._blocks, :, self._offsets] = value


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


def _fill_alike(caches: Sequence[Tensor], first: Tensor, second: Tensor) -> None:
    """Gives two sets of blocks the same random content, in every cache another one."""
    noise = torch.randn_like(caches[0][first])
    for index, cache in enumerate(caches):
        content = noise.roll(index, dims=-1)
        cache[first] = content
        cache[second] = content


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Returns the largest difference in units of the expected values' root mean square; NaN where one of them is NaN."""
    if torch.equal(actual, expected):
        return 0.0
    scale = expected.float().square().mean().sqrt().clamp(min=1e-6)
    return float((actual.float() - expected.float()).abs().max() / scale)
