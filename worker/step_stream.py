"""One stream of steps: admitted in the order of their arrival, answered in the same order, each with an answer or a status.

    requests ──> one task: parse, admit ──> items, in order ──> the call's task: await, encode ──> answers

Requests are read ahead of the answers, so that a step is parsed and queued while the one before it runs, but only so far: whoever
sends without reading is held up by the transport, and costs a bounded number of unanswered steps.
"""

import asyncio
import contextvars
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import grpc
from google.rpc import status_pb2

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.call import RequestRoom
from modelworker.worker.call_log import CallLog, StepSize
from modelworker.worker.statuses import code_of, status_of
from modelworker.worker.ticket import Answer, Ticket
from modelworker.worker.wire import StepIdentity, encode_result, encode_stream_answer, read_step_numbers

EXECUTE_STEPS = "ExecuteSteps"

Parse = Callable[[bytes], pb.ExecuteStepRequest]


class Admit(Protocol):
    """Checks a step and queues it."""

    def __call__(self, request: pb.ExecuteStepRequest, *, raw: bytes, arrival_ns: int) -> Ticket[Answer]:
        """Raises WorkerError: the step is refused."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class _Item:
    """One step, from its arrival until its answer is written. What was parsed of it is not kept here.

    Attributes:
        context: of its log lines.
        arrival_ns: `time.monotonic_ns()` when it was read.
        step_id: as in the request; 0 where that can't be read.
        client_tag: likewise.
        size: for its log line.
        outcome: where to wait for the answer, or the status in its place.
    """

    context: contextvars.Context
    arrival_ns: int
    step_id: int
    client_tag: int
    size: StepSize
    outcome: Ticket[Answer] | status_pb2.Status


class StepStreamHandler:
    """Reads, admits and answers the steps of one call. Lives on the event loop.

    Args:
        parse: makes a request of the bytes of an item.
        admit: checks a request and queues it.
        room: for the bytes of steps that have no outcome yet, shared with all other calls.
        log: where items are counted and written down as calls are.
        max_unanswered: how many steps are read before the first of them is answered.
    """

    def __init__(self, *, parse: Parse, admit: Admit, room: RequestRoom, log: CallLog, max_unanswered: int) -> None:
        self._parse = parse
        self._admit = admit
        self._room = room
        self._log = log
        self._items: asyncio.Queue[_Item | None] = asyncio.Queue()
        self._places = asyncio.Semaphore(max_unanswered)
        self._has_ended = False
        self._reading: asyncio.Task[None] | None = None

    async def answers(self, raws: AsyncIterator[bytes]) -> AsyncIterator[pb.ExecuteStepsResponse]:
        """Hot path: yields the answers. Ends after the last one when the client or `end` has ended the stream.

        Closing it withdraws the steps that are still queued; the one that runs goes on, and its answer is kept for a retry.
        """
        reading = self._reading = asyncio.create_task(self._read(raws))
        reading.add_done_callback(lambda _: self._items.put_nowait(None))
        if self._has_ended:
            reading.cancel()
        try:
            while (item := await self._items.get()) is not None:
                yield await self._answer(item)
                self._places.release()
            if not reading.cancelled():
                reading.result()
        finally:
            reading.cancel()
            self._withdraw_all()

    def end(self) -> None:
        """Reads no further. The stream ends when all steps that were read are answered."""
        self._has_ended = True
        if self._reading is not None:
            self._reading.cancel()

    # -- the reading task --

    async def _read(self, raws: AsyncIterator[bytes]) -> None:
        await self._places.acquire()
        async for raw in raws:
            context = contextvars.copy_context()
            self._items.put_nowait(context.run(self._begin, context, raw))
            del raw  # It would stay until the next one comes.
            await self._places.acquire()

    def _begin(self, context: contextvars.Context, raw: bytes) -> _Item:
        """Hot path: admits a step at once, or finds out why not. Runs in the step's own log context."""
        arrival_ns = time.monotonic_ns()
        request: pb.ExecuteStepRequest | None = None
        size = StepSize()
        outcome: Ticket[Answer] | status_pb2.Status
        try:
            self._room.take(len(raw))
            try:
                request = self._parse(raw)
                size = self._log.bind_step(request)
                outcome = self._admit(request, raw=raw, arrival_ns=arrival_ns)
            except BaseException:  # whatever refused it, its bytes are free again
                self._room.give_back(len(raw))
                raise
            # Not only in its turn: what a client does not read must not take the room of others.
            outcome.when_settled(partial(self._room.give_back, len(raw)))
        except Exception as error:
            outcome = self._refuse(error)
        identity: StepIdentity = read_step_numbers(raw) if request is None else request
        return _Item(
            context=context,
            arrival_ns=arrival_ns,
            step_id=identity.step_id,
            client_tag=identity.client_tag,
            size=size,
            outcome=outcome,
        )

    def _refuse(self, error: Exception) -> status_pb2.Status:
        self._log.write_error(EXECUTE_STEPS, error)
        self._log.count_stream_step(code_of(error))
        return status_of(error)

    # -- the call's task --

    async def _answer(self, item: _Item) -> pb.ExecuteStepsResponse:
        """Hot path: waits for a step's outcome and encodes it."""
        outcome = item.outcome
        if isinstance(outcome, status_pb2.Status):
            return encode_stream_answer(item, outcome)
        try:
            answer = await outcome.answer()
            response = encode_result(item, answer.result, answer.worker_epoch)
        except asyncio.CancelledError:
            self._log.count_stream_step(grpc.StatusCode.CANCELLED)
            raise
        except Exception as error:
            return encode_stream_answer(item, item.context.run(self._refuse, error))
        self._log.count_stream_step(grpc.StatusCode.OK)
        item.context.run(self._log.write_step, item.size, response, item.arrival_ns)
        return encode_stream_answer(item, response)

    def _withdraw_all(self) -> None:
        while not self._items.empty():
            item = self._items.get_nowait()
            if item is not None and isinstance(item.outcome, Ticket):
                item.outcome.withdraw()
                self._log.count_stream_step(grpc.StatusCode.CANCELLED)
