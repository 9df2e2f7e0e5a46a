"""Where a step samples: after the last token of a row, and after each token before it that drafts follow."""

from dataclasses import dataclass

import numpy as np

from modelworker.worker.batch import IndexArray, Int32Array, StepBatch
from modelworker.worker.ragged import ranges, starts_of


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampledPositions:
    """The sampled positions of a step, or some of them; those of one row stand together, in order.

    Attributes:
        rows: [n], the row of each.
        tokens: [n], index of the token after which it samples.
        positions: [n], position of the sampled token in its sequence.
        offsets: [n], how many sampled positions of its row stand before it: 0 .. draft_len.
    """

    rows: IndexArray
    tokens: IndexArray
    positions: Int32Array
    offsets: IndexArray

    def __len__(self) -> int:
        """Number of positions."""
        return len(self.rows)

    def part(self, part: slice) -> "SampledPositions":
        """Returns some of them."""
        return SampledPositions(
            rows=self.rows[part], tokens=self.tokens[part], positions=self.positions[part], offsets=self.offsets[part]
        )


def sampled_positions(batch: StepBatch) -> SampledPositions:
    """Hot path: finds the sampled positions of a step."""
    num_rows = batch.num_sequences
    if batch.num_tokens == num_rows and np.count_nonzero(batch.sample) == num_rows:  # One token in each row, as in most decodes.
        every = np.arange(num_rows)
        return SampledPositions(rows=every, tokens=every, positions=batch.seq_lens, offsets=np.zeros(num_rows, np.intp))
    rows = np.flatnonzero(batch.sample)
    ends, seq_lens, drafts = batch.query_starts[1:][rows].astype(np.intp), batch.seq_lens[rows], batch.draft_lens[rows]
    if not drafts.any():
        return SampledPositions(rows=rows, tokens=ends - 1, positions=seq_lens, offsets=np.zeros(len(rows), np.intp))
    counts = 1 + drafts
    owners, tokens = ranges(ends - counts, counts)
    offsets = np.arange(len(owners)) - starts_of(counts)[owners]
    positions = (seq_lens - drafts)[owners] + offsets
    return SampledPositions(rows=rows[owners], tokens=tokens, positions=positions.astype(np.int32), offsets=offsets)
