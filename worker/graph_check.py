"""Checks of captured graphs before readiness: each against plain modules on random steps, and what a replay costs."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelworker.graphs.dispatch import Choice, Reason
from modelworker.graphs.settings import RuntimeMode
from modelworker.graphs.shapes import GraphKey
from modelworker.worker.description import CapturedSize, Degradation
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.step_buffers import NULL_BLOCK
from modelworker.worker.step_runner import GRAPH_MODES, StepRunner, Way
from modelworker.worker.twin_steps import StepMaker, TwinStep

# Of the root mean square of the hidden states. Padding sends products through kernels for other numbers of rows, which sum in
# another order: 2e-6 in fp32 and 0.06 in bf16 were seen at most; a wrong position, slot or row moves them by more than 0.5.
BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.25}
# Exact in every dtype, and unlike any key or value that a model computes.
_CANARY = 1024.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModeCheck:
    """The worst that came of checking the graphs of a mode.

    Attributes:
        mode: the mode.
        key: of the graph.
        difference: the largest one of a hidden state or cached value, in units of their root mean square.
        bound: on it.
        fault: what is wrong whatever the difference; "" where nothing is.
    """

    mode: RuntimeMode
    key: GraphKey
    difference: float
    bound: float
    fault: str = ""

    @property
    def passed(self) -> bool:
        """Whether the mode may be served."""
        return not self.fault and self.difference <= self.bound

    @property
    def badness(self) -> tuple[bool, float]:
        """What orders checks; a difference that isn't a number is above all numbers."""
        return bool(self.fault), math.inf if math.isnan(self.difference) else self.difference

    def __str__(self) -> str:
        verdict = "agree" if self.passed else "do not agree"
        found = self.fault or f"{self.difference:.1e} of the mean, bound {self.bound:g}"
        return f"{self.mode.name} graphs and plain modules {verdict}: {found} ({self.key})"


def check_modes(runner: StepRunner, kv_cache: KvCache, *, vocab_size: int, max_model_len: int) -> tuple[ModeCheck, ...]:
    """Runs every graph on a random step that it pads, and the smallest and the largest of each kind on one that fills it.

    Plain modules run the same steps. Both start from the same random keys and values, in different blocks. Hidden states and all
    that the steps' blocks hold afterwards are compared; blocks that belong to nobody must stay as they are. The cache holds garbage
    afterwards.

    Returns:
        the worst of each mode.
    """
    maker = StepMaker(
        random=np.random.default_rng(0),
        block_size=kv_cache.geometry.block_size,
        num_blocks=kv_cache.num_blocks,
        max_sequences=runner.dispatcher.settings.max_sequences,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
    )
    worst: dict[RuntimeMode, ModeCheck] = {}
    for key, num_tokens in _samples(runner.captured):
        step = maker.make(key, num_tokens)
        if step is None:
            continue
        found = _check(runner, kv_cache, key, step)
        if key.mode not in worst or found.badness > worst[key.mode].badness:
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
    if inputs.token_ids.is_cuda:
        # The first launch of a CUDA graph brings it to the device.
        runner.replay(key, inputs)
        _synchronize(inputs.token_ids.device)
    begun = time.perf_counter()
    runner.replay(key, inputs)
    _synchronize(inputs.token_ids.device)
    return 1000 * (time.perf_counter() - begun)


def _samples(captured: Sequence[GraphKey]) -> Iterator[tuple[GraphKey, int]]:
    """Yields graphs, and of how many tokens a step for them is: one row, or in a graph of any mix one token, less than it has."""
    kinds: dict[tuple[RuntimeMode, int | None], list[GraphKey]] = {}
    for key in sorted(captured, key=lambda key: key.num_tokens):
        kinds.setdefault((key.mode, key.uniform_query_len), []).append(key)
    for (_, query_len), keys in kinds.items():
        row = query_len or 1
        yield from ((key, key.num_tokens - row) for key in keys if key.num_tokens > row)
        yield from {(key, key.num_tokens): None for key in (keys[0], keys[-1])}


def _check(runner: StepRunner, kv_cache: KvCache, key: GraphKey, step: TwinStep) -> ModeCheck:
    difference, fault = compare_with_plain(runner, kv_cache, step, key, Way(Choice(key, Reason.NONE)))
    return ModeCheck(mode=key.mode, key=key, difference=difference, bound=BOUND[kv_cache.geometry.dtype], fault=fault)


def compare_with_plain(runner: StepRunner, kv_cache: KvCache, step: TwinStep, key: GraphKey, way: Way) -> tuple[float, str]:
    """Runs a step plainly over its first blocks, then in another way over its second ones.

    Args:
        runner: of the decoder.
        kv_cache: that the blocks are of.
        step: to run.
        key: whose sizes it is padded to the second time.
        way: how it is run the second time.

    Returns:
        the largest difference of a hidden state, key or value in units of their root mean square, NaN where one is; and what is
        wrong whatever that is, "" where nothing is.
    """
    first, second = torch.from_numpy(step.first_blocks).long(), torch.from_numpy(step.second_blocks).long()
    caches = [cache for layer in kv_cache.layers for cache in layer]
    with _one_thread():
        _fill_alike(caches, first, second)
    plain = Way(Choice(None, Reason.NONE), is_plain=True)
    expected = runner.decode(step.first, runner.stage(step.first, None), plain).hidden_states.clone()
    # The last slot of the cache is where slot -1 leads if it is taken for an index.
    canaries = torch.tensor(sorted({NULL_BLOCK, kv_cache.num_blocks - 1} - set(step.second_blocks.tolist())))
    with _one_thread():
        expected_caches = [cache[first] for cache in caches]
        for cache in caches:
            # What the plain run leaves must not help a graph that reads a table of before.
            cache[first] = _CANARY
            cache[canaries] = _CANARY
    (actual,) = runner.run(runner.stage(step.second, key), way)
    with _one_thread():
        differences = [relative_difference(actual[: step.second.num_tokens], expected)]
        differences += [relative_difference(cache[second], stored) for cache, stored in zip(caches, expected_caches, strict=True)]
        is_confined = all(bool((cache[canaries] == _CANARY).all()) for cache in caches)
        is_finite = bool(actual.isfinite().all())
    fault = "" if is_finite else "hidden states are not finite"
    if not is_confined:
        fault = "keys or values were written outside of the step's slots"
    # A NaN anywhere must not get lost in a maximum.
    return float(np.max(differences)), fault


@contextmanager
def _one_thread() -> Iterator[None]:
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


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
