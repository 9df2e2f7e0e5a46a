"""The one table that turns exceptions into statuses, of calls and of the items of streams.

Exception, status, and the `google.rpc` details that go with it:

    InvalidStepError      INVALID_ARGUMENT      BadRequest: every violation's field and description
    PreconditionError     FAILED_PRECONDITION   ErrorInfo: reason, domain "modelworker", metadata
    OverloadedError       RESOURCE_EXHAUSTED    RetryInfo
    UnavailableError      UNAVAILABLE           RetryInfo, where it is known when to come back
    StepIdReusedError     ALREADY_EXISTS
    StepDeadlineError     DEADLINE_EXCEEDED
    StepCancelledError    CANCELLED
    NotBuiltError         UNIMPLEMENTED
    EngineFaultError      INTERNAL
    anything else         INTERNAL with a fixed text; what happened stands in the log only
"""

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from modelworker.worker import errors

ERROR_DOMAIN = "modelworker"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
INTERNAL_TEXT = "internal error: the details are in the worker's log"

# A client accepts 8 KiB of trailing metadata. The message is percent-encoded (at most 3 bytes for one), the details are base64
# (4 bytes for 3) and repeat the message: 3 * 800 + 4 / 3 * 3600 = 7200.
_MAX_MESSAGE_BYTES = 800
_MAX_STATUS_BYTES = 3600
_MAX_VIOLATION_CHARACTERS = 300

_CODES: dict[type[errors.WorkerError], grpc.StatusCode] = {
    errors.InvalidStepError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.UnavailableError: grpc.StatusCode.UNAVAILABLE,
    errors.StepIdReusedError: grpc.StatusCode.ALREADY_EXISTS,
    errors.StepDeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.StepCancelledError: grpc.StatusCode.CANCELLED,
    errors.NotBuiltError: grpc.StatusCode.UNIMPLEMENTED,
    errors.EngineFaultError: grpc.StatusCode.INTERNAL,
}


def code_of(error: Exception) -> grpc.StatusCode:
    """Returns the status code of an exception: the table's, else INTERNAL."""
    return _row_of(error) or grpc.StatusCode.INTERNAL


def _row_of(error: Exception) -> grpc.StatusCode | None:
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), None)


def status_of(error: Exception) -> status_pb2.Status:
    """Returns the status that a client gets for an exception, small enough for trailing metadata."""
    is_known = _row_of(error) is not None
    code: int = code_of(error).value[0]
    message = _truncated(str(error) if is_known and str(error) else INTERNAL_TEXT, _MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=code, message=message)
    match error:
        case errors.InvalidStepError():
            _add_violations(status, error)
        case errors.PreconditionError():
            _add_detail(status, error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=error.metadata))
        case errors.OverloadedError() | errors.UnavailableError() if error.retry_after_ms is not None:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(error.retry_after_ms)
            _add_detail(status, retry)
    return status


def _add_detail(status: status_pb2.Status, detail: Message) -> None:
    status.details.add().Pack(detail)


def _add_violations(status: status_pb2.Status, error: errors.InvalidStepError) -> None:
    """Adds as many violations as fit."""
    request = error_details_pb2.BadRequest()
    for violation in error.violations:
        request.field_violations.add(
            field=_truncated(violation.field, _MAX_VIOLATION_CHARACTERS),
            description=_truncated(violation.description, _MAX_VIOLATION_CHARACTERS),
        )
    while request.field_violations and status.ByteSize() + request.ByteSize() > _MAX_STATUS_BYTES:
        request.field_violations.pop()
    _add_detail(status, request)


def _truncated(text: str, max_bytes: int) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return encoded.decode()
    return encoded[: max_bytes - 4].decode(errors="ignore") + " ..."
