"""Batches for tests of graphs."""

import numpy as np
import numpy.typing as npt

from modelworker.graphs.settings import GraphSettings
from modelworker.graphs.shapes import GraphKey, StepShape, step_shape

Rows = list[tuple[int, int]]
"""(query length, context length) of each row."""


def arrays_of(rows: Rows) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Query, context and draft lengths: over context, all tokens of a row but its first are drafts."""
    table = np.array(rows, np.int32).reshape(-1, 2)
    query_lens, context_lens = np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])
    return query_lens, context_lens, np.where(context_lens > 0, query_lens - 1, 0).astype(np.int32)


def shape_of(rows: Rows, settings: GraphSettings) -> StepShape:
    """The shape of a batch."""
    return step_shape(*arrays_of(rows), settings.decode_query_lens)


def rows_that_hit(key: GraphKey) -> Rows:
    """A batch that fills a graph: its rows decode, or one prompt has all its tokens."""
    if key.uniform_query_len is None:
        return [(key.num_tokens, 0)]
    return [(key.uniform_query_len, 7)] * (key.num_tokens // key.uniform_query_len)
