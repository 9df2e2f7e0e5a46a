"""Settings of graphs and batches for tests of dispatch."""

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from modelworker.graphs.settings import GraphMode, GraphSettings, RuntimeMode
from modelworker.graphs.shapes import GraphKey, StepShape, step_shape

Rows = list[tuple[int, int]]
"""(query length, context length) of each row."""


@st.composite
def settings_of_graphs(draw: st.DrawFn, *, explicit: bool = True) -> GraphSettings:
    """Settings of every mode; with sizes of their own now and then."""
    max_sequences = draw(st.integers(1, 80))
    max_tokens = draw(st.integers(1, 700))
    mode = draw(st.sampled_from(GraphMode))
    query_lens = draw(st.lists(st.integers(1, min(20, max_tokens)), min_size=1, max_size=3, unique=True))
    values: dict[str, Any] = {}
    if explicit and mode.decode_mode is RuntimeMode.FULL and draw(st.booleans()):
        largest = max(min(max_sequences, max_tokens // query_len) * query_len for query_len in query_lens)
        values["decode_sizes"] = draw(_sizes(largest))
    if explicit and mode.mixed_mode is not RuntimeMode.NONE and draw(st.booleans()):
        values["mixed_sizes"] = draw(_sizes(max_tokens))
    return GraphSettings(
        max_sequences=max_sequences,
        max_tokens_per_step=max_tokens,
        mode=mode,
        decode_query_lens=tuple(query_lens),
        **values,
    )


def _sizes(largest: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(1, largest), min_size=1, max_size=6, unique=True).map(tuple)


def arrays_of(rows: Rows) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Query and context lengths."""
    table = np.array(rows, np.int32).reshape(-1, 2)
    return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])


def shape_of(rows: Rows, settings: GraphSettings) -> StepShape:
    """The shape of a batch."""
    return step_shape(*arrays_of(rows), settings.decode_query_lens)


def rows_that_hit(key: GraphKey) -> Rows:
    """A batch that fills a graph: its rows decode, or one prompt has all its tokens."""
    if key.uniform_query_len is None:
        return [(key.num_tokens, 0)]
    return [(key.uniform_query_len, 7)] * (key.num_tokens // key.uniform_query_len)
