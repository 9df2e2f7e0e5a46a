"""Settings of graphs as hypothesis draws them."""

from typing import Any

from hypothesis import strategies as st

from modelworker.graphs.settings import CaptureMode, GraphSettings, RuntimeMode


@st.composite
def settings_of_graphs(draw: st.DrawFn, *, explicit: bool = True) -> GraphSettings:
    """Settings of every mode; with sizes of their own now and then."""
    max_sequences = draw(st.integers(1, 80))
    max_tokens = draw(st.integers(1, 700))
    mode = draw(st.sampled_from(CaptureMode))
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
