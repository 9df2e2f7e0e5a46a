"""What is in the queue, and the tickets of those who wait for it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from modelworker.worker.batch import StepBatch
from modelworker.worker.errors import WorkerError
from modelworker.worker.result import StepResult

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer to an executed step.

    Attributes:
        result: what the step produced.
        worker_epoch: in which it was executed.
        replayed: it was executed for an earlier call.
    """

    result: StepResult
    worker_epoch: int
    replayed: bool = False


class Ticket(Generic[T]):
    """One caller's interest in an item of the queue. Lives on the event loop.

    The caller awaits `answer`; being cancelled there withdraws the interest. Who holds a ticket without awaiting it, as a stream
    does (or a task of `answer` that has not run yet), calls `withdraw` when its own caller has gone.

    Args:
        on_withdraw: called when the interest ends before the outcome.
        on_late: called when the deadline passes before the outcome.
        deadline_ns: `time.monotonic_ns()` after which the caller does not want the item started.
    """

    def __init__(
        self,
        on_withdraw: "Callable[[Ticket[T]], None]",
        on_late: "Callable[[Ticket[T]], None]",
        deadline_ns: int | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._on_withdraw = on_withdraw
        self._deadline_ns = deadline_ns
        self._timer: asyncio.TimerHandle | None = None
        if deadline_ns is not None:
            self._timer = loop.call_later((deadline_ns - time.monotonic_ns()) / 1e9, on_late, self)
        # An error is a result here: nobody has to look at the ticket of a caller that has gone.
        self._outcome: asyncio.Future[T | WorkerError] = loop.create_future()

    async def answer(self) -> T:
        """Waits for the outcome.

        Raises:
            WorkerError: the step was not executed, or failed.
        """
        try:
            outcome = await self._outcome
        except asyncio.CancelledError:
            self.withdraw()
            raise
        if isinstance(outcome, WorkerError):
            # Several callers may be told by one object: each gets its own traceback.
            raise outcome.with_traceback(None)
        return outcome

    def when_settled(self, callback: Callable[[], object]) -> None:
        """Has `callback` called on the event loop soon after the outcome, or after the caller was cancelled while it waited."""
        self._outcome.add_done_callback(lambda _: callback())

    def withdraw(self) -> None:
        """Ends the interest. Does nothing after the outcome."""
        self._on_withdraw(self)

    def is_late(self, now_ns: int) -> bool:
        """Whether the deadline has passed."""
        return self._deadline_ns is not None and now_ns >= self._deadline_ns

    def resolve(self, outcome: T | WorkerError) -> None:
        """Tells the caller, unless it has gone."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._outcome.done():
            self._outcome.set_result(outcome)


@dataclass(eq=False, slots=True)
class Step:
    """A step in the queue or on the engine, and who waits for it."""

    batch: StepBatch
    tickets: list[Ticket[Any]] = field(default_factory=list)
    is_queued: bool = True
    started_epoch: int = 0

    @property
    def key(self) -> tuple[int, int, int]:
        """What a retry has in common with it."""
        return self.batch.worker_epoch, self.batch.router_id, self.batch.step_id

    @property
    def name(self) -> str:
        """For messages."""
        return f"step {self.batch.step_id}" if self.batch.is_sequenced else "the step"


@dataclass(eq=False, slots=True)
class Control:
    """A call of the engine that is no step, in its turn among the steps."""

    action: Callable[[], object]
    tickets: list[Ticket[Any]] = field(default_factory=list)
    is_queued: bool = True
    name: str = "the call"


Item = Step | Control
Outcomes = list[tuple[list[Ticket[Any]], object]]
"""Callers, and what each of them is told."""
