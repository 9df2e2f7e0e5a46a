"""A row of checks: each one runs, whatever happened in those before, and may use what they found out."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from modelworker.worker.errors import SetupError

T = TypeVar("T")


class Status(StrEnum):
    """How a check ended. SKIPPED: it needs what an earlier check should have found out."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A check that has run.

    Attributes:
        name: one or two words.
        status: how it ended.
        finding: what was found.
        advice: what to do about it, "" where there is nothing to do.
    """

    name: str
    status: Status
    finding: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found(Generic[T]):
    """What a check returns: something that later checks may use, and what people shall read of it."""

    value: T
    text: str
    status: Status = Status.OK
    advice: str = ""


class _NeededError(Exception):
    """A check asked for the value of one that did not get it."""


class Outcome(Generic[T]):
    """What a check left for later ones."""

    def __init__(self, name: str, found: Found[T] | None) -> None:
        self._name = name
        self._found = found

    @property
    def is_known(self) -> bool:
        """Whether there is a value."""
        return self._found is not None

    @property
    def value(self) -> T:
        """The value. Where there is none, the check that asks for it is skipped."""
        if self._found is None:
            raise _NeededError(self._name)
        return self._found.value


class Examination:
    """Runs checks and keeps what they found."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    @property
    def passed(self) -> bool:
        """Whether nothing failed, and so nothing was skipped either."""
        return all(check.status in (Status.OK, Status.WARNING) for check in self.checks)

    def check(self, name: str, run: Callable[[], Found[T]], *, advice: str = "") -> Outcome[T]:
        """Runs a check.

        Args:
            name: of the check.
            run: does the work. A `SetupError` is a finding; any other exception is one too.
            advice: what to do when it raises.
        """
        found = None
        with _collected_warnings() as warnings:
            try:
                found = run()
                check = Check(name=name, status=found.status, finding=found.text, advice=found.advice)
            except _NeededError as error:
                check = Check(name=name, status=Status.SKIPPED, finding=f"not known without {error}")
            except SetupError as error:
                check = Check(name=name, status=Status.FAILED, finding=_one_line(str(error)), advice=advice)
            except Exception as error:  # A check that breaks must not hide the others.
                check = Check(name=name, status=Status.FAILED, finding=_one_line(f"{type(error).__name__}: {error}"), advice=advice)
        self.checks.append(_with_warnings(check, warnings))
        return Outcome(name, found)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _with_warnings(check: Check, warnings: list[str]) -> Check:
    """What the examined code logged as a warning is part of the finding."""
    if not warnings:
        return check
    status = Status.WARNING if check.status is Status.OK else check.status
    finding = "; ".join((check.finding, *(_one_line(warning) for warning in warnings)))
    return Check(name=check.name, status=status, finding=finding, advice=check.advice)


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Yields a list that receives the warnings that this distribution logs, instead of its log."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, collector = logging.getLogger("modelworker"), Collector(logging.WARNING)
    propagated = logger.propagate
    logger.addHandler(collector)
    logger.propagate = False
    try:
        yield messages
    finally:
        logger.propagate = propagated
        logger.removeHandler(collector)
