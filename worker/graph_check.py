"""Checks of captured graphs before readiness: each mode against plain modules on random steps, and what a replay costs."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelworker.graphs.dispatch import Choice, Reason
from modelworker.graphs.settings import RuntimeMode
from modelworker.graphs.shapes import GraphKey
from modelworker.worker.batch import StepBatch
from modelworker.worker.check_batch import CheckRow, make_check_batch
from modelworker.worker.description import CapturedSize, Degradation
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.step_buffers import NULL_BLOCK
from modelworker.worker.step_runner import GRAPH_MODES, StepRunner, Way

# Of the root mean square of the hidden states. Padding sends products through kernels for other numbers of rows, which sum in
# another order: 2e-6 in fp32 and 0.06 in bf16 were seen at most; a wrong position, slot or row moves them by more than 0.5.
_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.25}
_MAX_BLOCKS_PER_SEQUENCE = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeCheck:
    """What came of checking a mode.

    Attributes:
        mode: the mode.
        difference: the largest one of a hidden state or cached value, in units of their root mean square.
        bound: on it.
        key: where it was found.
    """

    mode: RuntimeMode
    difference: float
    bound: float
    key: GraphKey

    @property
    def passed(self) -> bool:
        """Whether the mode may be served."""
        return self.difference <= self.bound

    def __str__(self) -> str:
        verdict = "agree" if self.passed else "do not agree"
        difference = f"{self.difference:.1e} of the mean, bound {self.bound:g}"
        return f"{self.mode.name} graphs and plain modules {verdict}: {difference} ({self.key})"


def check_modes(runner: StepRunner, kv_cache: KvCache, *, vocab_size: int, max_model_len: int) -> tuple[ModeCheck, ...]:
    """Runs the smallest, a middle and the largest graph of each mode on random steps, and the same steps on plain modules.

    Both start from the same random keys and values, in different blocks. Hidden states, what was written to the cache, and the null
    block are compared. The cache holds garbage afterwards.

    Returns:
        the worst of each mode.
    """
    random = np.random.default_rng(0)
    worst: dict[RuntimeMode, ModeCheck] = {}
    for key in _samples(runner.captured):
        rows = _rows_for(key, kv_cache, random, max_model_len)
        if not rows:
            continue
        difference = _difference(runner, kv_cache, key, rows, vocab_size)
        found = ModeCheck(mode=key.mode, difference=difference, bound=_BOUND[kv_cache.geometry.dtype], key=key)
        if key.mode not in worst or not difference <= worst[key.mode].difference:
            worst[key.mode] = found
    return tuple(worst.values())


def disable_failed(runner: StepRunner, checks: Sequence[ModeCheck]) -> tuple[Degradation, ...]:
    """Takes the modes that did not pass out of service, and says so."""
    failed = [check for check in checks if not check.passed]
    for check in failed:
        runner.disable(check.mode, Reason.FAILED_SELF_CHECK)
    return tuple(Degradation(reason="graphs_failed_self_check", message=f"{check}: the mode is not served") for check in failed)


def measure_costs(runner: StepRunner) -> tuple[CapturedSize, ...]:
    """Measures a replay of each graph, on a step without context."""
    return tuple(
        CapturedSize(
            mode=GRAPH_MODES[key.mode],
            num_tokens=key.num_tokens,
            num_sequences=key.num_sequences or 0,
            uniform_query_len=key.uniform_query_len or 0,
            cost_ms=_replay_ms(runner, key),
        )
        for key in runner.captured
    )


def _replay_ms(runner: StepRunner, key: GraphKey) -> float:
    inputs = runner.stage_blank(key)
    begun = time.perf_counter()
    runner.replay(key, inputs)
    _synchronize(inputs.token_ids.device)
    return 1000 * (time.perf_counter() - begun)


def _samples(captured: Sequence[GraphKey]) -> Iterator[GraphKey]:
    kinds: dict[tuple[RuntimeMode, int | None], list[GraphKey]] = {}
    for key in sorted(captured, key=lambda key: key.num_tokens):
        kinds.setdefault((key.mode, key.uniform_query_len), []).append(key)
    for keys in kinds.values():
        yield from {keys[0]: None, keys[len(keys) // 2]: None, keys[-1]: None}


def _rows_for(key: GraphKey, kv_cache: KvCache, random: np.random.Generator, max_model_len: int) -> list[tuple[int, int]]:
    """Returns (query length, context length) of rows that fit a graph, with padding, and the cache, twice."""
    block_size = kv_cache.geometry.block_size
    longest = min(_MAX_BLOCKS_PER_SEQUENCE * block_size, max_model_len)
    rows: list[tuple[int, int]] = []
    tokens, blocks = max(key.num_tokens - 1, 1), (kv_cache.num_blocks - 1) // 2
    max_rows = key.num_sequences or key.num_tokens
    while tokens and len(rows) < max_rows:
        query_len = key.uniform_query_len or int(random.integers(1, min(tokens, longest) + 1))
        smallest_context = 1 if key.uniform_query_len else 0
        if query_len > tokens or query_len + smallest_context > longest:
            break
        context_len = int(random.integers(smallest_context, longest - query_len + 1))
        needed = -(-(query_len + context_len) // block_size)
        if needed > blocks:
            break
        rows.append((query_len, context_len))
        tokens, blocks = tokens - query_len, blocks - needed
    if not rows and key.uniform_query_len and key.uniform_query_len + 1 <= longest:
        rows = [(key.uniform_query_len, 1)]
    return rows


def _difference(runner: StepRunner, kv_cache: KvCache, key: GraphKey, rows: list[tuple[int, int]], vocab_size: int) -> float:
    batch, twin, blocks, twin_blocks = _twin_batches(rows, kv_cache.geometry.block_size, vocab_size)
    for layer in kv_cache.layers:
        for cache in layer:
            cache[NULL_BLOCK] = 0
            cache[blocks] = torch.randn_like(cache[blocks])
            cache[twin_blocks] = cache[blocks]
    plain = Way(Choice(None, Reason.NONE), is_plain=True)
    expected = runner.decode(batch, runner.stage(batch, None), plain).hidden_states.clone()
    inputs = runner.stage(twin, key)
    actual = runner.decode(twin, inputs, Way(Choice(key, Reason.NONE))).hidden_states
    differences = [_relative(actual, expected)]
    for layer in kv_cache.layers:
        for cache in layer:
            differences += [_relative(cache[twin_blocks], cache[blocks]), float(cache[NULL_BLOCK].abs().max())]
    # A NaN anywhere must not get lost in a maximum.
    return float(np.max(differences))


def _twin_batches(rows: list[tuple[int, int]], block_size: int, vocab_size: int) -> tuple[StepBatch, StepBatch, Tensor, Tensor]:
    """Makes one step twice, over different blocks, those of the second in reverse."""
    counts = [-(-(query_len + context_len) // block_size) for query_len, context_len in rows]
    total = sum(counts)
    first = np.arange(1, total + 1, dtype=np.int32)
    second = np.arange(2 * total, total, -1, dtype=np.int32)
    ends = np.cumsum(counts)
    tokens = np.random.default_rng(1)
    batches = []
    sampled = [tokens.integers(0, vocab_size, query_len).astype(np.int32) for query_len, _ in rows]
    for blocks in (first, second):
        made = [
            CheckRow(token_ids=sampled[row], context_len=context_len, blocks=blocks[ends[row] - counts[row] : ends[row]])
            for row, (_, context_len) in enumerate(rows)
        ]
        batches.append(make_check_batch(made))
    return batches[0], batches[1], torch.from_numpy(first).long(), torch.from_numpy(second).long()


def _relative(actual: Tensor, expected: Tensor) -> float:
    scale = expected.float().square().mean().sqrt().clamp(min=1e-6)
    return float((actual.float() - expected.float()).abs().max() / scale)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
