"""The rpcs of `modelworker.v1.ModelWorker`: parse, await, encode. Exceptions become statuses in `interceptor`."""

import time
import weakref
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, NoReturn

import grpc

from modelworker.proto import model_worker_pb2 as pb
from modelworker.proto import model_worker_pb2_grpc
from modelworker.worker.batch import StepBatch
from modelworker.worker.call import CallContext, RequestRoom
from modelworker.worker.call_log import CallLog
from modelworker.worker.counters import Counters
from modelworker.worker.description import WorkerDescription
from modelworker.worker.errors import NotBuiltError, UnavailableError
from modelworker.worker.executor import Executor
from modelworker.worker.stage import StageTracker
from modelworker.worker.step_stream import EXECUTE_STEPS, StepStreamHandler
from modelworker.worker.ticket import Answer, Ticket
from modelworker.worker.wire import (
    check_request_size,
    check_step_size,
    encode_release_sequences,
    encode_reset_kv_cache,
    encode_result,
    encode_worker_info,
    max_step_bytes,
    parse_release_sequences,
    parse_reset_kv_cache,
    parse_step,
)

ITEM_STREAMS = frozenset({EXECUTE_STEPS})
"""Methods whose handler gets the bytes of each request."""

_RETRY_WHILE_STARTING_MS = 1000
# Of one stream: as many steps as can be in flight, and as many that are refused or answered behind one that is late.
_UNANSWERED_PER_STEP_IN_FLIGHT = 2

_Context = grpc.aio.ServicerContext[Any, Any]


class ModelWorkerServicer(model_worker_pb2_grpc.ModelWorkerServicer):
    """Translates between messages and the executor. Runs on the event loop and never computes.

    Args:
        executor: of the steps.
        stage: what the worker is doing while it starts.
        counters: for WorkerInfo.
        room: for the bytes of requests that have no answer yet.
        log: where the steps of streams are counted and written down.
        keeps_requests: steps have their requests' bytes with them, to be recorded.
    """

    def __init__(
        self,
        *,
        executor: Executor,
        stage: StageTracker,
        counters: Counters,
        room: RequestRoom,
        log: CallLog,
        keeps_requests: bool = False,
    ) -> None:
        self._executor = executor
        self._keeps_requests = keeps_requests
        self._stage = stage
        self._counters = counters
        self._room = room
        self._log = log
        self._max_step_bytes: int | None = None
        self._streams: weakref.WeakSet[StepStreamHandler] = weakref.WeakSet()
        self._streams_end = False

    def check_size(self, method: str, raw: bytes) -> None:
        """Checks a request before anything of it is parsed.

        Raises:
            InvalidStepError: it is larger than any that the worker accepts.
            UnavailableError: it is a step, and the worker is still starting.
        """
        if not method.startswith("ExecuteStep"):
            check_request_size(raw)
            return
        description = self._description()
        if self._max_step_bytes is None:
            self._max_step_bytes = max_step_bytes(description)
        check_step_size(raw, self._max_step_bytes, description)

    def end_streams(self) -> None:
        """Ends all streams of steps, those to come as well, when what was read of them is answered."""
        self._streams_end = True
        for stream in self._streams:
            stream.end()

    async def GetWorkerInfo(self, request: pb.GetWorkerInfoRequest, context: _Context) -> pb.WorkerInfo:  # noqa: N802
        """Answers everything that a scheduler must know."""
        return encode_worker_info(self._description(), self._executor.state(), self._counters.snapshot())

    async def ExecuteStep(self, request: pb.ExecuteStepRequest, context: Any) -> pb.ExecuteStepResponse:  # noqa: N802
        """Executes one step."""
        call: CallContext = context
        batch = self._parse_step(request, raw=call.raw, arrival_ns=call.arrival_ns, deadline_ns=_deadline_ns(call))
        del request  # The batch is all that a queued step needs.
        answer = await self._executor.submit(batch)
        return encode_result(batch, answer.result, answer.worker_epoch)

    async def ResetKvCache(self, request: pb.ResetKvCacheRequest, context: _Context) -> pb.ResetKvCacheResponse:  # noqa: N802
        """Starts a new epoch with an empty KV cache."""
        self._description()
        new_epoch = await self._executor.reset_kv_cache(parse_reset_kv_cache(request))
        return encode_reset_kv_cache(new_epoch)

    async def ReleaseSequences(  # noqa: N802
        self, request: pb.ReleaseSequencesRequest, context: _Context
    ) -> pb.ReleaseSequencesResponse:
        """Forgets sequences after the steps that were admitted before."""
        self._description()
        release = parse_release_sequences(request)
        num_released = await self._executor.release_sequences(
            worker_epoch=release.worker_epoch, router_id=release.router_id, sequence_ids=release.sequence_ids
        )
        return encode_release_sequences(num_released)

    def ExecuteSteps(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.ExecuteStepsResponse]:  # noqa: N802
        """Executes steps in the order of their arrival, several in flight. A plain function: it refuses before anything streams."""
        call: CallContext = context
        description = self._description()
        stream = StepStreamHandler(
            parse=call.parse,
            admit=partial(self._admit_step, deadline_ns=_deadline_ns(call)),
            room=self._room,
            log=self._log,
            max_unanswered=_UNANSWERED_PER_STEP_IN_FLIGHT * description.limits.max_steps_in_flight,
        )
        if self._streams_end:
            stream.end()
        self._streams.add(stream)
        return stream.answers(request_iterator)

    # The rest of the protocol. Plain functions: they raise before anything is awaited or streamed.

    def ExportKvBlocks(self, request: pb.ExportKvBlocksRequest, context: _Context) -> NoReturn:  # noqa: N802
        """Is not built."""
        raise NotBuiltError("ExportKvBlocks is not implemented by this worker: recompute the sequence on the other worker")

    def ImportKvBlocks(self, request_iterator: Any, context: _Context) -> NoReturn:  # noqa: N802
        """Is not built."""
        raise NotBuiltError("ImportKvBlocks is not implemented by this worker: recompute the sequence with ExecuteStep")

    def _parse_step(self, request: pb.ExecuteStepRequest, *, raw: bytes, arrival_ns: int, deadline_ns: int | None) -> StepBatch:
        return parse_step(
            request,
            self._description(),
            arrival_ns=arrival_ns,
            deadline_ns=deadline_ns,
            raw=raw,
            keeps_request=self._keeps_requests,
        )

    def _admit_step(
        self, request: pb.ExecuteStepRequest, *, raw: bytes, arrival_ns: int, deadline_ns: int | None
    ) -> Ticket[Answer]:
        batch = self._parse_step(request, raw=raw, arrival_ns=arrival_ns, deadline_ns=deadline_ns)
        return self._executor.admit(batch)

    def _description(self) -> WorkerDescription:
        """Returns what the worker is.

        Raises:
            UnavailableError: it is still starting.
        """
        description = self._executor.description
        if description is None:
            raise UnavailableError(f"starting: {self._stage}", retry_after_ms=_RETRY_WHILE_STARTING_MS)
        return description


def _deadline_ns(call: CallContext) -> int | None:
    remaining_seconds: float | None = call.time_remaining()
    return None if remaining_seconds is None else time.monotonic_ns() + int(remaining_seconds * 1e9)
