"""What the worker is doing while it starts, readable from any thread: the text of UNAVAILABLE until the worker is ready."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from modelworker.worker.progress import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    name: str
    total: int | None
    done: int

    def __str__(self) -> str:
        if not self.total:
            return self.name
        return f"{self.name} {min(100 * self.done // self.total, 100)} %"


class StageTracker:
    """A `Progress` that remembers the current stage and passes everything on to another one."""

    def __init__(self, inner: Progress) -> None:
        self._inner = inner
        # Replaced as a whole by the engine thread; a reader on another thread sees one stage or the next.
        self._current = _Stage(name="preparing", total=None, done=0)

    def __str__(self) -> str:
        """The current stage, e.g. "loading weights 43 %"."""
        return str(self._current)

    @contextmanager
    def stage(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Callable[[int], None]]:
        """Enters a stage; when it ends, the stage around it is the current one again."""
        outer = self._current
        self._current = _Stage(name=name, total=total, done=0)
        try:
            with self._inner.stage(name, total, unit) as advance:

                def count(amount: int) -> None:
                    stage = self._current
                    self._current = _Stage(name=name, total=total, done=stage.done + amount)
                    advance(amount)

                yield count
        finally:
            self._current = outer
