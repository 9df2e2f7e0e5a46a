"""The tokens before a sampled position: what the router sent, what the worker kept, the row's own."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworker.worker.arrays import IndexArray, Int32Array
from modelworker.worker.batch import StepBatch, TokenHistory
from modelworker.worker.check_batch import CheckRow, make_check_batch
from modelworker.worker.errors import PreconditionError
from modelworker.worker.sampling.history import TokenStreams, complete_history
from modelworker_testing.sampling_runs import nothing_kept, parameters

NO_ROWS = np.zeros(0, np.intp)


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
@given(sequences=st.lists(rows(), min_size=1, max_size=5))
def test_a_stream_is_the_whole_sequence_however_its_tokens_are_known(sequences: list[Row]) -> None:
    asked: list[list[int]] = []

    def kept(batch: StepBatch, gaps: IndexArray, firsts: Int32Array) -> Int32Array:
        asked.append(gaps.tolist())
        assert firsts.tolist() == [sequences[row].sent for row in gaps]
        return np.array([token for row in gaps for token in sequences[row].tokens[sequences[row].sent : batch.context_lens[row]]])

    streams = complete_history(batch_of(sequences), kept, NO_ROWS)
    wanted = [row.penalized and row.samples for row in sequences]
    assert (streams is not None) == any(wanted)
    if streams is not None:
        for index, row in enumerate(sequences):
            if wanted[index]:
                assert stream(streams, index, len(row.tokens)) == list(row.tokens)
                assert streams.prompt_lens[index] == row.prompt
    gaps = [index for index, row in enumerate(sequences) if wanted[index] and row.sent < row.context]
    assert asked == ([gaps] if gaps else [])


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
