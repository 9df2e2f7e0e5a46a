"""Log set-up: every line of the process, structlog's and the standard library's, goes through one formatter to stderr.

Lines are JSON objects, or coloured text on a terminal. Prompts and token ids are never logged.
"""

import asyncio
import contextvars
import logging
import sys
from collections.abc import Callable
from typing import TextIO

import structlog


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


class LineLimit:
    """Lets the first lines of a kind through, and tells afterwards how many it held back. Lives on the event loop.

    Args:
        max_lines: of a kind in a period.
        seconds: length of a period.
        report: called at the end of a period in which lines were held back, with their kind and number.
    """

    def __init__(self, *, max_lines: int, seconds: float, report: Callable[[tuple[str, ...], int], None]) -> None:
        self._max_lines = max_lines
        self._seconds = seconds
        self._report = report
        self._lines: dict[tuple[str, ...], int] = {}

    def admit(self, *kind: str) -> bool:
        """Whether a line may be written."""
        if kind not in self._lines:
            # In a context of its own: what is bound to the lines of this call is not true of the others.
            asyncio.get_running_loop().call_later(self._seconds, self._end, kind, context=contextvars.Context())
        count = self._lines[kind] = self._lines.get(kind, 0) + 1
        return count <= self._max_lines

    def _end(self, kind: tuple[str, ...]) -> None:
        held_back = self._lines.pop(kind) - self._max_lines
        if held_back > 0:
            self._report(kind, held_back)
