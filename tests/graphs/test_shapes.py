"""What counts as decode and as uniform, and which graph fits which step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelworker.graphs.settings import RuntimeMode
from modelworker.graphs.shapes import GraphKey, StepShape, fits, step_shape
from modelworker_testing.graph_batches import Rows, arrays_of

_ROWS = st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0, 1, 2, 900])), max_size=9)
_ROWS_OF_ONE_LENGTH = st.tuples(st.integers(1, 6), st.lists(st.sampled_from([0, 1, 50]), min_size=1, max_size=9)).map(
    lambda pair: [(pair[0], context_len) for context_len in pair[1]]
)


def _shape(rows: Rows, *decode_query_lens: int) -> StepShape:
    return step_shape(*arrays_of(rows), decode_query_lens)


@given(_ROWS | _ROWS_OF_ONE_LENGTH, st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True))
def test_a_shape_is_what_a_look_at_each_row_says(rows: Rows, decode_query_lens: list[int]) -> None:
    shape = _shape(rows, *decode_query_lens)
    decode = [context_len > 0 and query_len in decode_query_lens for query_len, context_len in rows]
    lengths = {query_len for query_len, _ in rows}
    assert shape.num_tokens == sum(query_len for query_len, _ in rows)
    assert shape.num_sequences == len(rows)
    assert shape.all_decode == (bool(rows) and all(decode))
    assert shape.uniform_query_len == (lengths.pop() if rows and all(decode) and len(lengths) == 1 else None)


@pytest.mark.parametrize(
    "rows",
    [
        [(3, 0)],  # one new prompt as long as a row that verifies two drafts
        [(3, 0), (3, 9)],  # the same beside such a row
        [(3, 9), (3, 9), (3, 0)],
        [(1, 0)],  # a prompt of one token
        [(1, 5), (1, 0)],
    ],
)
def test_g01_a_fresh_prompt_is_not_decode_whatever_its_length(rows: Rows) -> None:
    assert _shape(rows, 1, 3).uniform_query_len is None
    assert not _shape(rows, 1, 3).all_decode


@pytest.mark.parametrize(
    ("rows", "draft_lens"),
    [
        ([(3, 6)], [0]),  # a chunk of a prompt, over the chunks before it
        ([(3, 6), (3, 9)], [0, 2]),  # the same beside a row that verifies two drafts
        ([(3, 6), (1, 9)], [0, 0]),
    ],
)
def test_g01_a_chunk_of_a_prompt_is_not_decode_whatever_its_length(rows: Rows, draft_lens: list[int]) -> None:
    query_lens, context_lens, _ = arrays_of(rows)
    shape = step_shape(query_lens, context_lens, np.array(draft_lens, np.int32), (1, 3))
    assert shape.uniform_query_len is None
    assert not shape.all_decode


def test_the_last_token_of_a_prompt_over_existing_context_is_decode() -> None:
    assert _shape([(1, 512), (1, 3)], 1).uniform_query_len == 1


def test_a_uniform_batch_of_another_query_length_is_not_decode() -> None:
    assert _shape([(4, 9), (4, 2)], 1, 3) == StepShape(8, 2, None, False)


def test_rows_that_average_to_a_uniform_batch_are_not_uniform() -> None:
    assert _shape([(2, 9), (1, 9), (3, 9)], 1, 2, 3) == StepShape(6, 3, None, True)


def test_a_step_without_sequences_has_a_shape() -> None:
    assert _shape([], 1) == StepShape(0, 0, None, False)


def test_sums_beyond_32_bits_are_right() -> None:
    query_lens = np.full(3, 2**30, np.int32)
    assert step_shape(query_lens, np.zeros(3, np.int32), np.zeros(3, np.int32), (1,)).num_tokens == 3 * 2**30


@pytest.mark.parametrize(
    ("key", "tokens", "sequences", "uniform", "expected"),
    [
        (GraphKey(RuntimeMode.FULL, 18, 6, 3), 18, 6, 3, True),
        (GraphKey(RuntimeMode.FULL, 18, 6, 3), 12, 4, 3, True),
        (GraphKey(RuntimeMode.FULL, 18, 6, 3), 21, 7, 3, False),
        (GraphKey(RuntimeMode.FULL, 18, 6, 3), 12, 12, 1, False),
        (GraphKey(RuntimeMode.FULL, 18, 6, 3), 12, 4, None, False),
        (GraphKey(RuntimeMode.FULL, 18, 6, None), 18, 6, None, True),
        (GraphKey(RuntimeMode.FULL, 18, 6, None), 4, 4, 1, True),
        (GraphKey(RuntimeMode.FULL, 18, 6, None), 18, 7, None, False),
        (GraphKey(RuntimeMode.FULL, 18, 6, None), 19, 6, None, False),
        (GraphKey(RuntimeMode.PIECEWISE, 18, None, None), 18, 18, 1, True),
        (GraphKey(RuntimeMode.PIECEWISE, 18, None, None), 19, 1, None, False),
        (GraphKey(RuntimeMode.PIECEWISE, 18, None, None), 0, 0, None, False),
    ],
)
def test_a_graph_fits_a_step_within_its_tokens_sequences_and_query_length(
    key: GraphKey, tokens: int, sequences: int, uniform: int | None, expected: bool
) -> None:
    assert fits(key, StepShape(tokens, sequences, uniform, uniform is not None)) is expected
