"""The server's interceptor: log context for every call, and the one table that turns exceptions into statuses.

The table, and the `google.rpc` details that go with it:

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

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker import errors
from modelworker.worker.counters import Counters
from modelworker.worker.telemetry import trace_id_of

_LOGGER_NAME = "modelworker.rpc"

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

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Deserializer = Callable[[bytes], Any]


def code_of(error: Exception) -> grpc.StatusCode:
    """Returns the status code of an exception: the table's, else INTERNAL."""
    for kind in type(error).__mro__:
        if kind in _CODES:
            return _CODES[kind]
    return grpc.StatusCode.INTERNAL


def status_of(error: Exception) -> status_pb2.Status:
    """Returns the status that a client gets for an exception, small enough for trailing metadata."""
    code: int = code_of(error).value[0]
    known = any(kind in _CODES for kind in type(error).__mro__)
    message = _truncated(str(error) if known and str(error) else INTERNAL_TEXT, _MAX_MESSAGE_BYTES)
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


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler: binds the log context, parses the request, and answers exceptions with their status.

    Handlers of streamed answers must be async generators, those of single answers coroutines.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._log: structlog.stdlib.BoundLogger = structlog.get_logger(_LOGGER_NAME)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable["_Handler | None"]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "_Handler | None":
        """Returns the wrapped handler of a call; None where there is none, which gRPC answers with UNIMPLEMENTED."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method.rpartition("/")[2]
        return self._streaming(handler, method) if handler.response_streaming else self._single(handler, method)

    def _single(self, handler: _Handler, method: str) -> _Handler:
        answer: Any = handler.stream_unary if handler.request_streaming else handler.unary_unary
        parse = _parser(handler)

        async def behavior(raw: Any, context: _Context) -> Any:
            async with self._call(method, context):
                started_ns = time.monotonic_ns()
                request = parse(raw)
                _bind_step(request)
                response = await answer(request, context)
                self._log_step(request, response, started_ns)
                return response

        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(behavior, None, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(behavior, None, handler.response_serializer)

    def _streaming(self, handler: _Handler, method: str) -> _Handler:
        answers: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream
        parse = _parser(handler)

        async def behavior(raw: Any, context: _Context) -> AsyncIterator[Any]:
            async with self._call(method, context):
                async for response in answers(parse(raw), context):
                    yield response

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(behavior, None, handler.response_serializer)
        return grpc.unary_stream_rpc_method_handler(behavior, None, handler.response_serializer)

    @asynccontextmanager
    async def _call(self, method: str, context: _Context) -> AsyncIterator[None]:
        """Runs one call. Cancellation is not an error and passes through: nobody is there to read a status."""
        # Each call is a task of its own, so what is bound here ends with it.
        structlog.contextvars.bind_contextvars(method=method, **_trace_of(context))
        try:
            yield
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:
            self._counters.increment("rpcs_total", method=method, code=grpc.StatusCode.CANCELLED.name)
            raise
        except Exception as error:
            self._log_error(error)
            status = status_of(error)
            code = code_of(error)
            self._counters.increment("rpcs_total", method=method, code=code.name)
            await context.abort(code, status.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),))
        else:
            self._counters.increment("rpcs_total", method=method, code=grpc.StatusCode.OK.name)

    def _log_error(self, error: Exception) -> None:
        code = code_of(error)
        if code is grpc.StatusCode.INTERNAL:
            self._log.error("call failed", code=code.name, exc_info=error)
        elif isinstance(error, errors.InvalidStepError):
            # The descriptions quote what the client sent, which may be token ids.
            self._log.warning("call refused", code=code.name, fields=[violation.field for violation in error.violations])
        else:
            self._log.warning("call refused", code=code.name, reason=str(error))

    def _log_step(self, request: Any, response: Any, started_ns: int) -> None:
        if not isinstance(response, pb.ExecuteStepResponse) or not logging.getLogger(_LOGGER_NAME).isEnabledFor(logging.DEBUG):
            return
        timings = response.timings_ns
        self._log.debug(
            "step executed",
            num_sequences=len(request.query_lens),
            num_tokens=len(request.token_ids),
            num_sampled=len(response.sampled_ids),
            num_failed=len(response.sequence_errors),
            graph_mode=pb.GraphMode.Name(response.graph.mode),
            queue_ms=timings.queue / 1e6,
            prepare_ms=timings.prepare / 1e6,
            forward_ms=timings.forward / 1e6,
            sample_ms=timings.sample / 1e6,
            call_ms=(time.monotonic_ns() - started_ns) / 1e6,
        )


def _parser(handler: _Handler) -> Callable[[Any], Any]:
    """Parses the request inside the call, where bytes that are no message can be answered with a proper status."""
    deserialize: _Deserializer = handler.request_deserializer or bytes

    def parse(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except DecodeError:
            expected = "the bytes are not a message of this method"
            raise errors.InvalidStepError([errors.Violation("request", expected)]) from None

    async def parse_all(raws: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for raw in raws:
            yield parse(raw)

    return parse_all if handler.request_streaming else parse


def _bind_step(request: Any) -> None:
    if not isinstance(request, pb.ExecuteStepRequest):
        return
    structlog.contextvars.bind_contextvars(step_id=request.step_id, epoch=request.worker_epoch, client_tag=request.client_tag)
    if trace_id := trace_id_of(request.traceparent):
        structlog.contextvars.bind_contextvars(trace_id=trace_id)


def _trace_of(context: _Context) -> dict[str, str]:
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str) and (trace_id := trace_id_of(value)):
            return {"trace_id": trace_id}
    return {}
