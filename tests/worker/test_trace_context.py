"""Trace contexts, as https://www.w3.org/TR/trace-context/ has them."""

import time

import pytest

from modelworker.worker.trace_context import trace_id_of

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACE = f"00-{TRACE_ID}-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    "traceparent",
    [TRACE, TRACE[:-2] + "ff", "01" + TRACE[2:], "cc" + TRACE[2:] + "-what the future holds", "fe" + TRACE[2:] + "-" + "x" * 200],
)
def test_a_trace_context_of_any_version_has_a_trace_id(traceparent: str) -> None:
    assert trace_id_of(traceparent) == TRACE_ID


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "nonsense",
        TRACE.upper(),
        TRACE[:-1],
        TRACE + "0",
        TRACE + "\n",
        TRACE + "-version 00 has no more",
        "01" + TRACE[2:] + "x",
        "ff" + TRACE[2:],
        TRACE.replace("-", "_"),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        "\u0660" * 55,
        "01" + TRACE[2:] + "-" + "x" * 100_000,
    ],
)
def test_what_is_no_trace_context_has_none(traceparent: str) -> None:
    assert trace_id_of(traceparent) == ""


def test_a_megabyte_is_refused_without_being_read() -> None:
    begun = time.thread_time()
    assert trace_id_of(TRACE + "-" + "x" * 10_000_000) == ""
    assert time.thread_time() - begun < 0.05
