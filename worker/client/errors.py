"""What a call to a worker can end with, as exceptions.

WorkerCallError              a call failed; `code` is its gRPC status
  InvalidRequestError        INVALID_ARGUMENT: nothing was executed; `violations` names what is wrong
  PreconditionFailedError    FAILED_PRECONDITION: `reason` says which of epoch, order, ownership or feedback does not fit
    KvCacheLostError         KV_CACHE_LOST: the KV cache is not the one the caller knows; recompute everything
    StepOutOfOrderError      STEP_OUT_OF_ORDER: another step id is next
    WorkerOwnedError         WORKER_OWNED: another router holds the lease
    FeedbackMismatchError    FEEDBACK_MISMATCH: the worker does not have the token that -1 or a history stands for
  WorkerBusyError            RESOURCE_EXHAUSTED: come back after `retry_after` seconds (None: a retry would not help)
  WorkerUnavailableError     UNAVAILABLE: starting, draining, gone, or the connection broke; the step may have been executed
  CallDeadlineError          DEADLINE_EXCEEDED: the caller's time is up; the step may have been executed
  StepConflictError          ALREADY_EXISTS: the step id was executed with other content
  NotImplementedByWorkerError  UNIMPLEMENTED: the worker does not know the rpc
  WorkerFaultError           INTERNAL: the worker failed; the KV cache may be lost

`errors` has the worker's own exceptions; these are what becomes of them on the other side of the wire.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from modelworker.worker.errors import PreconditionReason, Violation

_DETAILS_KEY = "grpc-status-details-bin"
_CODES: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class WorkerCallError(Exception):
    """A call to a worker failed.

    Attributes:
        code: the gRPC status.
        message: the worker's text, or the transport's.
        violations: what is wrong with the request, by field.
        reason: machine-readable reason of FAILED_PRECONDITION, else "".
        metadata: more of the reason, e.g. `expected_step_id`.
        retry_after: seconds to wait before a retry, None where the worker names none.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        violations: tuple[Violation, ...] = (),
        reason: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after: float | None = None,
    ) -> None:
        self.code = code
        self.message = message
        self.violations = violations
        self.reason = reason
        self.metadata = dict(metadata or {})
        self.retry_after = retry_after
        super().__init__(f"{code.name}{f' ({reason})' if reason else ''}: {message}")


class InvalidRequestError(WorkerCallError):
    """The request is malformed. Nothing was executed."""


class PreconditionFailedError(WorkerCallError):
    """The request does not fit the worker's state. Nothing was executed."""


class KvCacheLostError(PreconditionFailedError):
    """The worker's KV cache is not the one that the caller knows: every sequence has to be recomputed."""


class StepOutOfOrderError(PreconditionFailedError):
    """The step id is not the one that the worker expects next."""


class WorkerOwnedError(PreconditionFailedError):
    """Another router holds the worker's lease."""


class FeedbackMismatchError(PreconditionFailedError):
    """The worker does not have the token that -1, or the end of a history, stands for: send the token itself."""


class WorkerBusyError(WorkerCallError):
    """The worker, or a message limit, has no room for the call."""


class WorkerUnavailableError(WorkerCallError):
    """The worker is starting, draining or gone, or the connection broke."""


class CallDeadlineError(WorkerCallError):
    """The caller's time is up."""


class StepConflictError(WorkerCallError):
    """The step id was executed with other content."""


class NotImplementedByWorkerError(WorkerCallError):
    """The worker does not implement the rpc."""


class WorkerFaultError(WorkerCallError):
    """The worker failed while it executed the call."""


_BY_CODE: Mapping[grpc.StatusCode, type[WorkerCallError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: PreconditionFailedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: WorkerBusyError,
    grpc.StatusCode.UNAVAILABLE: WorkerUnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: CallDeadlineError,
    grpc.StatusCode.ALREADY_EXISTS: StepConflictError,
    grpc.StatusCode.UNIMPLEMENTED: NotImplementedByWorkerError,
    grpc.StatusCode.INTERNAL: WorkerFaultError,
}
_BY_REASON: Mapping[str, type[WorkerCallError]] = {
    PreconditionReason.KV_CACHE_LOST: KvCacheLostError,
    PreconditionReason.STEP_OUT_OF_ORDER: StepOutOfOrderError,
    PreconditionReason.WORKER_OWNED: WorkerOwnedError,
    PreconditionReason.FEEDBACK_MISMATCH: FeedbackMismatchError,
}


def error_of_status(code: grpc.StatusCode, message: str, details: Iterable[AnyMessage] = ()) -> WorkerCallError:
    """Makes the exception of a status, with what its `google.rpc` details say."""
    violations: list[Violation] = []
    reason, metadata, retry_after = "", {}, None
    bad_request, error_info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
    retry_info = error_details_pb2.RetryInfo()
    for detail in details:
        if detail.Unpack(bad_request):
            violations.extend(Violation(each.field, each.description) for each in bad_request.field_violations)
        elif detail.Unpack(error_info):
            reason, metadata = error_info.reason, dict(error_info.metadata)
        elif detail.Unpack(retry_info):
            retry_after = retry_info.retry_delay.ToNanoseconds() / 1e9
    kind = _BY_CODE.get(code, WorkerCallError)
    if kind is PreconditionFailedError:
        kind = _BY_REASON.get(reason, kind)
    return kind(code, message, violations=tuple(violations), reason=reason, metadata=metadata, retry_after=retry_after)


def error_of_code(code: int, message: str, details: Iterable[AnyMessage] = ()) -> WorkerCallError:
    """Makes the exception of a status that came in band, as a number of `google.rpc.Code`."""
    return error_of_status(_CODES.get(code, grpc.StatusCode.UNKNOWN), message, details)


@contextmanager
def worker_errors() -> Iterator[None]:
    """Turns the errors of sync and async gRPC calls into WorkerCallError."""
    try:
        yield
    except grpc.RpcError as error:
        # Every error that a call raises is a grpc.Call too, which the type of RpcError doesn't tell.
        raise _error_of_call(error) from error


def _error_of_call(error: grpc.RpcError) -> WorkerCallError:
    assert isinstance(error, (grpc.Call, grpc.aio.AioRpcError))
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            try:
                status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode("latin-1"))
            except DecodeError:
                break
            return error_of_status(error.code(), error.details() or "", status.details)
    return error_of_status(error.code(), error.details() or "")
