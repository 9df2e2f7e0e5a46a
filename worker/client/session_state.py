"""What a session keeps and decides, whatever its transport: which steps are not answered, and whether to send them again."""

import secrets
import time
from collections import deque

import grpc

from modelworker.proto.model_worker_pb2 import ExecuteStepRequest, WorkerInfo
from modelworker.worker.client.errors import (
    CallDeadlineError,
    WorkerBusyError,
    WorkerCallError,
    WorkerFaultError,
    WorkerUnavailableError,
)

_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0


class StepPendingError(Exception):
    """A step may or may not have been executed. `resume` has to settle that before another step is sent."""


class Attempts:
    """The attempts of one call: when to give up, and how long to pause before the next."""

    def __init__(self, patience: float) -> None:
        self._deadline = time.monotonic() + patience
        self._pause = _FIRST_PAUSE_SECONDS
        self._num_faults = 0

    @property
    def remaining(self) -> float:
        """Seconds left for the next attempt."""
        return max(self._deadline - time.monotonic(), 0.001)

    def pause_after(self, error: WorkerCallError) -> float | None:
        """Returns the seconds to pause before the next attempt, None when another attempt can't help or time is up."""
        pause: float | None = None
        if isinstance(error, WorkerUnavailableError) or error.code is grpc.StatusCode.CANCELLED:
            pause = self._pause if error.retry_after is None else error.retry_after
            self._pause = min(self._pause * 2, _LONGEST_PAUSE_SECONDS)
        elif isinstance(error, WorkerBusyError):
            pause = error.retry_after
        elif isinstance(error, WorkerFaultError) or error.code is grpc.StatusCode.UNKNOWN:
            # Once more under the same id: the worker then says what became of the step (usually KV_CACHE_LOST).
            self._num_faults += 1
            pause = self._pause if self._num_faults == 1 else None
        return pause if pause is not None and time.monotonic() + pause < self._deadline else None

    def pause_or_raise(self, error: WorkerCallError) -> float:
        """Returns the seconds to pause before the next attempt.

        Raises:
            WorkerCallError: `error` itself, when another attempt can't help or time is up.
        """
        pause = self.pause_after(error)
        if pause is None:
            raise error
        return pause


def _may_have_executed(error: WorkerCallError) -> bool:
    unclear = (WorkerUnavailableError, CallDeadlineError, WorkerFaultError)
    return isinstance(error, unclear) or error.code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)


class SessionState:
    """Epoch, router id, next step id and the steps that are not answered: a session without its transport.

    Attributes:
        unanswered: the steps, in order; the first of them has the id after the last one that was executed.
    """

    def __init__(self, router_id: int | None) -> None:
        self.router_id = secrets.randbits(64) or 1 if router_id is None else router_id
        self.worker_epoch = 0
        self.unanswered: deque[ExecuteStepRequest] = deque()
        self._first_step_id = 1
        self._is_unclear = False

    @property
    def next_step_id(self) -> int:
        """Id that the next step will have."""
        return self._first_step_id + len(self.unanswered)

    @property
    def pending(self) -> ExecuteStepRequest | None:
        """The first of the steps, if there is one."""
        return self.unanswered[0] if self.unanswered else None

    def first_pending(self) -> ExecuteStepRequest:
        """Returns the first of the steps.

        Raises:
            StepPendingError: there is none.
        """
        if not self.unanswered:
            raise StepPendingError("no step is pending")
        return self.unanswered[0]

    def enter(self, info: WorkerInfo) -> None:
        """Takes over the worker's epoch and step id; what was not answered is void."""
        self.worker_epoch = info.worker_epoch
        self._first_step_id = info.next_step_id
        self.unanswered.clear()

    def stamp(self, request: ExecuteStepRequest, max_unanswered: int = 1) -> None:
        """Makes the request the step that is next.

        Raises:
            StepPendingError: as many steps as may be are not answered.
        """
        if len(self.unanswered) >= max_unanswered:
            first, number = self._first_step_id, len(self.unanswered)
            if number == 1:
                raise StepPendingError(f"step {first} is not settled: call resume() first")
            raise StepPendingError(f"{number} steps from {first} on are not answered, the most there may be: call receive() first")
        request.worker_epoch = self.worker_epoch
        request.router_id = self.router_id
        request.step_id = self.next_step_id
        self.unanswered.append(request)

    def settle(self) -> None:
        """The first of the steps was executed."""
        self.unanswered.popleft()
        self._first_step_id += 1
        self._is_unclear = False

    def pause_after(self, error: WorkerCallError, attempts: Attempts, *, in_band: bool = False) -> float:
        """Returns the seconds to pause before the steps are sent again.

        Args:
            error: what came in place of an answer.
            attempts: of the call that waits for it.
            in_band: it came in the step's turn on a stream, so that it is the worker's last word on this step.

        Raises:
            WorkerCallError: `error` itself, when sending them again can't help. The steps stay pending where the first one may
                have been executed: only an answer that speaks of this very step settles it, being out of room does not.
        """
        self._is_unclear |= _may_have_executed(error)
        pause = attempts.pause_after(error)
        if pause is None:
            if in_band or not (self._is_unclear and (_may_have_executed(error) or isinstance(error, WorkerBusyError))):
                self.abandon()
            raise error
        return pause

    def abandon(self) -> None:
        """The first of the steps will not be executed, and none behind it."""
        self.unanswered.clear()
        self._is_unclear = False
