"""The tokens before each sampled position, for penalties: what the router sent, what the worker kept, and the row's own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from modelworker.worker.batch import BoolArray, IndexArray, Int32Array, StepBatch
from modelworker.worker.errors import PreconditionError, PreconditionReason
from modelworker.worker.ragged import ranges, starts_of


class KeptTokens(Protocol):
    """The last tokens that were sampled for a sequence."""

    @property
    def token_ids(self) -> Int32Array:
        """[n], in order."""

    @property
    def position(self) -> int:
        """Of the last one in its sequence."""


RecentTokens = Callable[[int], KeptTokens | None]
"""Returns what is kept of a sequence, by its id; None: nothing."""


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


def complete_history(batch: StepBatch, recent: RecentTokens, failed_sources: IndexArray) -> TokenStreams | None:
    """Hot path: puts the tokens of rows with penalties together; None where no row that samples has any.

    The router's tokens cover the positions up to the history's length H. From there on stand the tokens that the worker has kept,
    up to the row's context, and then the row's own tokens, drafts included: all of them output.

    Args:
        batch: the step.
        recent: what the worker has kept.
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
    _fill_gaps(batch, alive, sent, starts, token_ids, recent)
    prompt_lens = np.zeros(batch.num_sequences, np.int32) if history is None else history.prompt_lens
    return TokenStreams(starts=starts[:-1], token_ids=token_ids, prompt_lens=prompt_lens)


def _fill_gaps(
    batch: StepBatch, wanted: BoolArray, sent: Int32Array, starts: IndexArray, token_ids: Int32Array, recent: RecentTokens
) -> None:
    """Fills the positions from the history's length up to the context with kept tokens."""
    for row in np.flatnonzero(wanted & (sent < batch.context_lens)).tolist():
        first, end = int(sent[row]), int(batch.context_lens[row])
        kept = recent(int(batch.sequence_ids[row])) if len(batch.sequence_ids) else None
        kept_start = 0 if kept is None else kept.position + 1 - len(kept.token_ids)
        if kept is None or first < kept_start or kept.position + 1 < end:
            found = "no tokens" if kept is None else f"those of the positions {kept_start} .. {kept.position}"
            raise PreconditionError(
                PreconditionReason.FEEDBACK_MISMATCH,
                f"row {row}: the history covers {first} positions and the context {end}, and of the sequence the worker has "
                f"{found}: send the tokens between them",
                row=row,
            )
        token_ids[starts[row] + first : starts[row] + end] = kept.token_ids[first - kept_start : end - kept_start]


def nothing_kept(_sequence_id: int) -> None:
    """Knows no sequence: what is kept where there is no token feedback."""
    return
