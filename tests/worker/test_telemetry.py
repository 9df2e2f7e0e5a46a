import asyncio
import io
import json
import logging
import warnings
from collections.abc import Iterator

import pytest
import structlog

from modelworker.worker.telemetry import LineLimit, configure_logging


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_of_structlog_and_of_the_standard_library_look_alike():
    stream = io.StringIO()
    configure_logging(log_format="json", log_level="info", stream=stream)
    with structlog.contextvars.bound_contextvars(step_id=3):
        structlog.get_logger("modelworker.rpc").info("one", num_tokens=5)
        logging.getLogger("modelworker.worker.engine").warning("two %d", 2, extra={"num_tokens": 6})
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert set(first) == set(second) == {"event", "level", "logger", "timestamp", "step_id", "num_tokens"}
    assert (first["event"], first["level"], first["logger"], first["num_tokens"]) == ("one", "info", "modelworker.rpc", 5)
    assert (second["event"], second["level"], second["num_tokens"]) == ("two 2", "warning", 6)


def fail_over(token_ids: list[int]) -> None:
    """The tokens are local variables of what failed."""
    raise ValueError("bad")


def test_an_exception_is_one_json_line_without_local_variables():
    stream = io.StringIO()
    configure_logging(log_format="json", log_level="info", stream=stream)
    try:
        fail_over(list(range(424242, 424243)))
    except ValueError as error:
        structlog.get_logger("a").error("failed", exc_info=error)
        logging.getLogger("b").exception("failed")
    for line in stream.getvalue().splitlines():
        assert "ValueError: bad" in json.loads(line)["exception"]
    assert "[424242]" not in stream.getvalue()


def test_the_console_shows_exceptions_without_local_variables():
    stream = Terminal()
    configure_logging(log_format="auto", log_level="info", stream=stream)
    try:
        fail_over(list(range(424242, 424243)))
    except ValueError as error:
        structlog.get_logger("a").error("failed", exc_info=error)
    assert "ValueError: bad" in stream.getvalue()
    assert "[424242]" not in stream.getvalue()
    assert "\x1b[" in stream.getvalue()


@pytest.mark.parametrize(
    ("log_format", "stream", "is_json"),
    [("auto", io.StringIO(), True), ("console", io.StringIO(), False), ("json", Terminal(), True)],
)
def test_the_format_is_the_one_asked_for_and_json_where_there_is_no_terminal(log_format: str, stream: io.StringIO, is_json: bool):
    configure_logging(log_format=log_format, log_level="info", stream=stream)
    structlog.get_logger("a").info("hello")
    assert stream.getvalue().startswith("{") == is_json
    assert "\x1b[" not in stream.getvalue()


def test_lines_below_the_level_are_left_out():
    stream = io.StringIO()
    configure_logging(log_format="json", log_level="warning", stream=stream)
    structlog.get_logger("a").info("no")
    logging.getLogger("b").info("no")
    structlog.get_logger("a").warning("yes")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["yes"]


def test_warnings_of_libraries_are_log_lines():
    stream = io.StringIO()
    configure_logging(log_format="json", log_level="info", stream=stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        logging.captureWarnings(False)
    assert "DeprecationWarning: old" in json.loads(stream.getvalue())["event"]


def test_a_hook_runs_before_each_line():
    stream = io.StringIO()
    calls = []
    configure_logging(log_format="json", log_level="info", stream=stream, before_line=lambda: calls.append(stream.getvalue()))
    structlog.get_logger("a").info("one")
    assert calls == [""]


def test_of_many_lines_of_a_kind_the_first_are_let_through_and_the_others_told_as_a_number():
    told = []

    async def main() -> None:
        limit = LineLimit(max_lines=3, seconds=0.1, report=lambda kind, number: told.append((kind, number)))
        assert [limit.admit("a") for _ in range(5)] == [True, True, True, False, False]
        assert [limit.admit("b", "c") for _ in range(3)] == [True] * 3
        await asyncio.sleep(0.15)
        assert told == [(("a",), 2)]
        assert [limit.admit("a") for _ in range(4)] == [True, True, True, False]
        await asyncio.sleep(0.15)

    asyncio.run(main())
    assert told == [(("a",), 2), (("a",), 1)]


def test_the_number_of_held_back_lines_is_told_without_the_context_of_a_call():
    told = []

    async def main() -> None:
        limit = LineLimit(
            max_lines=1, seconds=0.01, report=lambda kind, number: told.append(structlog.contextvars.get_contextvars())
        )
        with structlog.contextvars.bound_contextvars(step_id=3):
            assert [limit.admit("a"), limit.admit("a")] == [True, False]
        await asyncio.sleep(0.05)

    asyncio.run(main())
    assert told == [{}]
