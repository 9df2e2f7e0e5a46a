"""A stream of steps: `StepStream` and `AsyncStepStream`, alike but for the transport; made by `Client.stream_steps`.

Steps are executed and answered in the order in which they are sent, several in flight. What is wrong with one step is its answer;
what is wrong with the connection is an error of `receive`, after which the stream is over.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.client.answer import StepAnswer, decode_answer
from modelworker.worker.client.errors import (
    CallDeadlineError,
    WorkerCallError,
    WorkerFaultError,
    WorkerUnavailableError,
    error_of_code,
    worker_errors,
)


class RunningStream(Protocol):
    """What this module needs of a blocking call."""

    def __iter__(self) -> Iterator[pb.ExecuteStepsResponse]: ...
    def cancel(self) -> object: ...  # noqa: D102


StartStream = Callable[[Iterator[bytes]], RunningStream]


@dataclass(frozen=True, slots=True)
class StreamAnswer:
    """The answer to one step of a stream.

    Attributes:
        step_id: as in the request.
        client_tag: as in the request.
        outcome: what the step produced, or the error that a call of its own would have raised.
    """

    step_id: int
    client_tag: int
    outcome: StepAnswer | WorkerCallError

    def result(self) -> StepAnswer:
        """Returns what the step produced.

        Raises:
            WorkerCallError: it was refused, not executed, or failed.
        """
        if isinstance(self.outcome, WorkerCallError):
            raise self.outcome
        return self.outcome


def _decode(response: pb.ExecuteStepsResponse) -> StreamAnswer:
    outcome: StepAnswer | WorkerCallError
    if response.WhichOneof("result") == "error":
        outcome = error_of_code(response.error.code, response.error.message, response.error.details)
    else:
        outcome = decode_answer(response.ok)
    return StreamAnswer(response.step_id, response.client_tag, outcome)


def _ended() -> WorkerCallError:
    return WorkerUnavailableError(grpc.StatusCode.UNAVAILABLE, "the stream has ended: the worker is draining, or all was answered")


def _late(timeout: float | None) -> WorkerCallError:
    return CallDeadlineError(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer on the stream after {timeout or 0:g} s")


class StepStream:
    """A stream of steps for one thread that sends and one that receives, or one that does both.

    Args:
        start: begins the call with an iterator of serialized requests.
    """

    def __init__(self, start: StartStream) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[StreamAnswer | WorkerCallError] = queue.SimpleQueue()
        self._error: WorkerCallError | None = None
        self._call = start(iter(self._requests.get, None))
        # A call can't be waited for with a limit, a queue can.
        threading.Thread(target=self._read, name="step stream", daemon=True).start()

    def send(self, request: pb.ExecuteStepRequest) -> None:
        """Sends a step, without waiting. On a stream that is over nothing happens; `receive` says why."""
        self._requests.put(request.SerializeToString())

    def receive(self, timeout: float | None = None) -> StreamAnswer:
        """Returns the next answer.

        Raises:
            WorkerCallError: the stream is over, because of the connection, the worker's end, or `timeout` in seconds.
        """
        if self._error is not None:
            raise self._error
        try:
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            answer = _late(timeout)
            self.cancel()
        if isinstance(answer, WorkerCallError):
            self._error = answer
            raise answer
        return answer

    def finish(self) -> None:
        """Sends no more; what was sent is answered."""
        self._requests.put(None)

    def cancel(self) -> None:
        """Ends the stream at once. The worker drops steps that have not started."""
        self._requests.put(None)  # The thread of gRPC that waits for requests ends only by this.
        self._call.cancel()

    def _read(self) -> None:
        error = _ended()
        try:
            with worker_errors():
                for response in self._call:
                    self._answers.put(_decode(response))
        except WorkerCallError as failure:
            error = failure
        self._requests.put(None)
        self._answers.put(error)


class AsyncStepStream:
    """`StepStream` for asyncio: for one task that sends and one that receives, or one that does both."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[bytes, pb.ExecuteStepsResponse]") -> None:
        self._call = call
        self._error: WorkerCallError | None = None
        self._has_broken = False

    async def send(self, request: pb.ExecuteStepRequest, timeout: float | None = None) -> None:
        """Sends a step; waits while the worker takes no more. On a stream that is over nothing happens; `receive` says why.

        After `timeout` seconds the stream is over.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._call.write(request.SerializeToString())
        except (asyncio.InvalidStateError, grpc.RpcError, TimeoutError):
            # A call that has ended refuses to write with InvalidStateError, one that ends meanwhile raises its status.
            self._has_broken = True

    async def receive(self, timeout: float | None = None) -> StreamAnswer:
        """Returns the next answer; see `StepStream.receive`."""
        if self._error is not None:
            raise self._error
        try:
            response = await self._read(timeout)
        except WorkerCallError as error:
            self._error = error
            raise
        return _decode(response)

    async def _read(self, timeout: float | None) -> pb.ExecuteStepsResponse:
        if self._call.cancelled():
            raise WorkerCallError(grpc.StatusCode.CANCELLED, "the stream was cancelled")
        try:
            async with asyncio.timeout(timeout):
                with worker_errors():
                    response = await self._call.read()
        except TimeoutError:
            raise _late(timeout) from None
        except WorkerFaultError as error:
            if self._has_broken:  # To gRPC, a connection that breaks under a request is a fault of its own.
                text = f"the connection broke while a step was sent ({error.message})"
                raise WorkerUnavailableError(grpc.StatusCode.UNAVAILABLE, text) from error
            raise
        if isinstance(response, pb.ExecuteStepsResponse):
            return response
        raise _ended()

    async def finish(self) -> None:
        """Sends no more; what was sent is answered."""
        with suppress(asyncio.InvalidStateError, grpc.RpcError):
            await self._call.done_writing()

    def cancel(self) -> None:
        """Ends the stream at once; see `StepStream.cancel`."""
        self._call.cancel()
