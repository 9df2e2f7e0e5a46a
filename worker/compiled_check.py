"""Checks generated code before readiness: steps through compiled pieces and through plain modules."""

import math
from collections.abc import Iterator

import numpy as np

from modelworker.graphs.dispatch import Choice, Reason
from modelworker.graphs.settings import RuntimeMode
from modelworker.graphs.shapes import GraphKey, make_key
from modelworker.worker.check_reference import STRAY_WRITE, CheckReference
from modelworker.worker.description import Degradation
from modelworker.worker.graph_check import BOUND
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.step_runner import StepRunner, Way
from modelworker.worker.twin_steps import StepMaker, TwinStep

_NUM_TOKENS = (1, 17, 150)
_NUM_DECODES = 5


def check_compiled(
    runner: StepRunner, kv_cache: KvCache, *, vocab_size: int, max_model_len: int, max_tokens: int
) -> tuple[tuple[str, ...], tuple[Degradation, ...]]:
    """Compares steps of several sequences with context, and takes compiled pieces out of service where they differ.

    Both start from the same random keys and values, in different blocks, so that neither reads what the other wrote. Hidden states
    and all that the steps' blocks hold afterwards are compared; blocks that belong to nobody must stay as they are. The decodes are
    padded: code that writes or divides where there is no row is wrong, although only graphs pad.

    Args:
        runner: of the decoder.
        kv_cache: holds garbage afterwards.
        vocab_size: of the model.
        max_model_len: of a sequence.
        max_tokens: of a step.

    Returns:
        what was found, and what is degraded by it.
    """
    if RuntimeMode.NONE not in runner.compiled_modes:
        return (), ()
    max_sequences = runner.dispatcher.settings.max_sequences
    maker = StepMaker(
        random=np.random.default_rng(0),
        block_size=kv_cache.geometry.block_size,
        num_blocks=kv_cache.num_blocks,
        max_sequences=max_sequences,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
    )
    bound, worst = BOUND[kv_cache.geometry.dtype], 0.0
    faults = []
    for key, num_tokens in _samples(max_tokens, max_sequences):
        step = maker.make(key, num_tokens)
        if step is None:
            continue
        difference, fault = _compare(runner, kv_cache, step, key)
        worst = max(worst, math.inf if math.isnan(difference) else difference)
        if fault:
            faults.append(fault)
    found = faults[0] if faults else f"{worst:.1e} of the mean, bound {bound:g}"
    if not faults and worst <= bound:
        return (f"compiled pieces and plain modules agree: {found}",), ()
    message = f"compiled pieces and plain modules do not agree: {found}: plain modules are served"
    runner.disable(RuntimeMode.NONE, Reason.FAILED_SELF_CHECK)
    return (message,), (Degradation(reason="compiled_failed_self_check", message=message),)


def _compare(runner: StepRunner, kv_cache: KvCache, step: TwinStep, key: GraphKey) -> tuple[float, str]:
    """Returns the largest difference of a step, and what is wrong whatever that is, "" where nothing is."""
    reference = CheckReference(runner, kv_cache, step)
    reference.run_plain(range(len(step.rows)))
    difference, fault, _ = reference.compare(key, Way(Choice(None, Reason.NONE)))
    return difference, fault or (STRAY_WRITE if reference.has_stray_writes() else "")


def _samples(max_tokens: int, max_sequences: int) -> Iterator[tuple[GraphKey, int]]:
    """Yields what steps are padded to, and of how many tokens they are: any mix as it is, decodes with a row of padding."""
    for wanted in sorted({min(wanted, max_tokens) for wanted in _NUM_TOKENS}):
        yield make_key(RuntimeMode.PIECEWISE, wanted, max_sequences=max_sequences), wanted
    rows = min(_NUM_DECODES, max_tokens, max_sequences)
    yield make_key(RuntimeMode.FULL, rows, max_sequences=max_sequences, uniform_query_len=1), max(rows - 1, 1)
