"""The tokens before a sampled position: what the router sent, what the worker kept, the row's own."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworker.worker.batch import Int32Array, StepBatch, TokenHistory
from modelworker.worker.check_batch import CheckRow, make_check_batch
from modelworker.worker.errors import PreconditionError, PreconditionReason
from modelworker.worker.sampling.history import TokenStreams, complete_history, nothing_kept
from modelworker_testing.sampling_runs import parameters

NO_ROWS = np.zeros(0, np.intp)


@dataclass(frozen=True)
class Kept:
    token_ids: Int32Array
    position: int


@dataclass(frozen=True)
class Row:
    """A sequence: its tokens, and how many of them are sent as prompt, sent as output, in the cache, drafts."""

    tokens: tuple[int, ...]
    prompt: int
    sent: int
    context: int
    drafts: int
    penalized: bool = True
    samples: bool = True


@st.composite
def rows(draw: st.DrawFn) -> Row:
    tokens = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=12)))
    context = draw(st.integers(0, len(tokens) - 1))
    drafts = len(tokens) - context - 1 if draw(st.booleans()) else 0
    sent = draw(st.integers(0, len(tokens) - drafts))
    return Row(tokens, draw(st.integers(0, sent)), sent, context, drafts, draw(st.booleans()), draw(st.booleans()))


def batch_of(sequences: list[Row]) -> StepBatch:
    batch = make_check_batch(
        [
            CheckRow(
                token_ids=np.array(row.tokens[row.context :], np.int32), context_len=row.context,
                blocks=np.ones(1, np.int32), draft_len=row.drafts,
            )
            for row in sequences
        ]
    )  # fmt: skip
    history = TokenHistory(
        prompt_lens=np.array([row.prompt for row in sequences], np.int32),
        output_lens=np.array([row.sent - row.prompt for row in sequences], np.int32),
        token_ids=np.array([token for row in sequences for token in row.tokens[: row.sent]], np.int32),
    )
    return replace(
        batch,
        sample=np.array([row.samples for row in sequences]),
        sampling=parameters(len(sequences), frequency=[float(row.penalized) for row in sequences], history=history),
        sequence_ids=np.arange(100, 100 + len(sequences), dtype=np.uint64),
    )


def stream(streams: TokenStreams, row: int, length: int) -> list[int]:
    return streams.token_ids[streams.starts[row] : streams.starts[row] + length].tolist()


@settings(max_examples=200)
@given(sequences=st.lists(rows(), min_size=1, max_size=5), spare=st.integers(0, 3))
def test_a_stream_is_the_whole_sequence_however_its_tokens_are_known(sequences: list[Row], spare: int) -> None:
    asked: list[int] = []

    def recent(sequence_id: int) -> Kept:
        asked.append(sequence_id)
        row = sequences[sequence_id - 100]
        first = max(row.sent - spare, 0)
        return Kept(np.array(row.tokens[first : row.context + 1], np.int32), row.context)

    streams = complete_history(batch_of(sequences), recent, NO_ROWS)
    wanted = [row.penalized and row.samples for row in sequences]
    assert (streams is not None) == any(wanted)
    if streams is not None:
        for index, row in enumerate(sequences):
            if wanted[index]:
                assert stream(streams, index, len(row.tokens)) == list(row.tokens)
                assert streams.prompt_lens[index] == row.prompt
    gaps = [100 + index for index, row in enumerate(sequences) if wanted[index] and row.sent < row.context]
    assert asked == gaps


@pytest.mark.parametrize(
    ("kept", "found"),
    [
        (None, "no tokens"),
        (Kept(np.array([5], np.int32), 5), "those of the positions 5 .. 5"),  # position 4 is missing
        (Kept(np.array([3, 4], np.int32), 4), "those of the positions 3 .. 4"),  # position 5 is missing
    ],
)
def test_a_gap_is_refused_naming_the_row_and_what_there_is(kept: Kept | None, found: str) -> None:
    sequences = [Row((1, 2), 1, 1, 1, 0), Row(tuple(range(7)), 2, 4, 6, 0)]
    with pytest.raises(PreconditionError, match=f"row 1: the history covers 4 positions and the context 6, .*{found}") as caught:
        complete_history(batch_of(sequences), lambda _: kept, NO_ROWS)
    assert caught.value.reason is PreconditionReason.FEEDBACK_MISMATCH
    assert caught.value.metadata == {"row": "1"}


def test_kept_tokens_that_reach_the_context_close_the_gap() -> None:
    sequences = [Row(tuple(range(7)), 2, 4, 6, 0)]
    for kept in (Kept(np.array([4, 5], np.int32), 5), Kept(np.array([3, 4, 5, 6], np.int32), 6)):
        streams = complete_history(batch_of(sequences), lambda _, kept=kept: kept, NO_ROWS)
        assert streams is not None
        assert stream(streams, 0, 7) == list(range(7))


def test_without_penalties_nothing_is_put_together_and_nothing_asked() -> None:
    row = Row(tuple(range(7)), 2, 4, 6, 0, penalized=False)
    assert complete_history(batch_of([row, row]), nothing_kept, NO_ROWS) is None


def test_a_row_that_fails_for_want_of_a_token_has_no_gap_that_could_refuse_the_step() -> None:
    row = Row(tuple(range(7)), 2, 4, 6, 0)
    with pytest.raises(PreconditionError):
        complete_history(batch_of([row, row]), nothing_kept, np.array([0]))
    streams = complete_history(batch_of([row, row]), nothing_kept, np.array([0, 1]))
    assert streams is not None
    assert len(streams.token_ids) == 14
