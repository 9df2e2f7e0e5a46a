"""The tokens before each sampled position, for penalties: what the router sent, what the worker kept, and the row's own."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from modelworker.worker.arrays import IndexArray, Int32Array
from modelworker.worker.batch import StepBatch
from modelworker.worker.ragged import ranges, starts_of

TokensBefore = Callable[[StepBatch, IndexArray, Int32Array], Int32Array]
"""Returns kept tokens: of some rows of a step, from given positions up to their contexts, one row after the other.

Raises PreconditionError with FEEDBACK_MISMATCH if not all of them are kept.
"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenStreams:
    """Tokens of the positions 0 .. seq_len - 1 of rows with penalties.

    Attributes:
        starts: [num_sequences], where each row's tokens start.
        token_ids: of all rows with penalties, one after the other.
        prompt_lens: [num_sequences], how many of a row's tokens are its prompt; the rest is output.
    """

    starts: IndexArray
    token_ids: Int32Array
    prompt_lens: Int32Array


def complete_history(batch: StepBatch, tokens_before: TokensBefore, failed_sources: IndexArray) -> TokenStreams | None:
    """Hot path: puts the tokens of rows with penalties together; None where no row that samples has any.

    The router's tokens cover the positions up to the history's length H. From there on stand the tokens that the worker has kept,
    up to the row's context, and then the row's own tokens, drafts included: all of them output.

    Args:
        batch: the step.
        tokens_before: returns what the worker has kept.
        failed_sources: rows that fail because a token before them was never sampled: what stands there counts for nothing.

    Raises:
        PreconditionError: FEEDBACK_MISMATCH, where neither the router's tokens nor the kept ones cover a position.
    """
    sampling = batch.sampling
    if sampling is None:
        return None
    wanted = sampling.has_penalties & batch.sample
    if not wanted.any():
        return None
    starts = starts_of(np.where(wanted, batch.seq_lens, 0))
    token_ids = np.zeros(starts[-1], np.int32)
    history = sampling.history
    sent = np.zeros(batch.num_sequences, np.int32)
    if history is not None:
        sent = np.where(wanted, history.prompt_lens + history.output_lens, 0)
        _, sources = ranges(starts_of(history.prompt_lens + history.output_lens)[:-1], sent)
        _, places = ranges(starts[:-1], sent)
        token_ids[places] = history.token_ids[sources]
    own = np.flatnonzero((wanted & (sent < batch.seq_lens))[batch.rows] & (batch.positions >= sent[batch.rows]))
    token_ids[starts[batch.rows[own]] + batch.positions[own]] = batch.token_ids[own]
    alive = wanted.copy()
    alive[failed_sources] = False
    gaps = np.flatnonzero(alive & (sent < batch.context_lens))
    if gaps.size:
        _, places = ranges(starts[gaps] + sent[gaps], batch.context_lens[gaps] - sent[gaps])
        token_ids[places] = tokens_before(batch, gaps, sent[gaps])
    prompt_lens = np.zeros(batch.num_sequences, np.int32) if history is None else history.prompt_lens
    return TokenStreams(starts=starts[:-1], token_ids=token_ids, prompt_lens=prompt_lens)
