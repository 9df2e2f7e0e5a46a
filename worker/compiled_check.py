"""Checks generated code before readiness: prompts through compiled pieces and through plain modules."""

import numpy as np

from modelworker.graphs.dispatch import Choice, Reason
from modelworker.graphs.settings import RuntimeMode
from modelworker.worker.check_batch import CheckRow, make_check_batch
from modelworker.worker.check_reference import relative_difference
from modelworker.worker.description import Degradation
from modelworker.worker.graph_check import BOUND
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.step_runner import StepRunner, Way

_NUM_TOKENS = (1, 17, 150)


def check_compiled(
    runner: StepRunner, kv_cache: KvCache, *, vocab_size: int, max_tokens: int
) -> tuple[tuple[str, ...], tuple[Degradation, ...]]:
    """Compares the hidden states of prompts, and takes compiled pieces out of service where they differ.

    Args:
        runner: of the decoder.
        kv_cache: holds garbage afterwards.
        vocab_size: of the model.
        max_tokens: of a prompt.

    Returns:
        what was found, and what is degraded by it.
    """
    if RuntimeMode.NONE not in runner.compiled_modes:
        return (), ()
    bound, worst = BOUND[kv_cache.geometry.dtype], 0.0
    for wanted in _NUM_TOKENS:
        worst = max(worst, _difference(runner, kv_cache, min(wanted, max_tokens), vocab_size))
    if worst <= bound:
        return (f"compiled pieces and plain modules agree: {worst:.1e} of the mean, bound {bound:g}",), ()
    message = f"compiled pieces and plain modules do not agree: {worst:.1e} of the mean, bound {bound:g}: plain modules are served"
    runner.disable_compiled()
    return (message,), (Degradation(reason="compiled_failed_self_check", message=message),)


def _difference(runner: StepRunner, kv_cache: KvCache, num_tokens: int, vocab_size: int) -> float:
    width = -(-num_tokens // kv_cache.geometry.block_size)
    blocks = np.arange(1, width + 1, dtype=np.int32)
    tokens = np.random.default_rng(num_tokens).integers(0, vocab_size, num_tokens).astype(np.int32)
    batch = make_check_batch([CheckRow(token_ids=tokens, context_len=0, blocks=blocks)])
    none = Choice(None, Reason.NONE)
    states = [
        runner.decode(batch, runner.stage(batch, None), Way(none, is_plain=is_plain)).hidden_states.clone()
        for is_plain in (True, False)
    ]
    difference = relative_difference(states[1], states[0])
    return difference if difference == difference else float("inf")  # noqa: PLR0124  (NaN)
