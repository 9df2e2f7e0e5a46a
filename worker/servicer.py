"""The rpcs of `modelworker.v1.ModelWorker`: parse, await, encode. Exceptions become statuses in `interceptor`."""

import time
from typing import Any, NoReturn

import grpc

from modelworker.proto import model_worker_pb2 as pb
from modelworker.proto import model_worker_pb2_grpc
from modelworker.worker.call import CallContext
from modelworker.worker.counters import Counters
from modelworker.worker.description import WorkerDescription
from modelworker.worker.errors import NotBuiltError, UnavailableError
from modelworker.worker.executor import Executor
from modelworker.worker.stage import StageTracker
from modelworker.worker.wire import (
    check_request_size,
    check_step_size,
    encode_reset_kv_cache,
    encode_result,
    encode_worker_info,
    max_step_bytes,
    parse_reset_kv_cache,
    parse_step,
)

_RETRY_WHILE_STARTING_MS = 1000

_Context = grpc.aio.ServicerContext[Any, Any]


class ModelWorkerServicer(model_worker_pb2_grpc.ModelWorkerServicer):
    """Translates between messages and the executor. Runs on the event loop and never computes.

    Args:
        executor: of the steps.
        stage: what the worker is doing while it starts.
        counters: for WorkerInfo.
        keeps_requests: steps have their requests' bytes with them, to be recorded.
    """

    def __init__(self, *, executor: Executor, stage: StageTracker, counters: Counters, keeps_requests: bool = False) -> None:
        self._executor = executor
        self._keeps_requests = keeps_requests
        self._stage = stage
        self._counters = counters
        self._max_step_bytes: int | None = None

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

    async def GetWorkerInfo(self, request: pb.GetWorkerInfoRequest, context: _Context) -> pb.WorkerInfo:  # noqa: N802
        """Answers everything that a scheduler must know."""
        return encode_worker_info(self._description(), self._executor.state(), self._counters.snapshot())

    async def ExecuteStep(self, request: pb.ExecuteStepRequest, context: Any) -> pb.ExecuteStepResponse:  # noqa: N802
        """Executes one step."""
        call: CallContext = context
        deadline_ns = _deadline_ns(call)
        batch = parse_step(
            request,
            self._description(),
            arrival_ns=call.arrival_ns,
            deadline_ns=deadline_ns,
            raw=call.raw,
            keeps_request=self._keeps_requests,
        )
        del request  # The batch is all that a queued step needs.
        answer = await self._executor.submit(batch)
        return encode_result(batch, answer.result, answer.worker_epoch)

    async def ResetKvCache(self, request: pb.ResetKvCacheRequest, context: _Context) -> pb.ResetKvCacheResponse:  # noqa: N802
        """Starts a new epoch with an empty KV cache."""
        self._description()
        new_epoch = await self._executor.reset_kv_cache(parse_reset_kv_cache(request))
        return encode_reset_kv_cache(new_epoch)

    # The rest of the protocol. Plain functions: they raise before anything is awaited or streamed.

    def ExecuteSteps(self, request_iterator: Any, context: _Context) -> NoReturn:  # noqa: N802
        """Is not built."""
        raise NotBuiltError("ExecuteSteps is not implemented by this worker: send each step with ExecuteStep")

    def ReleaseSequences(self, request: pb.ReleaseSequencesRequest, context: _Context) -> NoReturn:  # noqa: N802
        """Is not built."""
        raise NotBuiltError(
            "ReleaseSequences is not implemented by this worker: it keeps no token feedback, so there is nothing to release"
        )

    def ExportKvBlocks(self, request: pb.ExportKvBlocksRequest, context: _Context) -> NoReturn:  # noqa: N802
        """Is not built."""
        raise NotBuiltError("ExportKvBlocks is not implemented by this worker: recompute the sequence on the other worker")

    def ImportKvBlocks(self, request_iterator: Any, context: _Context) -> NoReturn:  # noqa: N802
        """Is not built."""
        raise NotBuiltError("ImportKvBlocks is not implemented by this worker: recompute the sequence with ExecuteStep")

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
