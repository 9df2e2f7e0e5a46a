"""Which of a session's steps are on the present stream: a stream session without its transport."""

import grpc

from modelworker.proto.model_worker_pb2 import ExecuteStepRequest, WorkerInfo
from modelworker.worker.client.answer import StepAnswer
from modelworker.worker.client.errors import KvCacheLostError, WorkerCallError, WorkerFaultError
from modelworker.worker.client.session_state import SessionState, StepPendingError
from modelworker.worker.client.stream import StreamAnswer
from modelworker.worker.errors import PreconditionReason


class Pipeline:
    """Sends a session's unanswered steps in order on one stream after another, and settles the oldest with each answer.

    Args:
        state: of the session.
        max_unanswered: steps that may be under way; None: as many as the worker takes.
    """

    def __init__(self, state: SessionState, max_unanswered: int | None) -> None:
        self._state = state
        self._max_unanswered = max_unanswered
        self._num_void = 0

    def stamp(self, request: ExecuteStepRequest, info: WorkerInfo) -> bool:
        """Makes the request the next step. Returns whether it is the only one that is not answered.

        Raises:
            StepPendingError: there are too many of them.
        """
        self._state.stamp(request, self.max_unanswered(info))
        return len(self._state.unanswered) == 1

    def max_unanswered(self, info: WorkerInfo) -> int:
        """Returns how many steps may be unanswered at once. Those beyond the worker's limit are refused, and sent again."""
        return self._max_unanswered or info.limits.max_steps_in_flight

    def begin(self) -> list[ExecuteStepRequest]:
        """Starts with a new stream. Returns what has to be sent on it."""
        self._num_void = 0
        return list(self._state.unanswered)

    def check_epoch(self, info: WorkerInfo) -> None:
        """Checks that the unanswered steps can still be settled.

        Raises:
            KvCacheLostError: they belong to an epoch that is over.
        """
        if info.worker_epoch != self._state.worker_epoch:
            text = f"the worker's epoch is {info.worker_epoch}, no longer {self._state.worker_epoch}"
            reason = PreconditionReason.KV_CACHE_LOST
            raise KvCacheLostError(grpc.StatusCode.FAILED_PRECONDITION, text, reason=reason)

    def check_settled(self) -> None:
        """Checks that every step is answered.

        Raises:
            StepPendingError: one is not.
        """
        if self._state.pending is not None:
            raise StepPendingError(f"step {self._state.next_step_id - 1} is not settled: call receive() first")

    def take(self, answer: StreamAnswer) -> StepAnswer | WorkerCallError | None:
        """Takes the next answer of the stream: that of the first unanswered step, or None where it belongs to a void one.

        With an error all other steps on the stream are void: their answers are still to come, and say nothing more.
        """
        if self._num_void:
            self._num_void -= 1
            return None
        pending = self._state.pending
        if pending is None or answer.step_id not in (pending.step_id, 0):
            expected = "none" if pending is None else f"that of step {pending.step_id}"
            raise WorkerFaultError(grpc.StatusCode.UNKNOWN, f"the answer of step {answer.step_id} came, expected {expected}")
        if isinstance(answer.outcome, WorkerCallError):
            self._num_void = len(self._state.unanswered) - 1
        else:
            self._state.settle()
        return answer.outcome
