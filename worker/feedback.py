"""Token feedback: the last sampled tokens of each sequence, so that a router can send a step before it has seen the one before.

In a step, token id -1 stands for the last token that was sampled for the row's sequence. A row with d drafts samples 1 to 1 + d
tokens, at the positions context_len + query_len - d and on; the position of the last one is

    context_len + query_len - (1 + d - sampled_count)

and -1 is valid in a row of the sequence whose context_len equals it. Source: "Feedback" of the protocol.

The table is in host memory: the tokens of a step come there anyway, for its answer, before the next step is staged.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from modelworker.worker.arrays import IndexArray, Int32Array, UInt64Array
from modelworker.worker.batch import FEEDBACK_TOKEN, StepBatch
from modelworker.worker.counters import Counters
from modelworker.worker.description import StepLimits
from modelworker.worker.errors import OverloadedError
from modelworker.worker.kept_tokens import KeptTokens, gap_error, position_error
from modelworker.worker.ragged import ranges
from modelworker.worker.result import StepResult
from modelworker.worker.sequence_index import UNKNOWN, SequenceIndex

# What a token is whose sampling failed. No key or value is made of it: the row writes nothing.
_PLACEHOLDER_TOKEN = 0
_MAX_RETRY_AFTER_MS = 1000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ResolvedStep:
    """A step in which every token is real.

    Attributes:
        batch: the step.
        entries: [num_sequences] or empty, place of each row's sequence in the table, -1 where it has none.
        failed_sources: rows whose token was never sampled, because the row that should have sampled it failed. Their first token is
            a placeholder: nothing of these rows may get into the KV cache.
        num_fed_back: how many rows had a token in the place of -1.
        seconds: when it was resolved.
    """

    batch: StepBatch
    entries: IndexArray = field(default_factory=lambda: np.zeros(0, np.intp))
    failed_sources: IndexArray = field(default_factory=lambda: np.zeros(0, np.intp))
    num_fed_back: int = 0
    seconds: float = 0.0


class FeedbackTable:
    """The last sampled tokens of each sequence. Belongs to the engine thread.

    A step is executed between `resolve`, which changes no entry that is alive, and `record`: a step that is refused in between
    leaves the table as it was.

    Args:
        max_sequences: entries at most.
        max_tokens: kept for each sequence.
        idle_seconds: after which an entry that no step named is dropped.
        counters: where it counts.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        max_sequences: int,
        max_tokens: int,
        idle_seconds: float,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._idle_seconds = idle_seconds
        self._counters = counters
        self._clock = clock
        self._index = SequenceIndex(max_sequences)
        # Of each entry. A token stands in the column `position % max_tokens`.
        self._tokens = np.zeros((max_sequences, max_tokens), np.int32)
        self._num_tokens = np.zeros(max_sequences, np.int64)
        self._last_tokens = np.zeros(max_sequences, np.int32)
        self._positions = np.zeros(max_sequences, np.int64)
        self._failed = np.zeros(max_sequences, np.bool_)
        self._used = np.zeros(max_sequences, np.float64)
        # No entry is idle for long enough before this.
        self._next_expiry = -math.inf
        # Sequences that the step between `resolve` and `record` drops.
        self._finished: UInt64Array = np.zeros(0, np.uint64)

    @classmethod
    def of(cls, limits: StepLimits, *, max_model_len: int, idle_seconds: float, counters: Counters) -> "FeedbackTable":
        """Makes a table within a worker's limits: as many tokens of a sequence as steps may be in flight."""
        return cls(
            max_sequences=limits.max_feedback_sequences,
            max_tokens=min(limits.max_steps_in_flight, max_model_len),
            idle_seconds=idle_seconds,
            counters=counters,
        )

    def __len__(self) -> int:
        return len(self._index)

    def resolve(self, batch: StepBatch) -> ResolvedStep:
        """Hot path: puts the tokens in the place of -1, and checks that the step's sequences have room.

        256 rows of -1 take 45 us, and 44 us in `record`.

        Raises:
            PreconditionError: FEEDBACK_MISMATCH, there is no entry for a -1, or it has another position.
            OverloadedError: there would be more entries than the table holds.
        """
        seconds = self._clock()
        self._finished = np.zeros(0, np.uint64)
        if not batch.is_sequenced:
            return ResolvedStep(batch=batch)
        self._expire(seconds)
        self._finished = batch.finished_sequence_ids
        entries = self._entries_of(batch.sequence_ids)
        self._check_room(batch, entries, seconds)
        if not len(entries):
            return ResolvedStep(batch=batch, entries=entries, seconds=seconds)
        firsts = batch.query_starts[:-1]
        rows = np.flatnonzero(batch.token_ids[firsts] == FEEDBACK_TOKEN)
        if not rows.size:
            return ResolvedStep(batch=batch, entries=entries, seconds=seconds)
        sources = entries[rows]
        self._check_positions(batch, rows, sources)
        token_ids = batch.token_ids.copy()
        token_ids[firsts[rows]] = self._last_tokens[sources]
        failed = self._failed[sources]
        batch = dataclasses.replace(batch, token_ids=token_ids)
        return ResolvedStep(batch=batch, entries=entries, failed_sources=rows[failed], num_fed_back=len(rows), seconds=seconds)

    def record(self, step: ResolvedStep, result: StepResult) -> None:
        """Hot path: drops the step's finished sequences, and keeps the tokens that it sampled and which of its rows failed."""
        batch = step.batch
        if step.num_fed_back:
            self._counters.increment("feedback_tokens_total", step.num_fed_back)
        if len(self._finished):
            self._index.remove(self._finished)
            self._finished = np.zeros(0, np.uint64)
        if not len(step.entries):
            return
        entries = self._with_new_entries(batch, step.entries)
        rows = np.flatnonzero(batch.sample)
        if len(rows) < len(entries):
            self._forget_failures(step, entries)
        self._keep(batch, rows, entries[rows], result.sampled_counts[rows], result.sampled_ids)
        self._used[entries[entries != UNKNOWN]] = step.seconds

    def recent(self, sequence_ids: UInt64Array) -> KeptTokens:
        """Returns the last tokens of sequences, as the step between `resolve` and `record` sees them."""
        return self._kept_of(self._entries_of(sequence_ids))

    def tokens_before(self, batch: StepBatch, rows: IndexArray, firsts: Int32Array) -> Int32Array:
        """Hot path: returns the tokens of some rows from given positions up to their contexts, one row after the other.

        Args:
            batch: a step between `resolve` and `record`.
            rows: [n], of it.
            firsts: [n], positions, each below the row's context_len.

        Raises:
            PreconditionError: FEEDBACK_MISMATCH, of a row not all of them are kept.
        """
        ends = batch.context_lens[rows]
        has_ids = len(batch.sequence_ids) > 0
        kept = self.recent(batch.sequence_ids[rows]) if has_ids else self._kept_of(np.full(len(rows), UNKNOWN, np.intp))
        gap = kept.first_gap(firsts, ends)
        if gap is not None:
            self._counters.increment("feedback_refusals_total", reason="mismatch")
            raise gap_error(
                batch, int(rows[gap]), int(firsts[gap]), num_kept=int(kept.counts[gap]), position=int(kept.positions[gap])
            )
        return kept.at(*ranges(firsts, ends - firsts))

    def release(self, sequence_ids: UInt64Array) -> int:
        """Drops entries. Returns how many there were."""
        self._expire(self._clock())
        return self._index.remove(sequence_ids)

    def clear(self) -> None:
        """Drops all entries."""
        self._index.clear()
        self._next_expiry = -math.inf
        self._finished = np.zeros(0, np.uint64)

    def set_time(self, seconds: float) -> None:
        """Makes a moment the present from now on, in the place of the clock: what is idle is then the same whenever it is asked."""
        self._clock = lambda: seconds

    # -- look-ups --

    def _entries_of(self, sequence_ids: UInt64Array) -> IndexArray:
        """[number of ids]: finished sequences have none."""
        entries = self._index.find(sequence_ids)
        if len(self._finished):
            entries[np.isin(sequence_ids, self._finished)] = UNKNOWN
        return entries

    def _kept_of(self, entries: IndexArray) -> KeptTokens:
        is_known = (entries != UNKNOWN) & ~self._failed[entries]
        return KeptTokens(
            counts=np.where(is_known, self._num_tokens[entries], 0),
            positions=self._positions[entries],
            entries=entries,
            table=self._tokens,
        )

    def _check_room(self, batch: StepBatch, entries: IndexArray, seconds: float) -> None:
        num_new = np.count_nonzero(batch.sample & (entries == UNKNOWN)) if len(entries) else 0
        if not num_new:
            return
        num_left = len(self) - np.count_nonzero(np.isin(self._index.ids, self._finished))
        if num_left + num_new > self._max_sequences:
            self._counters.increment("feedback_refusals_total", reason="table_full")
            wait_ms = min(math.ceil((self._next_expiry - seconds) * 1000), _MAX_RETRY_AFTER_MS)
            raise OverloadedError(
                f"sequence_ids: {num_new} new sequences beside {num_left} whose tokens are kept, expected at most "
                f"max_feedback_sequences = {self._max_sequences} in all: name those that have ended in finished_sequence_ids",
                retry_after_ms=max(wait_ms, 1),
            )

    def _check_positions(self, batch: StepBatch, rows: IndexArray, sources: IndexArray) -> None:
        fits = (self._positions[sources] == batch.context_lens[rows]) & (sources != UNKNOWN)
        if fits.all():
            return
        self._counters.increment("feedback_refusals_total", reason="mismatch")
        mismatched = np.flatnonzero(~fits)
        row, source = int(rows[mismatched[0]]), int(sources[mismatched[0]])
        position = int(self._positions[source]) if source != UNKNOWN else None
        raise position_error(batch, row, num_rows=len(mismatched), position=position)

    # -- changes --

    def _with_new_entries(self, batch: StepBatch, entries: IndexArray) -> IndexArray:
        """Makes entries for the sequences that sample and have none."""
        new_rows = np.flatnonzero(batch.sample & (entries == UNKNOWN))
        if not new_rows.size:
            return entries
        entries = entries.copy()
        new_entries = entries[new_rows] = self._index.add(batch.sequence_ids[new_rows])
        self._num_tokens[new_entries] = 0
        return entries

    def _forget_failures(self, step: ResolvedStep, entries: IndexArray) -> None:
        """Drops the failed entries of rows that were given real tokens and sample nothing: no token follows them."""
        silent = np.flatnonzero(~step.batch.sample & (entries != UNKNOWN))
        silent = np.setdiff1d(silent[self._failed[entries[silent]]], step.failed_sources)
        if silent.size:
            self._index.remove(step.batch.sequence_ids[silent])

    def _keep(self, batch: StepBatch, rows: IndexArray, entries: IndexArray, counts: Int32Array, sampled_ids: Int32Array) -> None:
        """Keeps what some rows sampled.

        Args:
            batch: the step.
            rows: that sample.
            entries: of these rows.
            counts: [number of rows], tokens sampled for each; 0: it failed.
            sampled_ids: [sum of counts].
        """
        draft_lens = batch.draft_lens[rows]
        # Positions of the first sampled token, and whether the token before it is the last one kept.
        firsts = batch.seq_lens[rows] - draft_lens
        before = batch.token_ids[batch.query_starts[1:][rows] - 1 - draft_lens]
        continues = (
            (self._positions[entries] == firsts - 1)
            & (self._last_tokens[entries] == before)
            & (batch.query_lens[rows] == 1 + draft_lens)
            & (counts > 0)
        )
        self._num_tokens[entries] = np.minimum(self._num_tokens[entries] * continues + counts, self._max_tokens)
        self._failed[entries] = counts == 0
        # A row that failed advances as if it had sampled one token.
        self._positions[entries] = firsts + np.maximum(counts, 1) - 1
        if len(sampled_ids) == len(rows) and counts.all():
            self._last_tokens[entries] = sampled_ids
            self._tokens[entries, firsts % self._max_tokens] = sampled_ids
            return
        ends = np.cumsum(counts)
        succeeded = counts > 0
        self._last_tokens[entries] = _PLACEHOLDER_TOKEN
        self._last_tokens[entries[succeeded]] = sampled_ids[ends[succeeded] - 1]
        positions = np.arange(len(sampled_ids)) + np.repeat(firsts - (ends - counts), counts)
        # Of tokens for one column the last one stays.
        self._tokens[np.repeat(entries, counts), positions % self._max_tokens] = sampled_ids

    def _expire(self, seconds: float) -> None:
        if seconds < self._next_expiry:
            return
        idle = self._used[self._index.places] <= seconds - self._idle_seconds
        if idle.any():
            self._counters.increment("feedback_evictions_total", self._index.remove(self._index.ids[idle]), reason="idle")
        first_used = self._used[self._index.places].min(initial=seconds)
        self._next_expiry = float(first_used) + self._idle_seconds
