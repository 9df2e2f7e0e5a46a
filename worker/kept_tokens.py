"""The last tokens that were sampled for some sequences, as the feedback table has them."""

from dataclasses import dataclass

import numpy as np

from modelworker.worker.arrays import IndexArray, Int32Array, Int64Array
from modelworker.worker.batch import StepBatch
from modelworker.worker.errors import PreconditionError, PreconditionReason


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeptTokens:
    """The last tokens that were sampled for n sequences. A view: valid until the table changes.

    Attributes:
        counts: [n], how many are kept, at consecutive positions; 0: none are known.
        positions: [n], of the last one.
        entries: [n], rows of `table`, any where none are known.
        table: [any, size], a token of position p stands in column p % size.
    """

    counts: Int64Array
    positions: Int64Array
    entries: IndexArray
    table: Int32Array

    def at(self, owners: IndexArray, positions: IndexArray) -> Int32Array:
        """Returns the tokens of sequences `owners` (indices, 0 .. n - 1) at positions whose tokens are kept."""
        tokens: Int32Array = self.table[self.entries[owners], positions % self.table.shape[1]]
        return tokens

    def first_gap(self, firsts: Int32Array, ends: Int32Array) -> int | None:
        """Returns the index of the first sequence of which not all tokens of the positions first .. end - 1 are kept."""
        covered = self.positions + 1
        gaps = np.flatnonzero((self.counts == 0) | (firsts < covered - self.counts) | (covered < ends))
        return int(gaps[0]) if gaps.size else None


def gap_error(batch: StepBatch, row: int, first: int, *, num_kept: int, position: int) -> PreconditionError:
    """Makes the error of a row with penalties whose tokens from position `first` on are not all known.

    Args:
        batch: the step.
        row: of it.
        first: how many positions the row's history covers.
        num_kept: how many tokens are kept of its sequence.
        position: of the last of them.
    """
    found = f"those of the positions {position + 1 - num_kept} .. {position}" if num_kept else "no tokens"
    return PreconditionError(
        PreconditionReason.FEEDBACK_MISMATCH,
        f"row {row}: the history covers {first} positions and the context {batch.context_lens[row]}, and of the sequence the "
        f"worker has {found}: send the tokens between them",
        row=row,
    )


def position_error(batch: StepBatch, row: int, *, num_rows: int, position: int | None) -> PreconditionError:
    """Makes the error of a step whose -1 stands for no token.

    Args:
        batch: the step.
        row: the first such row.
        num_rows: how many there are.
        position: of the last token that is kept for the row's sequence; None: none is.
    """
    sequence_id = int(batch.sequence_ids[row])
    others = f" ({num_rows} rows in all)" if num_rows > 1 else ""
    found = "no token is kept for it" if position is None else f"its last token has position {position}"
    return PreconditionError(
        PreconditionReason.FEEDBACK_MISMATCH,
        f"row {row}{others}: found -1 (feedback) at position {batch.context_lens[row]} of sequence {sequence_id}, but {found}",
        row=row,
        sequence_id=sequence_id,
        **({} if position is None else {"position": position}),
    )
