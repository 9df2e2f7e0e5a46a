"""Graph modes, and settings that contradict themselves."""

from typing import Any

import pytest

from modelworker.graphs.settings import CaptureMode, GraphSettings, GraphSettingsError, RuntimeMode


@pytest.mark.parametrize(
    ("mode", "decode", "mixed"),
    [
        ("NONE", "NONE", "NONE"),
        ("PIECEWISE", "PIECEWISE", "PIECEWISE"),
        ("FULL", "FULL", "FULL"),
        ("FULL_DECODE_ONLY", "FULL", "NONE"),
        ("FULL_AND_PIECEWISE", "FULL", "PIECEWISE"),
    ],
)
def test_a_mode_is_a_pair_of_run_time_modes(mode: str, decode: str, mixed: str) -> None:
    assert (CaptureMode(mode).decode_mode.name, CaptureMode(mode).mixed_mode.name) == (decode, mixed)


def test_every_mode_is_in_the_table_and_only_three_exist_at_run_time() -> None:
    assert len(CaptureMode) == 5
    assert [mode.name for mode in sorted(RuntimeMode)] == ["NONE", "PIECEWISE", "FULL"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_sequences": 0}, "max_sequences is 0, and must be at least 1"),
        ({"max_tokens_per_step": 0}, "max_tokens_per_step is 0, and must be at least 1"),
        ({"decode_query_lens": ()}, "no decode query length is given"),
        ({"decode_query_lens": (1, 0)}, "decode query length 0 is below 1"),
        ({"decode_query_lens": (1, 3, 1)}, "decode query length 1 is given twice"),
        ({"decode_query_lens": (65,)}, "one sequence of decode query length 65 exceeds max_tokens_per_step, 64"),
        ({"decode_sizes": ()}, "no decode size is given; graph mode NONE captures none"),
        ({"decode_sizes": (0,)}, "decode size 0 is below 1"),
        ({"decode_sizes": (4, 4)}, "decode size 4 is given twice"),
        ({"decode_sizes": (4, 9)}, "decode size 9 is above the largest decode batch, 8"),
        ({"decode_sizes": (25,), "decode_query_lens": (1, 3)}, "decode size 25 is above the largest decode batch, 24"),
        ({"decode_sizes": (64,), "decode_query_lens": (9,)}, "decode size 64 is above the largest decode batch, 63"),
        ({"decode_sizes": (4,), "mode": "PIECEWISE"}, "graph mode PIECEWISE captures no FULL decode graphs"),
        ({"decode_sizes": (4,), "mode": "NONE"}, "graph mode NONE captures no FULL decode graphs"),
        ({"mixed_sizes": ()}, "no mixed size is given; graph mode NONE captures none"),
        ({"mixed_sizes": (-1,)}, "mixed size -1 is below 1"),
        ({"mixed_sizes": (16, 16)}, "mixed size 16 is given twice"),
        ({"mixed_sizes": (16, 65)}, "mixed size 65 is above max_tokens_per_step, 64"),
        ({"mixed_sizes": (16,), "mode": "FULL_DECODE_ONLY"}, "graph mode FULL_DECODE_ONLY captures no graphs of mixed batches"),
    ],
)
def test_a_contradiction_is_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    values = {"max_sequences": 8, "max_tokens_per_step": 64, **change}
    if "mode" in values:
        values["mode"] = CaptureMode(values["mode"])
    with pytest.raises(GraphSettingsError) as caught:
        GraphSettings(**values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_decode_size_above_the_largest_batch_of_one_query_length_is_allowed_where_another_reaches_it() -> None:
    GraphSettings(max_sequences=8, max_tokens_per_step=64, decode_query_lens=(1, 3), decode_sizes=(4, 24))


@pytest.mark.parametrize(("query_len", "tokens"), [(1, 8), (3, 24), (8, 64), (9, 63), (33, 33), (64, 64)])
def test_the_largest_decode_batch_keeps_both_limits(query_len: int, tokens: int) -> None:
    settings = GraphSettings(max_sequences=8, max_tokens_per_step=64, decode_query_lens=(query_len,))
    assert settings.largest_decode_batch(query_len) == tokens
