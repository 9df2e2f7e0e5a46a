"""How long work reports its progress: stages with a known or unknown total."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

_logger = logging.getLogger(__name__)


class Progress(Protocol):
    """Receives the progress of start-up, stage by stage."""

    def stage(self, name: str, total: int | None = None, unit: str = "") -> AbstractContextManager[Callable[[int], None]]:
        """Opens a stage; the function that it yields is called with every amount that is done."""
        ...


class LogProgress:
    """Writes a line at the start and end of each stage, and one every few seconds in between."""

    def __init__(self, interval_seconds: float = 5.0) -> None:
        self._interval_seconds = interval_seconds

    @contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Callable[[int], None]]:
        """Opens a stage."""
        started = reported = time.monotonic()
        done = 0

        def advance(amount: int) -> None:
            nonlocal done, reported
            done += amount
            if time.monotonic() - reported >= self._interval_seconds:
                reported = time.monotonic()
                share = f" ({100 * done // total} %)" if total else ""
                _logger.info("%s: %d %s%s", name, done, unit, share)

        _logger.info("%s", name)
        yield advance
        _logger.info("%s: done in %.1f s", name, time.monotonic() - started)
