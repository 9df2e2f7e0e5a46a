"""The server's interceptor: log context for every call, and exceptions answered by the table of `statuses`."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from modelworker.worker import errors
from modelworker.worker.call import CallContext, RequestRoom
from modelworker.worker.call_log import CallLog
from modelworker.worker.statuses import STATUS_DETAILS_KEY, code_of, status_of

_Context = grpc.aio.ServicerContext[Any, Any]
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Deserializer = Callable[[bytes], Any]


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

    Handlers of streamed answers must return async generators, those of single answers are coroutines. Their context is a
    `CallContext`.

    Args:
        log: where calls are counted and written down.
        check_size: called with method and bytes of each request before it is parsed; raises what refuses it.
        room: bounds the bytes of all requests that are being parsed or wait for their answer; beyond, calls are refused.
        item_streams: methods whose handler gets the bytes of each request, and answers what is wrong with one of them in its turn.
    """

    def __init__(
        self,
        log: CallLog,
        *,
        check_size: Callable[[str, bytes], None],
        room: RequestRoom,
        item_streams: frozenset[str] = frozenset(),
    ) -> None:
        self._log = log
        self._check_size = check_size
        self._room = room
        self._item_streams = item_streams

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
        convert = _each(parse) if handler.request_streaming else parse

        async def call(raw: Any, context: _Context) -> Any:
            """Answers, or returns why not. What it raises has another sender already."""
            arrival_ns = time.monotonic_ns()
            is_single = isinstance(raw, bytes)
            self._log.bind_call(method, context.invocation_metadata() or ())
            try:
                with self._room.hold(len(raw) if is_single else 0):
                    request = convert(raw)
                    size = self._log.bind_step(request)
                    call = CallContext(context, raw=raw if is_single else b"", arrival_ns=arrival_ns, parse=parse)
                    answering = answer(request, call)
                    del request  # It would stay as long as the step is queued.
                    response = await answering
                self._log.write_step(size, response, arrival_ns)
            except grpc.aio.AbortError:
                raise
            except asyncio.CancelledError:
                self._log.count_call(method, grpc.StatusCode.CANCELLED)
                raise
            except Exception as error:
                return self._refusal(method, error)
            self._log.count_call(method, grpc.StatusCode.OK)
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
        convert: Callable[[Any], Any] = _each(parse) if handler.request_streaming else parse
        if method in self._item_streams:
            convert = _unchanged

        async def call(raw: Any, context: _Context) -> _Refusal | None:
            """Writes the answers, or returns why there are no more."""
            call = CallContext(context, raw=b"", arrival_ns=time.monotonic_ns(), parse=parse)
            self._log.bind_call(method, context.invocation_metadata() or ())
            try:
                # Closed here, whatever ends the call: left to the garbage collector, a handler would learn of it some time later.
                async with aclosing(answers(convert(raw), call)) as responses:
                    async for response in responses:
                        await _write(context, response)
            except grpc.aio.AbortError:
                raise
            except _ClientGoneError:
                self._log.count_call(method, grpc.StatusCode.CANCELLED)
                return None
            except asyncio.CancelledError:
                self._log.count_call(method, grpc.StatusCode.CANCELLED)
                raise
            except Exception as error:
                return self._refusal(method, error)
            self._log.count_call(method, grpc.StatusCode.OK)
            return None

        async def behavior(raw: Any, context: _Context) -> None:
            calling = call(raw, context)
            del raw
            refusal = await calling
            if refusal is not None:
                await refusal.send(context)

        # A coroutine that writes its answers itself is a handler of streamed answers, too; the types of grpc don't know that.
        writing: Any = behavior
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(writing, None, handler.response_serializer)
        return grpc.unary_stream_rpc_method_handler(writing, None, handler.response_serializer)

    def _parser(self, handler: _Handler, method: str) -> Callable[[bytes], Any]:
        """Parses a request inside the call, where bytes that are no message can be answered with a proper status."""
        deserialize: _Deserializer = handler.request_deserializer or bytes

        def parse(raw: bytes) -> Any:
            self._check_size(method, raw)
            try:
                return deserialize(raw)
            except DecodeError:
                expected = "the bytes are not a message of this method"
                raise errors.InvalidStepError([errors.Violation("request", expected)]) from None

        return parse

    def _refusal(self, method: str, error: Exception) -> _Refusal:
        """Counts and logs a call that ends with an exception."""
        code = code_of(error)
        self._log.count_call(method, code)
        self._log.write_error(method, error)
        return _Refusal(code, status_of(error))


class _ClientGoneError(Exception):
    """There is nobody to write to any more; the call's task is about to be cancelled."""


async def _write(context: _Context, response: Any) -> None:
    try:
        await context.write(response)
    except grpc.aio.InternalError as error:  # All that gRPC says of a call that has broken.
        raise _ClientGoneError from error


def _each(parse: Callable[[bytes], Any]) -> Callable[[AsyncIterator[bytes]], AsyncIterator[Any]]:
    async def parse_all(raws: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for raw in raws:
            yield parse(raw)

    return parse_all


def _unchanged(raws: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    return raws
