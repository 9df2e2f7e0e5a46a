"""Checks of captured graphs before readiness: each against plain modules on random steps, and what a replay costs."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from modelworker.graphs.dispatch import Reason
from modelworker.graphs.settings import RuntimeMode
from modelworker.graphs.shapes import GraphKey
from modelworker.worker.check_reference import STRAY_WRITE, CheckReference, synchronize
from modelworker.worker.description import CapturedSize, Degradation
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.step_runner import GRAPH_MODES, StepRunner
from modelworker.worker.twin_steps import StepMaker

# Of the root mean square of the hidden states. Padding sends products through kernels for other numbers of rows, which sum in
# another order: 2e-6 in fp32 and 0.06 in bf16 were seen at most; a wrong position, slot or row moves them by more than 0.5.
BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.25}
# Replays of a graph that are timed: two, for the first finds nothing in caches, and a third where they took no longer than this.
_MIN_COST_REPLAYS = 2
_MAX_COST_REPLAYS = 3
_COST_SECONDS = 0.02


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ChecksOfModes:
    """What came of checking all graphs.

    Attributes:
        worst: of each mode.
        unchecked: graphs that steps can have, and for which the cache had no room.
        seconds: of each graph that was checked, the shortest of a few replays on the same rows.
    """

    worst: tuple[ModeCheck, ...]
    unchecked: tuple[GraphKey, ...]
    seconds: Mapping[GraphKey, float]


def check_modes(runner: StepRunner, kv_cache: KvCache, *, vocab_size: int, max_model_len: int) -> ChecksOfModes:
    """Runs every graph on random rows that it pads, and the smallest and the largest of each kind on rows that fill it.

    Plain modules run the same rows. Both start from the same random keys and values, in different blocks. Hidden states, keys and
    values are compared; what belongs to no row of a step must stay as it is. The cache holds garbage afterwards.
    """
    maker = StepMaker(
        random=np.random.default_rng(0),
        block_size=kv_cache.geometry.block_size,
        num_blocks=kv_cache.num_blocks,
        max_sequences=runner.dispatcher.settings.max_sequences,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
    )
    possible = [key for key in runner.captured if maker.is_possible(key)]
    worst: dict[RuntimeMode, ModeCheck] = {}
    seconds: dict[GraphKey, float] = {}
    for samples in _samples(possible):
        for found in _check_kind(runner, kv_cache, maker, samples, seconds):
            if found.mode not in worst or found.badness > worst[found.mode].badness:
                worst[found.mode] = found
    unchecked = tuple(key for key in possible if key not in seconds)
    return ChecksOfModes(worst=tuple(worst.values()), unchecked=unchecked, seconds=seconds)


def disable_failed(runner: StepRunner, checks: ChecksOfModes) -> tuple[Degradation, ...]:
    """Takes the modes that did not pass out of service, and says so, as of the graphs that could not be checked."""
    failed = [check for check in checks.worst if not check.passed]
    for check in failed:
        runner.disable(check.mode, Reason.FAILED_SELF_CHECK)
    degradations = [Degradation(reason="graphs_failed_self_check", message=f"{check}: the mode is not served") for check in failed]
    if unchecked := [str(key) for key in checks.unchecked if key in runner.captured]:
        message = (
            f"the KV cache has no room to check the graphs {', '.join(unchecked)}: more --num-blocks would let them be checked"
        )
        degradations.append(Degradation(reason="graphs_not_checked", message=message))
    return tuple(degradations)


def measure_costs(
    runner: StepRunner, checked: Mapping[GraphKey, float], advance: Callable[[int], None]
) -> tuple[CapturedSize, ...]:
    """Says what a replay of each graph costs: what its check found, and of one that was not checked on a step without context.

    Args:
        runner: of the graphs.
        checked: the seconds of those that were checked.
        advance: called for every graph.
    """
    return tuple(_cost(runner, key, checked.get(key), advance) for key in runner.captured)


def _cost(runner: StepRunner, key: GraphKey, checked: float | None, advance: Callable[[int], None]) -> CapturedSize:
    advance(1)
    seconds = _shortest(partial(_time_blank, runner, key)) if checked is None else checked
    return CapturedSize(
        mode=GRAPH_MODES[key.mode],
        num_tokens=key.num_tokens,
        num_sequences=key.num_sequences or 0,
        uniform_query_len=key.uniform_query_len or 0,
        cost_ms=1000 * seconds,
    )


def _time_blank(runner: StepRunner, key: GraphKey) -> float:
    """Returns the seconds of a replay on a step without context."""
    inputs = runner.stage_blank(key)
    begun = time.perf_counter()
    runner.replay(key, inputs)
    synchronize(inputs.token_ids.device)
    return time.perf_counter() - begun


def _shortest(replay: Callable[[], float], *before: float) -> float:
    """Returns the shortest of a few replays, at least of two: a busy neighbour makes one longer, and so does being the first.

    Args:
        replay: replays a graph, and returns how long it took.
        before: how long it took before, on the same rows.
    """
    seconds = [*before]
    while len(seconds) < _MIN_COST_REPLAYS or (len(seconds) < _MAX_COST_REPLAYS and sum(seconds) <= _COST_SECONDS):
        seconds.append(replay())
    return min(seconds)


class _Sample(NamedTuple):
    """Rows to be checked.

    Attributes:
        keys: of the graphs that run them. They are rows for the first, and fit the others.
        num_tokens: of the rows, at most.
    """

    keys: tuple[GraphKey, ...]
    num_tokens: int


def _samples(captured: Sequence[GraphKey]) -> list[list[_Sample]]:
    """Says what is run, from the largest down: rows of all a graph's tokens, or of a row, in a graph of any mix a token, less.

    The decodes of one token that a FULL graph pads are run by the graph of any mix of the same size as well.
    """
    kinds: dict[tuple[bool, RuntimeMode, int | None], list[GraphKey]] = {}
    for key in sorted(captured, key=lambda key: -key.num_tokens):
        kinds.setdefault((key.uniform_query_len is None, key.mode, key.uniform_query_len), []).append(key)
    of_any_mix = {key.num_tokens: key for key in captured if key.uniform_query_len is None}
    planned: set[GraphKey] = set()
    plan = []
    for _, keys in sorted(kinds.items(), key=lambda kind: kind[0][0]):
        samples = []
        for index, key in enumerate(keys):
            row = key.uniform_query_len or 1
            if index in (0, len(keys) - 1):
                samples.append(_Sample((key,), key.num_tokens))
            if key.num_tokens > row and key not in planned:
                twins = [of_any_mix[key.num_tokens]] if key.uniform_query_len == 1 and key.num_tokens in of_any_mix else []
                planned.update(twins)
                samples.append(_Sample((key, *twins), key.num_tokens - row))
        plan.append(samples)
    return plan


def _check_kind(
    runner: StepRunner, kv_cache: KvCache, maker: StepMaker, samples: Sequence[_Sample], seconds: dict[GraphKey, float]
) -> Iterator[ModeCheck]:
    """Checks the graphs of a kind over one set of rows. Where they don't fill half of a graph, another set is made.

    Notes in `seconds` what each takes on the first rows that it is checked on.
    """
    reference: CheckReference | None = None
    compared: list[GraphKey] = []
    for keys, num_tokens in samples:
        rows: tuple[int, ...] = ()
        if reference is not None:
            rows = reference.step.select(maker.random, num_tokens=num_tokens, max_rows=maker.max_rows(keys[0]))
        if reference is None or 2 * len(reference.step.tokens_of(rows)) < num_tokens:
            step = maker.make(keys[0], num_tokens)
            if step is None:
                continue
            yield from _check_strays(reference, compared, kv_cache)
            # What one takes is free before there is the next.
            reference = None
            reference, compared, rows = CheckReference(runner, kv_cache, step), [], tuple(range(len(step.rows)))
        reference.run_plain(rows)
        for key in keys:
            difference, fault, first = reference.compare(key)
            if key not in seconds:
                seconds[key] = _shortest(partial(reference.time_again, key), first)
            compared.append(key)
            yield _mode_check(key, kv_cache, difference, fault)
    yield from _check_strays(reference, compared, kv_cache)


def _check_strays(reference: CheckReference | None, compared: Sequence[GraphKey], kv_cache: KvCache) -> Iterator[ModeCheck]:
    """Looks once at all that no graph had to write to. It doesn't show which graph did: all modes are blamed."""
    if reference is not None and reference.has_stray_writes():
        for key in {key.mode: key for key in compared}.values():
            yield _mode_check(key, kv_cache, 0.0, STRAY_WRITE)


def _mode_check(key: GraphKey, kv_cache: KvCache, difference: float, fault: str) -> ModeCheck:
    return ModeCheck(mode=key.mode, key=key, difference=difference, bound=BOUND[kv_cache.geometry.dtype], fault=fault)
