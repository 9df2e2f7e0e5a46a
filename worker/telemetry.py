"""Log set-up: every line of the process, structlog's and the standard library's, goes through one formatter to stderr.

Lines are JSON objects, or coloured text on a terminal. Prompts and token ids are never logged.
"""

import logging
import re
import sys
from collections.abc import Callable
from typing import TextIO

import structlog

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


class _LogHandler(logging.StreamHandler[TextIO]):
    """Writes log lines, and takes a progress bar off the terminal's last line first."""

    def __init__(self, stream: TextIO, before_line: Callable[[], None] | None) -> None:
        super().__init__(stream)
        self._before_line = before_line

    def emit(self, record: logging.LogRecord) -> None:
        if self._before_line is not None:
            self._before_line()
        super().emit(record)


def wants_console(log_format: str, stream: TextIO) -> bool:
    """Whether logs are text for people: asked for, or "auto" on a terminal."""
    return log_format == "console" or (log_format == "auto" and stream.isatty())


def configure_logging(
    *, log_format: str, log_level: str, stream: TextIO | None = None, before_line: Callable[[], None] | None = None
) -> None:
    """Routes all logging of the process to one stream.

    Args:
        log_format: auto, json or console.
        log_level: debug, info, warning or error.
        stream: where to; None = stderr.
        before_line: called before each line is written.
    """
    stream = stream or sys.stderr
    console = wants_console(log_format, stream)
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    rendering: list[structlog.typing.Processor]
    if console:
        # The plain formatter: a rich one would print local variables, and with them token ids.
        rendering = [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback)]
    else:
        rendering = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
    )
    handler = _LogHandler(stream, before_line)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(log_level.upper())
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.processors.StackInfoRenderer(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def trace_id_of(traceparent: str) -> str:
    """Returns the trace id (32 hex digits) of a W3C trace context, or "" where it is malformed or invalid (all zeros)."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None or traceparent.startswith("ff") or not match[1].strip("0"):
        return ""
    return match[1]
