"""What people see on a terminal: one progress bar on stderr, and plain tables on stdout."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from modelworker.worker.progress import LogProgress, Progress

_BAR_CELLS = 24
_REDRAW_SECONDS = 0.1
_ERASE_LINE = "\r\x1b[2K"
_DEFAULT_COLUMNS = 120
_BYTE_UNITS = ("B", "bytes")


class TerminalProgress:
    """A `Progress` that draws the current stage on the last line of a terminal. Safe to use from any thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._visible = False

    def hide(self) -> None:
        """Takes the bar off the screen, so that a line can be written; it comes back with the next redraw."""
        with self._lock:
            if self._visible:
                self._stream.write(_ERASE_LINE)
                self._stream.flush()
                self._visible = False

    @contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Callable[[int], None]]:
        """Shows a stage until it ends; the yielded function advances it."""
        started = time.monotonic()
        drawn = started
        done = 0

        def advance(amount: int) -> None:
            nonlocal done, drawn
            done += amount
            now = time.monotonic()
            if now - drawn >= _REDRAW_SECONDS:
                drawn = now
                self._draw(progress_line(name, done, total, unit, now - started))

        self._draw(progress_line(name, done, total, unit, 0.0))
        try:
            yield advance
        except BaseException:
            self.hide()
            raise
        self.hide()
        amount = f", {_amount(done, unit)}" if done else ""
        self._write_line(f"{name}: {time.monotonic() - started:.1f} s{amount}")

    def _draw(self, line: str) -> None:
        with self._lock:
            # A line that wraps could not be erased as a whole.
            self._stream.write(_ERASE_LINE + line[: _columns_of(self._stream) - 1])
            self._stream.flush()
            self._visible = True

    def _write_line(self, line: str) -> None:
        with self._lock:
            self._stream.write(line + "\n")
            self._stream.flush()


def progress_on(stream: TextIO) -> Progress:
    """Returns what shows progress there: a bar on a terminal, else lines of the log."""
    return TerminalProgress(stream) if stream.isatty() else LogProgress()


def progress_line(name: str, done: int, total: int | None, unit: str, seconds: float) -> str:
    """Returns one line without its end: name, bar and percentage (where the total is known), amount, seconds."""
    if not total:
        return f"{name} ... {_amount(done, unit) + ', ' if done else ''}{seconds:.0f} s"
    share = min(done / total, 1.0)
    filled = int(share * _BAR_CELLS)
    bar = "#" * filled + "." * (_BAR_CELLS - filled)
    so_far = format_bytes(done) if unit in _BYTE_UNITS else f"{done:,}"
    return f"{name} [{bar}] {share:4.0%}  {so_far} of {_amount(total, unit)}, {seconds:.0f} s"


def _amount(number: int, unit: str) -> str:
    if unit in _BYTE_UNITS:
        return format_bytes(number)
    return f"{number:,} {unit}".rstrip()


def _columns_of(stream: TextIO) -> int:
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return _DEFAULT_COLUMNS
    # A terminal that nobody has given a size says 0.
    return columns or _DEFAULT_COLUMNS


def format_bytes(number: int) -> str:
    """Returns a size for people in binary units, e.g. "1.5 GiB"."""
    if number < 2**10:
        return f"{number} B"
    size = float(number)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        # What would be printed as 1024.0 belongs to the next unit.
        if size < 1023.95 or unit == "TiB":
            break
    return f"{size:.1f} {unit}"


def format_table(rows: Sequence[Sequence[str]], *, header: Sequence[str] | None = None, right: Sequence[int] = ()) -> str:
    """Returns lines of aligned columns, two spaces apart, without trailing spaces.

    Args:
        rows: cells; every row has the same number of them.
        header: names of the columns.
        right: indices of right-aligned columns.

    Raises:
        ValueError: the rows differ in length.
    """
    lines = [*([header] if header is not None else []), *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
