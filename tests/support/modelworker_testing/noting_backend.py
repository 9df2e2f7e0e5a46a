"""A graph backend that notes what is asked of it, and whose replays call the captured callable again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from modelworker.graphs.backend import Tensors


class NotingReplay:
    """Calls the callable again, and copies its results to where the first ones lie."""

    def __init__(self, notes: list[str], number: int, run: Callable[[], Tensors], outputs: Tensors) -> None:
        self._notes, self._number, self._run, self._outputs = notes, number, run, outputs

    def __call__(self) -> None:
        self._notes.append(f"replay {self._number}")
        for kept, output in zip(self._outputs, self._run(), strict=True):
            kept.copy_(output)

    def close(self) -> None:
        """Notes it."""
        self._notes.append(f"close {self._number}")


class NotingBackend:
    """Notes every call.

    Attributes:
        runs_what_it_captures: as given.
        notes: what was called, in order; others may add to it.
        failing: the numbers of the captures that fail.
        num_bytes: grows by 100 with every capture.
    """

    def __init__(
        self,
        notes: list[str] | None = None,
        failing: dict[int, Exception] | None = None,
        *,
        runs_what_it_captures: bool = False,
    ) -> None:
        self.runs_what_it_captures = runs_what_it_captures
        self.notes = [] if notes is None else notes
        self.failing = failing or {}
        self.num_bytes = 0
        self._num_captures = 0

    @contextmanager
    def session(self) -> Iterator[None]:
        """Notes both ends."""
        self.notes.append("session")
        yield
        self.notes.append("end of session")

    def capture(self, run: Callable[[], Tensors]) -> tuple[NotingReplay, Tensors]:
        """Runs the callable."""
        number = self._num_captures
        self._num_captures += 1
        if number in self.failing:
            self.notes.append(f"failure {number}")
            raise self.failing[number]
        self.notes.append(f"capture {number}")
        outputs = run()
        self.num_bytes += 100
        return NotingReplay(self.notes, number, run, outputs), outputs

    def borrowed(self, tensor: Tensor) -> Tensor:
        """Returns the tensor itself."""
        return tensor

    def close(self) -> None:
        """Notes it."""
        self.notes.append("close backend")
