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
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
import structlog
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker import errors
from modelworker.worker.call import CallContext, RequestRoom
from modelworker.worker.counters import Counters
from modelworker.worker.telemetry import LineLimit
from modelworker.worker.trace_context import trace_id_of

_LOGGER_NAME = "modelworker.rpc"

ERROR_DOMAIN = "modelworker"
STATUS_DETAILS_KEY = "grpc-status-details-bin"
INTERNAL_TEXT = "internal error: the details are in the worker's log"

# A client accepts 8 KiB of trailing metadata. The message is percent-encoded (at most 3 bytes for one), the details are base64
# (4 bytes for 3) and repeat the message: 3 * 800 + 4 / 3 * 3600 = 7200.
_MAX_MESSAGE_BYTES = 800
_MAX_STATUS_BYTES = 3600
_MAX_VIOLATION_CHARACTERS = 300

# A client that is refused often is seen in the counters; its lines must not drown the others, nor hold up the event loop.
_MAX_LINES_PER_SECOND = 10

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


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A status in place of an answer."""

    code: grpc.StatusCode
    status: status_pb2.Status

    async def send(self, context: _Context) -> None:
        """Ends the call.

        gRPC keeps the exception that this raises, and with it all frames that it passes, until the garbage collector comes by:
        nothing large may stand in them, and no other exception may be its context.
        """
        await context.abort(self.code, self.status.message, ((STATUS_DETAILS_KEY, self.status.SerializeToString()),))


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler: binds the log context, parses the request, and answers exceptions with their status.

    Handlers of streamed answers must be async generators, those of single answers coroutines. Their context is a `CallContext`.

    Args:
        counters: where calls are counted.
        check_size: called with method and bytes of each request before it is parsed; raises what refuses it.
        max_held_bytes: of all requests that are being parsed or wait for their answer; beyond, calls are refused.
    """

    def __init__(self, counters: Counters, *, check_size: Callable[[str, bytes], None], max_held_bytes: int) -> None:
        self._counters = counters
        self._check_size = check_size
        self._room = RequestRoom(max_held_bytes)
        self._log: structlog.stdlib.BoundLogger = structlog.get_logger(_LOGGER_NAME)
        self._limit = LineLimit(max_lines=_MAX_LINES_PER_SECOND, seconds=1.0, report=self._log_held_back)

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
        parse = self._parser(handler, method)

        async def call(raw: Any, context: _Context) -> Any:
            """Answers, or returns why not. What it raises has another sender already."""
            arrival_ns = time.monotonic_ns()
            is_single = isinstance(raw, bytes)
            self._bind(method, context)
            try:
                with self._room.hold(len(raw) if is_single else 0):
                    request = parse(raw)
                    facts = self._bind_step(request)
                    answering = answer(request, CallContext(context, raw=raw if is_single else b"", arrival_ns=arrival_ns))
                    del request  # It would stay as long as the step is queued.
                    response = await answering
                self._log_step(facts, response, arrival_ns)
            except grpc.aio.AbortError:
                raise
            except asyncio.CancelledError:
                self._count(method, grpc.StatusCode.CANCELLED)
                raise
            except Exception as error:
                return self._refusal(method, error)
            self._count(method, grpc.StatusCode.OK)
            return response

        async def behavior(raw: Any, context: _Context) -> Any:
            calling = call(raw, context)
            del raw
            outcome = await calling
            if isinstance(outcome, _Refusal):
                await outcome.send(context)
            return outcome

        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(behavior, None, handler.response_serializer)
        return grpc.unary_unary_rpc_method_handler(behavior, None, handler.response_serializer)

    def _streaming(self, handler: _Handler, method: str) -> _Handler:
        answers: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream
        parse = self._parser(handler, method)

        async def behavior(raw: Any, context: _Context) -> AsyncIterator[Any]:
            call = CallContext(context, raw=b"", arrival_ns=time.monotonic_ns())
            self._bind(method, context)
            refusal: _Refusal | None = None
            try:
                async for response in answers(parse(raw), call):
                    yield response
            except grpc.aio.AbortError:
                raise
            except asyncio.CancelledError:
                self._count(method, grpc.StatusCode.CANCELLED)
                raise
            except Exception as error:
                refusal = self._refusal(method, error)
            del raw
            if refusal is not None:
                await refusal.send(context)
            self._count(method, grpc.StatusCode.OK)

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(behavior, None, handler.response_serializer)
        return grpc.unary_stream_rpc_method_handler(behavior, None, handler.response_serializer)

    def _parser(self, handler: _Handler, method: str) -> Callable[[Any], Any]:
        """Parses the request inside the call, where bytes that are no message can be answered with a proper status."""
        deserialize: _Deserializer = handler.request_deserializer or bytes

        def parse(raw: bytes) -> Any:
            self._check_size(method, raw)
            try:
                return deserialize(raw)
            except DecodeError:
                expected = "the bytes are not a message of this method"
                raise errors.InvalidStepError([errors.Violation("request", expected)]) from None

        async def parse_all(raws: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for raw in raws:
                yield parse(raw)

        return parse_all if handler.request_streaming else parse

    def _refusal(self, method: str, error: Exception) -> _Refusal:
        """Counts and logs a call that ends with an exception."""
        code = code_of(error)
        self._count(method, code)
        if self._limit.admit(method, code.name):
            self._log_error(code, error)
        return _Refusal(code, status_of(error))

    def _count(self, method: str, code: grpc.StatusCode) -> None:
        self._counters.increment("rpcs_total", method=method, code=code.name)

    # -- the log --

    def _bind(self, method: str, context: _Context) -> None:
        """Binds what is known of a call to its log lines. Each call is a task of its own, so that it ends with it."""
        structlog.contextvars.bind_contextvars(method=method)
        for key, value in context.invocation_metadata() or ():
            if key == "traceparent" and isinstance(value, str):
                self._bind_trace(value)

    def _bind_trace(self, traceparent: str) -> None:
        if trace_id := trace_id_of(traceparent):
            structlog.contextvars.bind_contextvars(trace_id=trace_id)
        elif traceparent:
            self._counters.increment("trace_contexts_ignored_total")

    def _bind_step(self, request: Any) -> dict[str, int]:
        """Binds a step's identity to its log lines. Returns its size."""
        if not isinstance(request, pb.ExecuteStepRequest):
            return {}
        structlog.contextvars.bind_contextvars(step_id=request.step_id, epoch=request.worker_epoch, client_tag=request.client_tag)
        self._bind_trace(request.traceparent)
        return {"num_sequences": len(request.query_lens), "num_tokens": len(request.token_ids)}

    def _log_error(self, code: grpc.StatusCode, error: Exception) -> None:
        if code is grpc.StatusCode.INTERNAL:
            self._log.error("call failed", code=code.name, exc_info=error)
        elif isinstance(error, errors.InvalidStepError):
            # The descriptions quote what the client sent, which may be token ids.
            self._log.warning("call refused", code=code.name, fields=[violation.field for violation in error.violations])
        else:
            self._log.warning("call refused", code=code.name, reason=str(error))

    def _log_held_back(self, kind: tuple[str, ...], number: int) -> None:
        method, code = kind
        self._log.warning("more calls refused", method=method, code=code, suppressed=number)

    def _log_step(self, facts: dict[str, int], response: Any, arrival_ns: int) -> None:
        if not isinstance(response, pb.ExecuteStepResponse) or not logging.getLogger(_LOGGER_NAME).isEnabledFor(logging.DEBUG):
            return
        timings = response.timings_ns
        self._log.debug(
            "step executed",
            **facts,
            num_sampled=len(response.sampled_ids),
            num_failed=len(response.sequence_errors),
            graph_mode=pb.GraphMode.Name(response.graph.mode),
            queue_ms=timings.queue / 1e6,
            prepare_ms=timings.prepare / 1e6,
            forward_ms=timings.forward / 1e6,
            sample_ms=timings.sample / 1e6,
            call_ms=(time.monotonic_ns() - arrival_ns) / 1e6,
        )
