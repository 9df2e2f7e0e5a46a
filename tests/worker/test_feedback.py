"""The table of sampled tokens, against one of plain dictionaries and lists."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworker.worker.batch import FEEDBACK_TOKEN, StepBatch
from modelworker.worker.check_batch import CheckRow, make_check_batch
from modelworker.worker.counters import Counters
from modelworker.worker.errors import OverloadedError, PreconditionError, PreconditionReason
from modelworker.worker.feedback import FeedbackTable, ResolvedStep
from modelworker.worker.result import GraphExecution, GraphMode, StepResult

MAX_SEQUENCES, MAX_TOKENS, IDLE_SECONDS = 4, 3, 10.0
NEVER_GIVEN = 77


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a step and what it samples: nothing means that it fails."""

    sequence_id: int
    context_len: int
    token_ids: tuple[int, ...]
    draft_len: int = 0
    sampled: tuple[int, ...] = ()
    samples: bool = True


def step_of(rows: Sequence[Row], *, finished: Sequence[int] = (), step_id: int = 1) -> tuple[StepBatch, StepResult]:
    batch = make_check_batch(
        [
            CheckRow(token_ids=np.array(row.token_ids, np.int32), context_len=row.context_len, blocks=np.array([1], np.int32))
            for row in rows
        ]
    )
    sampled = [row.sampled if row.samples else () for row in rows]
    result = StepResult(
        sampled_counts=np.array([len(tokens) for tokens in sampled], np.int32),
        sampled_ids=np.array([token for tokens in sampled for token in tokens], np.int32),
        logprobs=None,
        sequence_errors=(),
        tainted_block_ids=np.zeros(0, np.int32),
        graph=GraphExecution(mode=GraphMode.NONE, padded_tokens=0, padded_sequences=0, compiled=False, fallback_reason=""),
    )
    return dataclasses.replace(
        batch,
        step_id=step_id,
        sequence_ids=np.array([row.sequence_id for row in rows], np.uint64),
        draft_lens=np.array([row.draft_len for row in rows], np.int32),
        sample=np.array([row.samples for row in rows], np.bool_),
        finished_sequence_ids=np.array(finished, np.uint64),
    ), result


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class World:
    """A table, its clock and what it counted."""

    def __init__(self, *, max_sequences: int = MAX_SEQUENCES, max_tokens: int = MAX_TOKENS) -> None:
        self.clock, self.counters = Clock(), Counters()
        self.table = FeedbackTable(
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            idle_seconds=IDLE_SECONDS,
            counters=self.counters,
            clock=self.clock,
        )

    def run(self, *rows: Row, finished: Sequence[int] = (), step_id: int = 1) -> ResolvedStep:
        batch, result = step_of(rows, finished=finished, step_id=step_id)
        step = self.table.resolve(batch)
        self.table.record(step, result)
        return step

    def refusal(self, *rows: Row, finished: Sequence[int] = ()) -> PreconditionError | OverloadedError:
        batch, _ = step_of(rows, finished=finished)
        with pytest.raises((PreconditionError, OverloadedError)) as caught:
            self.table.resolve(batch)
        return caught.value

    def tokens(self, sequence_id: int) -> tuple[list[int], int] | None:
        kept = self.table.recent(np.array([sequence_id], np.uint64))
        count, last = int(kept.counts[0]), int(kept.positions[0])
        positions = np.arange(last - count + 1, last + 1)
        return (kept.at(np.zeros(count, np.intp), positions).tolist(), last) if count else None

    def count(self, key: str) -> int:
        return self.counters.snapshot().get(key, 0)


def prompt(sequence_id: int, *, sampled: int, length: int = 5) -> Row:
    return Row(sequence_id=sequence_id, context_len=0, token_ids=(9,) * length, sampled=(sampled,))


def feedback(sequence_id: int, context_len: int, *sampled: int, samples: bool = True) -> Row:
    return Row(
        sequence_id=sequence_id, context_len=context_len, token_ids=(FEEDBACK_TOKEN,), sampled=tuple(sampled), samples=samples
    )


def test_a_token_is_fed_back_at_the_position_after_its_row() -> None:
    world = World()
    world.run(prompt(7, sampled=50), prompt(8, sampled=60, length=3))
    step = world.run(feedback(8, 3, 61), feedback(7, 5, 51))
    assert step.batch.token_ids.tolist() == [60, 50]
    assert step.failed_sources.size == 0
    assert (world.tokens(7), world.tokens(8)) == (([50, 51], 6), ([60, 61], 4))
    assert world.count("feedback_tokens_total") == 2


def test_the_request_s_own_array_keeps_its_minus_ones() -> None:
    world = World()
    world.run(prompt(7, sampled=50))
    batch, _ = step_of([feedback(7, 5, 51)])
    world.table.resolve(batch)
    assert batch.token_ids.tolist() == [FEEDBACK_TOKEN]


def test_as_many_tokens_are_kept_as_steps_may_be_in_flight() -> None:
    world = World()
    world.run(prompt(7, sampled=50))
    for position in range(5, 12):
        world.run(feedback(7, position, 46 + position))
    assert world.tokens(7) == ([55, 56, 57], 12)


@pytest.mark.parametrize("num_accepted", [0, 1, 2, 3])
def test_rejected_drafts_do_not_advance_the_position(num_accepted: int) -> None:
    world = World(max_tokens=8)
    world.run(prompt(7, sampled=50))
    sampled = tuple(range(51, 52 + num_accepted))
    world.run(Row(sequence_id=7, context_len=5, token_ids=(FEEDBACK_TOKEN, 51, 52, 53), draft_len=3, sampled=sampled))
    assert world.tokens(7) == ([50, *sampled], 6 + num_accepted)
    assert world.run(feedback(7, 6 + num_accepted, 70)).batch.token_ids.tolist() == [sampled[-1]]


def test_of_more_tokens_than_are_kept_the_last_ones_stay() -> None:
    world = World()
    world.run(prompt(7, sampled=50))
    world.run(Row(sequence_id=7, context_len=5, token_ids=(50, 1, 2, 3, 4), draft_len=4, sampled=(1, 2, 3, 4, 5)))
    assert world.tokens(7) == ([3, 4, 5], 10)


def test_a_real_token_goes_on_where_it_is_the_sampled_one_and_else_starts_anew() -> None:
    world = World()
    world.run(prompt(7, sampled=50), prompt(8, sampled=60))
    rows = [Row(sequence_id=number, context_len=5, token_ids=(50,), sampled=(70,)) for number in (7, 8)]
    world.run(*rows)
    assert (world.tokens(7), world.tokens(8)) == (([50, 70], 6), ([70], 6))
    world.run(Row(sequence_id=7, context_len=0, token_ids=(9, 9, 9, 9, 9, 50, 70), sampled=(80,)))
    assert world.tokens(7) == ([80], 7)


def test_a_new_sequence_in_the_place_of_a_finished_one_has_none_of_its_tokens() -> None:
    world = World()
    world.run(prompt(7, sampled=50))
    world.run(Row(sequence_id=8, context_len=5, token_ids=(50,), sampled=(51,)), finished=[7])
    assert world.tokens(8) == ([51], 6)


@pytest.mark.parametrize(("context_len", "found"), [(4, "position 5"), (6, "position 5"), (0, "position 5")])
def test_another_position_refuses_the_step_and_says_what_is_kept(context_len: int, found: str) -> None:
    world = World()
    world.run(prompt(7, sampled=50), prompt(8, sampled=60))
    error = world.refusal(feedback(8, 5, 1), feedback(7, context_len, 1))
    assert isinstance(error, PreconditionError)
    assert error.reason is PreconditionReason.FEEDBACK_MISMATCH
    assert f"row 1: found -1 (feedback) at position {context_len} of sequence 7, but its last token has {found}" in str(error)
    assert error.metadata == {"row": "1", "sequence_id": "7", "position": "5"}
    assert world.tokens(8) == ([60], 5)
    assert world.count('feedback_refusals_total{reason="mismatch"}') == 1


def kept_worlds_step() -> tuple[World, StepBatch]:
    """A world that keeps 50, 51, 52 of sequence 7 (positions 5 .. 7) and 60 of 8 (position 5), and a step that follows."""
    world = World()
    world.run(prompt(7, sampled=50), prompt(8, sampled=60))
    world.run(feedback(7, 5, 51))
    world.run(feedback(7, 6, 52))
    batch, _ = step_of([feedback(8, 5, 1), feedback(7, 7, 1)])
    return world, world.table.resolve(batch).batch


def test_kept_tokens_of_many_rows_come_one_row_after_the_other() -> None:
    world, batch = kept_worlds_step()
    assert world.table.tokens_before(batch, np.array([1]), np.array([5], np.int32)).tolist() == [50, 51]
    batch = dataclasses.replace(batch, context_lens=batch.context_lens + 1)
    assert world.table.tokens_before(batch, np.array([0, 1]), np.array([5, 6], np.int32)).tolist() == [60, 51, 52]


@pytest.mark.parametrize(
    ("firsts", "contexts", "message"),
    [
        ([5, 4], [6, 7], "row 1: the history covers 4 positions and the context 7, .* those of the positions 5 .. 7"),
        ([5, 5], [6, 9], "row 1: the history covers 5 positions and the context 9, .* those of the positions 5 .. 7"),
        ([4, 4], [6, 9], "row 0: the history covers 4 positions and the context 6, .* those of the positions 5 .. 5"),
    ],
)
def test_a_gap_before_the_kept_tokens_refuses_the_step_names_the_row_and_counts(
    firsts: list[int], contexts: list[int], message: str
) -> None:
    world, batch = kept_worlds_step()
    batch = dataclasses.replace(batch, context_lens=np.array(contexts, np.int32))
    with pytest.raises(PreconditionError, match=message) as caught:
        world.table.tokens_before(batch, np.array([0, 1]), np.array(firsts, np.int32))
    assert caught.value.reason is PreconditionReason.FEEDBACK_MISMATCH
    assert world.count('feedback_refusals_total{reason="mismatch"}') == 1


@pytest.mark.parametrize("ids", [[], [8, 99]])
def test_a_row_of_whose_sequence_nothing_is_known_has_a_gap(ids: list[int]) -> None:
    world, batch = kept_worlds_step()
    batch = dataclasses.replace(batch, sequence_ids=np.array(ids, np.uint64))
    with pytest.raises(PreconditionError, match=r"row 1: the history covers 5 positions and the context 7, .* has no tokens"):
        world.table.tokens_before(batch, np.array([1]), np.array([5], np.int32))


def test_tokens_are_counted_as_fed_back_when_their_step_is_executed() -> None:
    world = World()
    world.run(prompt(7, sampled=50))
    batch, result = step_of([feedback(7, 5, 51)])
    world.table.resolve(batch)  # And then refused, by what is looked at before it is executed.
    step = world.table.resolve(batch)
    assert world.count("feedback_tokens_total") == 0
    world.table.record(step, result)
    assert world.count("feedback_tokens_total") == 1


def test_a_sequence_of_which_nothing_is_kept_refuses_the_step() -> None:
    world = World()
    error = world.refusal(feedback(2**64 - 1, 5, 1))
    assert "sequence 18446744073709551615, but no token is kept for it" in str(error)


def test_a_failed_row_advances_and_fails_those_that_feed_on_it_until_a_real_token_comes() -> None:
    world = World()
    world.run(prompt(7, sampled=50), prompt(8, sampled=60))
    world.run(feedback(7, 5), feedback(8, 5, 61))
    assert world.tokens(7) is None
    step = world.run(feedback(8, 6, 62), feedback(7, 6))
    assert step.failed_sources.tolist() == [1]
    assert step.batch.token_ids[1] >= 0
    assert world.run(feedback(7, 7)).failed_sources.tolist() == [0]
    assert isinstance(world.refusal(feedback(7, 6)), PreconditionError)
    assert world.run(Row(sequence_id=7, context_len=6, token_ids=(52,), sampled=(53,))).failed_sources.size == 0
    assert world.tokens(7) == ([53], 7)
    assert world.run(feedback(7, 7, 54)).batch.token_ids.tolist() == [53]


def test_a_failed_sequence_that_is_given_real_tokens_without_sampling_has_no_token_to_feed_back() -> None:
    world = World()
    world.run(prompt(7, sampled=50))
    world.run(feedback(7, 5))
    assert world.run(feedback(7, 6, samples=False)).failed_sources.tolist() == [0]
    assert world.run(feedback(7, 6, samples=False)).failed_sources.tolist() == [0]
    world.run(Row(sequence_id=7, context_len=0, token_ids=(1, 2), samples=False))
    assert len(world.table) == 0
    assert "no token is kept" in str(world.refusal(feedback(7, 6)))


def test_a_fed_back_token_that_samples_nothing_stays_the_last_one() -> None:
    world = World()
    world.run(prompt(7, sampled=50))
    for _ in range(2):
        assert world.run(feedback(7, 5, samples=False)).batch.token_ids.tolist() == [50]
    assert world.tokens(7) == ([50], 5)


def test_finished_sequences_are_dropped_before_look_ups_and_their_ids_can_be_used_at_once() -> None:
    world = World()
    world.run(*(prompt(number, sampled=50 + number) for number in range(4)))
    assert "no token is kept" in str(world.refusal(feedback(3, 5), finished=[3]))
    assert world.run(feedback(3, 5, 9)).batch.token_ids.tolist() == [53]
    world.run(prompt(3, sampled=40, length=2), prompt(9, sampled=41), finished=[3, 0, 12345])
    assert (world.tokens(3), world.tokens(9), world.tokens(0)) == (([40], 2), ([41], 5), None)


def test_a_step_sees_its_finished_sequences_as_forgotten_before_they_are() -> None:
    world = World()
    world.run(prompt(7, sampled=50))
    batch, _ = step_of([prompt(7, sampled=1)], finished=[7])
    world.table.resolve(batch)
    assert world.tokens(7) is None
    assert world.run(feedback(7, 5, 51)).batch.token_ids.tolist() == [50]  # that step was refused elsewhere


def test_more_sequences_than_the_table_holds_refuse_the_step_and_change_nothing() -> None:
    world = World()
    world.run(*(prompt(number, sampled=50) for number in range(3)))
    error = world.refusal(prompt(10, sampled=1), prompt(11, sampled=1), finished=[99])
    assert isinstance(error, OverloadedError)
    assert 0 < error.retry_after_ms <= 1000
    assert "2 new sequences beside 3 whose tokens are kept, expected at most max_feedback_sequences = 4" in str(error)
    assert len(world.table) == 3
    silent = Row(sequence_id=12, context_len=0, token_ids=(1,), samples=False)
    world.run(prompt(10, sampled=1), silent)
    assert len(world.table) == 4
    world.run(prompt(11, sampled=1), finished=[0])
    world.refusal(prompt(0, sampled=1))
    assert world.table.release(np.array([1, 2, 3, 1], np.uint64)) == 2
    world.run(prompt(0, sampled=1), prompt(20, sampled=2))
    assert world.count('feedback_refusals_total{reason="table_full"}') == 2


def test_an_entry_is_dropped_when_no_step_has_named_it_for_long_enough() -> None:
    world = World()
    world.run(prompt(7, sampled=50), prompt(8, sampled=60))
    world.clock.now = IDLE_SECONDS - 1
    world.run(feedback(7, 5, 51))
    world.clock.now = IDLE_SECONDS
    world.run(prompt(9, sampled=70))
    assert (world.tokens(7), world.tokens(8)) == (([50, 51], 6), None)
    assert world.count('feedback_evictions_total{reason="idle"}') == 1
    world.clock.now = 2 * IDLE_SECONDS - 1
    assert "no token is kept" in str(world.refusal(feedback(7, 6, 1)))
    assert world.tokens(9) == ([70], 5)


def test_a_row_of_which_nothing_is_kept_keeps_no_other_entry_alive() -> None:
    world = World()
    world.run(*(prompt(number, sampled=50) for number in range(MAX_SEQUENCES)))
    world.clock.now = IDLE_SECONDS - 1
    world.run(Row(sequence_id=99, context_len=0, token_ids=(1,), samples=False))
    world.clock.now = IDLE_SECONDS
    assert world.table.release(np.arange(MAX_SEQUENCES, dtype=np.uint64)) == 0


def test_unsequenced_steps_leave_the_table_alone() -> None:
    world = World()
    world.run(prompt(7, sampled=50))
    world.run(prompt(7, sampled=60, length=2), prompt(8, sampled=61), finished=[7], step_id=0)
    assert (world.tokens(7), len(world.table)) == (([50], 5), 1)


def test_a_cleared_table_knows_nothing_and_has_all_its_room() -> None:
    world = World()
    for _ in range(3):
        world.run(*(prompt(number, sampled=50) for number in range(4)))
        world.table.clear()
        assert len(world.table) == 0
        assert world.tokens(0) is None


# -- any sequence of steps --


@dataclass
class Entry:
    """What is known of a sequence: its tokens by position, None for one that a failed row did not sample."""

    position: int
    used: float
    failed: bool = False
    tokens: dict[int, int] = field(default_factory=dict)


@dataclass
class Model:
    """The table, written out: one row at a time."""

    now: float = 0.0
    entries: dict[int, Entry] = field(default_factory=dict)

    def expire(self) -> None:
        self.entries = {number: entry for number, entry in self.entries.items() if self.now - entry.used < IDLE_SECONDS}

    def expected(self, rows: Sequence[Row], finished: Sequence[int]) -> tuple[str, list[int], list[int]]:
        """Returns the outcome, the first tokens of all rows, and the rows that feed on a failed one."""
        left = {number: entry for number, entry in self.entries.items() if number not in finished}
        num_new = sum(row.samples and row.sequence_id not in left for row in rows)
        if num_new and len(left) + num_new > MAX_SEQUENCES:
            return "full", [], []
        first_tokens, failed = [], []
        for index, row in enumerate(rows):
            first_tokens.append(row.token_ids[0])
            if row.token_ids[0] == FEEDBACK_TOKEN:
                entry = left.get(row.sequence_id)
                if entry is None or entry.position != row.context_len:
                    return "mismatch", [], []
                first_tokens[-1] = NEVER_GIVEN if entry.failed else entry.tokens[entry.position]
                if entry.failed:
                    failed.append(index)
        return "executed", first_tokens, failed

    def record(self, rows: Sequence[Row], finished: Sequence[int], first_tokens: Sequence[int]) -> None:
        for number in finished:
            self.entries.pop(number, None)
        for row, first_token in zip(rows, first_tokens, strict=True):
            self._record_row(row, (first_token, *row.token_ids[1:]))

    def _record_row(self, row: Row, given: tuple[int, ...]) -> None:
        entry = self.entries.get(row.sequence_id)
        if not row.samples:
            if entry is not None and entry.failed and row.token_ids[0] != FEEDBACK_TOKEN:
                del self.entries[row.sequence_id]
            elif entry is not None:
                entry.used = self.now
            return
        first = row.context_len + len(given) - row.draft_len
        last_given = given[len(given) - 1 - row.draft_len]
        goes_on = (
            entry is not None
            and not entry.failed
            and len(given) == 1 + row.draft_len
            and entry.position == first - 1
            and entry.tokens[first - 1] == last_given
        )
        tokens = dict(entry.tokens) if entry is not None and goes_on else {}
        tokens |= {first + offset: token for offset, token in enumerate(row.sampled)}
        failed = not row.sampled
        position = first if failed else first + len(row.sampled) - 1
        kept = {} if failed else {at: tokens[at] for at in sorted(tokens) if at > position - MAX_TOKENS}
        self.entries[row.sequence_id] = Entry(position=position, used=self.now, failed=failed, tokens=kept)


@st.composite
def rows_for(draw: st.DrawFn, model: Model) -> list[Row]:
    """Rows of which most fit what the table holds."""
    rows = []
    for sequence_id in draw(st.lists(st.integers(0, 6), max_size=4, unique=True)):
        entry = model.entries.get(sequence_id)
        context_len = draw(st.integers(0, 4))
        if entry is not None and draw(st.integers(0, 5)):
            context_len = entry.position
        draft_len = draw(st.sampled_from((0, 0, 1, 3)))
        if entry is not None and draw(st.integers(0, 3)):
            first_token = FEEDBACK_TOKEN
        else:
            known = entry.tokens.get(entry.position, 1) if entry is not None else 1
            first_token = draw(st.sampled_from((1, known)))
        extra = 0 if first_token == FEEDBACK_TOKEN else draw(st.sampled_from((0, 0, 2)))
        token_ids = (first_token, *draw(st.lists(st.integers(0, 3), min_size=extra + draft_len, max_size=extra + draft_len)))
        samples = draw(st.integers(0, 4)) > 0 or draft_len > 0
        sampled = tuple(draw(st.lists(st.integers(0, 3), max_size=1 + draft_len)))
        if first_token == FEEDBACK_TOKEN and entry is not None and entry.failed:
            sampled = ()
        rows.append(
            Row(
                sequence_id=sequence_id,
                context_len=context_len,
                token_ids=token_ids,
                draft_len=draft_len,
                sampled=sampled if samples else (),
                samples=samples,
            )
        )
    return rows


@settings(max_examples=300)
@given(st.data())
def test_any_steps_finishes_releases_pauses_and_resets_leave_what_plain_dictionaries_hold(data: st.DataObject) -> None:
    world, model = World(), Model()
    for _ in range(data.draw(st.integers(1, 12))):
        event = data.draw(st.sampled_from(("step", "step", "step", "step", "pause", "release", "clear")))
        if event == "pause":
            world.clock.now = model.now = model.now + data.draw(st.sampled_from((1.0, 4.0, IDLE_SECONDS)))
        elif event == "release":
            ids = data.draw(st.lists(st.integers(0, 6), max_size=3))
            model.expire()
            assert world.table.release(np.array(ids, np.uint64)) == len(set(ids) & model.entries.keys())
            for number in ids:
                model.entries.pop(number, None)
        elif event == "clear":
            world.table.clear()
            model.entries.clear()
        else:
            model.expire()
            _step(data, world, model)
        assert len(world.table) == len(model.entries)
        for number in range(7):
            entry = model.entries.get(number)
            expected = None if entry is None or entry.failed else (list(entry.tokens.values()), entry.position)
            assert world.tokens(number) == expected


def _step(data: st.DataObject, world: World, model: Model) -> None:
    rows = data.draw(rows_for(model))
    finished = data.draw(st.just([]) | st.lists(st.integers(0, 6), max_size=2))
    outcome, first_tokens, failed = model.expected(rows, finished)
    batch, result = step_of(rows, finished=finished)
    if outcome != "executed":
        error = world.refusal(*rows, finished=finished)
        assert isinstance(error, OverloadedError if outcome == "full" else PreconditionError)
        world.table.resolve(step_of([])[0])  # The next step sees the finished ones again.
        return
    step = world.table.resolve(batch)
    assert step.failed_sources.tolist() == failed
    for row, (start, expected) in enumerate(zip(step.batch.query_starts[:-1].tolist(), first_tokens, strict=True)):
        if row not in failed:
            assert step.batch.token_ids[start] == expected
    world.table.record(step, result)
    model.record(rows, finished, first_tokens)
