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
from dataclasses import dataclass

import numpy as np

from modelworker.worker.batch import FEEDBACK_TOKEN, IndexArray, Int32Array, StepBatch, StepResult, UInt64Array
from modelworker.worker.counters import Counters
from modelworker.worker.description import StepLimits
from modelworker.worker.errors import OverloadedError, PreconditionError, PreconditionReason

# What a token is whose sampling failed. No key or value is made of it: the row writes nothing.
_PLACEHOLDER_TOKEN = 0
_UNKNOWN = -1
_MAX_RETRY_AFTER_MS = 1000
_NO_ROWS: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeptTokens:
    """The last tokens that were sampled for a sequence.

    Attributes:
        token_ids: [count], at consecutive positions, at least one.
        position: of the last one.
    """

    token_ids: Int32Array
    position: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ResolvedStep:
    """A step in which every token is real.

    Attributes:
        batch: the step.
        failed_sources: rows whose token was never sampled, because the row that should have sampled it failed. Their first token is
            a placeholder: nothing of these rows may get into the KV cache.
        entries: [num_sequences] or empty, place of each row's sequence in the table, -1 where it has none.
        seconds: when it was resolved.
    """

    batch: StepBatch
    failed_sources: IndexArray
    entries: IndexArray
    seconds: float


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
        self._entry_of: dict[int, int] = {}
        self._free = _FreeEntries()
        # A token stands in the column `position % max_tokens`.
        self._tokens = np.zeros((max_sequences, max_tokens), np.int32)
        self._num_tokens = np.zeros(max_sequences, np.int64)
        self._positions = np.zeros(max_sequences, np.int64)
        self._failed = np.zeros(max_sequences, np.bool_)
        self._used = np.zeros(max_sequences, np.float64)
        # No entry is idle for long enough before this.
        self._next_expiry = -math.inf
        # Sequences that the step between `resolve` and `record` drops.
        self._finished: frozenset[int] = frozenset()

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
        return len(self._entry_of)

    def resolve(self, batch: StepBatch) -> ResolvedStep:
        """Hot path: puts the tokens in the place of -1, and checks that the step's sequences have room.

        256 rows of -1: 45 us, and 60 us to record them.

        Raises:
            PreconditionError: FEEDBACK_MISMATCH, there is no entry for a -1, or it has another position.
            OverloadedError: there would be more entries than the table holds.
        """
        seconds = self._clock()
        self._finished = frozenset()
        no_rows = np.array(_NO_ROWS, np.intp)
        if not batch.is_sequenced:
            return ResolvedStep(batch=batch, failed_sources=no_rows, entries=no_rows, seconds=seconds)
        self._expire(seconds)
        if len(batch.finished_sequence_ids):
            self._finished = frozenset(batch.finished_sequence_ids.tolist())
        entries = self._entries_of(batch.sequence_ids)
        self._check_room(batch, entries, seconds)
        if not len(entries):
            return ResolvedStep(batch=batch, failed_sources=no_rows, entries=entries, seconds=seconds)
        firsts = batch.query_starts[:-1]
        rows = np.flatnonzero(batch.token_ids[firsts] == FEEDBACK_TOKEN)
        if not rows.size:
            return ResolvedStep(batch=batch, failed_sources=no_rows, entries=entries, seconds=seconds)
        self._check_positions(batch, entries, rows)
        sources = entries[rows]
        failed = self._failed[sources]
        token_ids = batch.token_ids.copy()
        last_tokens = self._tokens[sources, self._positions[sources] % self._max_tokens]
        token_ids[firsts[rows]] = np.where(failed, np.int32(_PLACEHOLDER_TOKEN), last_tokens)
        self._counters.increment("feedback_tokens_total", len(rows))
        return ResolvedStep(
            batch=dataclasses.replace(batch, token_ids=token_ids), failed_sources=rows[failed], entries=entries, seconds=seconds
        )

    def record(self, step: ResolvedStep, result: StepResult) -> None:
        """Hot path: drops the step's finished sequences, and keeps the tokens that it sampled and which of its rows failed."""
        batch = step.batch
        for sequence_id in self._finished:
            self._drop(sequence_id)
        self._finished = frozenset()
        if not len(step.entries):
            return
        entries = self._with_new_entries(batch, step.entries)
        self._forget_failures(step, entries)
        rows = np.flatnonzero(batch.sample)
        self._keep(batch, rows, entries[rows], result.sampled_counts[rows], result.sampled_ids)
        self._used[entries[entries != _UNKNOWN]] = step.seconds

    def recent(self, sequence_id: int) -> KeptTokens | None:
        """Returns the last tokens of a sequence, as the step between `resolve` and `record` sees it; None: none are known."""
        entry = self._entry_of.get(sequence_id)
        if entry is None or self._failed[entry] or sequence_id in self._finished:
            return None
        position, count = int(self._positions[entry]), int(self._num_tokens[entry])
        columns = np.arange(position - count + 1, position + 1) % self._max_tokens
        return KeptTokens(token_ids=self._tokens[entry, columns], position=position)

    def release(self, sequence_ids: UInt64Array) -> int:
        """Drops entries. Returns how many there were."""
        self._expire(self._clock())
        return sum(self._drop(sequence_id) for sequence_id in sequence_ids.tolist())

    def clear(self) -> None:
        """Drops all entries."""
        self._entry_of.clear()
        self._free = _FreeEntries()
        self._finished = frozenset()

    # -- look-ups --

    def _entries_of(self, sequence_ids: UInt64Array) -> IndexArray:
        """[num_sequences] or empty: finished sequences have none."""
        entry_of, finished = self._entry_of, self._finished
        ids = sequence_ids.tolist()
        if finished:
            return np.array([_UNKNOWN if each in finished else entry_of.get(each, _UNKNOWN) for each in ids], np.intp)
        return np.array([entry_of.get(each, _UNKNOWN) for each in ids], np.intp)

    def _check_room(self, batch: StepBatch, entries: IndexArray, seconds: float) -> None:
        num_new = np.count_nonzero(batch.sample & (entries == _UNKNOWN)) if len(entries) else 0
        num_left = len(self) - sum(sequence_id in self._entry_of for sequence_id in self._finished)
        if num_new and num_left + num_new > self._max_sequences:
            self._counters.increment("feedback_refusals_total", reason="table_full")
            wait_ms = min(math.ceil((self._next_expiry - seconds) * 1000), _MAX_RETRY_AFTER_MS)
            raise OverloadedError(
                f"sequence_ids: {num_new} new sequences beside {num_left} whose tokens are kept, expected at most "
                f"max_feedback_sequences = {self._max_sequences} in all: name those that have ended in finished_sequence_ids",
                retry_after_ms=max(wait_ms, 1),
            )

    def _check_positions(self, batch: StepBatch, entries: IndexArray, rows: IndexArray) -> None:
        sources, context_lens = entries[rows], batch.context_lens[rows]
        positions = np.where(sources == _UNKNOWN, _UNKNOWN, self._positions[sources])
        mismatched = np.flatnonzero(positions != context_lens)
        if not mismatched.size:
            return
        self._counters.increment("feedback_refusals_total", reason="mismatch")
        row, context_len, position = (int(array[mismatched[0]]) for array in (rows, context_lens, positions))
        sequence_id = int(batch.sequence_ids[row])
        others = f" ({len(mismatched)} rows in all)" if len(mismatched) > 1 else ""
        if position == _UNKNOWN:
            found, metadata = "no token is kept for it", {}
        else:
            found, metadata = f"its last token has position {position}", {"position": position}
        raise PreconditionError(
            PreconditionReason.FEEDBACK_MISMATCH,
            f"row {row}{others}: found -1 (feedback) at position {context_len} of sequence {sequence_id}, but {found}",
            row=row,
            sequence_id=sequence_id,
            **metadata,
        )

    # -- changes --

    def _with_new_entries(self, batch: StepBatch, entries: IndexArray) -> IndexArray:
        """Makes entries for the sequences that sample and have none."""
        new_rows = np.flatnonzero(batch.sample & (entries == _UNKNOWN))
        if not new_rows.size:
            return entries
        new_entries = [self._free.take() for _ in range(len(new_rows))]
        self._entry_of.update(zip(batch.sequence_ids[new_rows].tolist(), new_entries, strict=True))
        entries = entries.copy()
        entries[new_rows] = new_entries
        self._num_tokens[new_entries] = 0
        self._failed[new_entries] = False
        return entries

    def _forget_failures(self, step: ResolvedStep, entries: IndexArray) -> None:
        """Drops the failed entries of rows that were given real tokens and sample nothing: no token follows them."""
        silent = np.flatnonzero(~step.batch.sample & (entries != _UNKNOWN))
        if silent.size:
            silent = np.setdiff1d(silent[self._failed[entries[silent]]], step.failed_sources)
            for sequence_id in step.batch.sequence_ids[silent].tolist():
                self._drop(sequence_id)

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
            (batch.query_lens[rows] == 1 + draft_lens)
            & (self._positions[entries] == firsts - 1)
            & (self._tokens[entries, (firsts - 1) % self._max_tokens] == before)
            & (counts > 0)
        )
        num_before = np.where(continues, self._num_tokens[entries], 0)
        self._num_tokens[entries] = np.minimum(num_before + counts, self._max_tokens)
        self._failed[entries] = counts == 0
        # A row that failed advances as if it had sampled one token.
        self._positions[entries] = firsts + np.maximum(counts, 1) - 1
        if len(sampled_ids) == len(rows) and counts.all():
            self._tokens[entries, firsts % self._max_tokens] = sampled_ids
            return
        starts = np.cumsum(counts) - counts
        positions = np.arange(len(sampled_ids)) + np.repeat(firsts - starts, counts)
        # Of tokens for one column the last one stays.
        self._tokens[np.repeat(entries, counts), positions % self._max_tokens] = sampled_ids

    def _expire(self, seconds: float) -> None:
        if seconds < self._next_expiry:
            return
        oldest = seconds - self._idle_seconds
        idle = [sequence_id for sequence_id, entry in self._entry_of.items() if self._used[entry] <= oldest]
        for sequence_id in idle:
            self._drop(sequence_id)
        self._counters.increment("feedback_evictions_total", len(idle), reason="idle")
        first_used = min((self._used[entry] for entry in self._entry_of.values()), default=seconds)
        self._next_expiry = float(first_used) + self._idle_seconds

    def _drop(self, sequence_id: int) -> bool:
        entry = self._entry_of.pop(sequence_id, None)
        if entry is None:
            return False
        self._free.give_back(entry)
        return True


class _FreeEntries:
    """Numbers 0, 1, 2 ... of which those that were given back are taken first."""

    def __init__(self) -> None:
        self._num_taken = 0
        self._given_back: list[int] = []

    def take(self) -> int:
        if self._given_back:
            return self._given_back.pop()
        self._num_taken += 1
        return self._num_taken - 1

    def give_back(self, entry: int) -> None:
        self._given_back.append(entry)
