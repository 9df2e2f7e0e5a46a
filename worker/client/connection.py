"""The connection to a worker: `Client` and `AsyncClient`, alike but for the transport."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from modelworker.proto import model_worker_pb2 as pb
from modelworker.proto.model_worker_pb2 import ExecuteStepRequest, WorkerInfo
from modelworker.worker.client.answer import StepAnswer, decode_answer
from modelworker.worker.client.errors import WorkerCallError, WorkerUnavailableError, worker_errors
from modelworker.worker.client.stream import AsyncStepStream, StepStream

DEFAULT_MAX_MESSAGE_BYTES = 64 * 2**20
READINESS = "readiness"
_READINESS_POLL_SECONDS = 0.1
_HEALTH_TIMEOUT_SECONDS = 5.0

QueryT = TypeVar("QueryT", bound=Message)
AnswerT = TypeVar("AnswerT", bound=Message)


@dataclass(frozen=True, slots=True)
class _Method(Generic[QueryT, AnswerT]):
    """One unary rpc: its path, and the types of its messages."""

    path: str
    query: type[QueryT]
    answer: type[AnswerT]

    def on(self, channel: grpc.Channel) -> Callable[[QueryT, float | None], AnswerT]:
        """Makes the call that runs the rpc on a blocking channel."""
        call = channel.unary_unary(self.path, self.query.SerializeToString, self.answer.FromString)
        return lambda query, timeout: call(query, timeout=timeout)

    def on_async(self, channel: grpc.aio.Channel) -> Callable[[QueryT, float | None], Awaitable[AnswerT]]:
        """Makes the call that runs the rpc on an asyncio channel."""
        call = channel.unary_unary(self.path, self.query.SerializeToString, self.answer.FromString)
        return lambda query, timeout: call(query, timeout=timeout)


_GET_WORKER_INFO = _Method("/modelworker.v1.ModelWorker/GetWorkerInfo", pb.GetWorkerInfoRequest, pb.WorkerInfo)
_EXECUTE_STEP = _Method("/modelworker.v1.ModelWorker/ExecuteStep", pb.ExecuteStepRequest, pb.ExecuteStepResponse)
_EXECUTE_STEPS = "/modelworker.v1.ModelWorker/ExecuteSteps"
_RELEASE_SEQUENCES = _Method(
    "/modelworker.v1.ModelWorker/ReleaseSequences", pb.ReleaseSequencesRequest, pb.ReleaseSequencesResponse
)
_RESET_KV_CACHE = _Method("/modelworker.v1.ModelWorker/ResetKvCache", pb.ResetKvCacheRequest, pb.ResetKvCacheResponse)
_CHECK_HEALTH = _Method("/grpc.health.v1.Health/Check", health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse)


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Returns the options of a channel to a worker: message limits, quick reconnects, and pings that notice a dead peer."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Twice what the worker tolerates (its min_ping_interval_without_data_ms is 5000).
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        # A channel that others share would also share their broken connections and back-off.
        ("grpc.use_local_subchannel_pool", 1),
    ]


class _ReadinessWait:
    """The loop of `wait_ready` without its transport: how long to try, and what to say when time is up."""

    def __init__(self, timeout: float, on_state: Callable[[str], None] | None) -> None:
        self._deadline = time.monotonic() + timeout
        self._timeout = timeout
        self._on_state = on_state

    @property
    def call_timeout(self) -> float:
        return max(min(self._deadline - time.monotonic(), _HEALTH_TIMEOUT_SECONDS), 0.001)

    def is_over(self, answer: health_pb2.HealthCheckResponse | WorkerCallError) -> bool:
        """Takes the answer of a health check: True when the worker is ready.

        Raises:
            WorkerUnavailableError: time is up.
        """
        if isinstance(answer, WorkerCallError):
            state = "not reachable" if isinstance(answer, WorkerUnavailableError) else str(answer)
        elif answer.status == health_pb2.HealthCheckResponse.SERVING:
            return True
        else:
            state = "not ready"
        if self._on_state is not None:
            self._on_state(state)
        if time.monotonic() + _READINESS_POLL_SECONDS >= self._deadline:
            raise WorkerUnavailableError(grpc.StatusCode.UNAVAILABLE, f"the worker is {state} after {self._timeout:g} s")
        return False


class Client:
    """A blocking client of one worker. Safe to use from several threads."""

    def __init__(
        self,
        address: str,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        options = channel_options(max_message_bytes)
        self.address = address
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options)
        self._get_worker_info = _GET_WORKER_INFO.on(self._channel)
        self._execute_step = _EXECUTE_STEP.on(self._channel)
        # Requests are serialized when they are sent, not when the transport comes to it: a caller may change them afterwards.
        self._execute_steps: grpc.StreamStreamMultiCallable[bytes, pb.ExecuteStepsResponse] = self._channel.stream_stream(
            _EXECUTE_STEPS, None, pb.ExecuteStepsResponse.FromString
        )
        self._release_sequences = _RELEASE_SEQUENCES.on(self._channel)
        self._reset_kv_cache = _RESET_KV_CACHE.on(self._channel)
        self._check_health = _CHECK_HEALTH.on(self._channel)

    def wait_ready(self, timeout: float, on_state: Callable[[str], None] | None = None) -> None:
        """Waits until the worker's health service says that it is ready; `on_state` hears of every check that says otherwise.

        Raises:
            WorkerUnavailableError: it is not ready in time.
        """
        wait = _ReadinessWait(timeout, on_state)
        while not wait.is_over(self._readiness(wait.call_timeout)):
            time.sleep(_READINESS_POLL_SECONDS)

    def _readiness(self, timeout: float) -> health_pb2.HealthCheckResponse | WorkerCallError:
        try:
            with worker_errors():
                return self._check_health(health_pb2.HealthCheckRequest(service=READINESS), timeout)
        except WorkerCallError as error:
            return error

    def info(self, timeout: float | None = None) -> WorkerInfo:
        """Asks what the worker is: limits, KV cache geometry, epoch."""
        with worker_errors():
            return self._get_worker_info(pb.GetWorkerInfoRequest(), timeout)

    def execute(self, request: ExecuteStepRequest, timeout: float | None = None) -> StepAnswer:
        """Executes one step."""
        with worker_errors():
            return decode_answer(self._execute_step(request, timeout))

    def stream_steps(self) -> StepStream:
        """Opens a stream of steps."""
        return StepStream(self._execute_steps)

    def release_sequences(self, epoch: int, router_id: int, sequence_ids: list[int], timeout: float | None = None) -> int:
        """Drops the token-feedback state of sequences. Returns how many were known."""
        request = pb.ReleaseSequencesRequest(worker_epoch=epoch, router_id=router_id, sequence_ids=sequence_ids)
        with worker_errors():
            return self._release_sequences(request, timeout).num_released

    def reset_kv_cache(self, epoch: int, timeout: float | None = None) -> int:
        """Ends the epoch, with all content of the KV cache and the lease. Returns the new epoch."""
        with worker_errors():
            return self._reset_kv_cache(pb.ResetKvCacheRequest(worker_epoch=epoch), timeout).worker_epoch

    def close(self) -> None:
        """Closes the connection; calls that run end with CANCELLED."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class AsyncClient:
    """A client of one worker for asyncio; made and used on one event loop. Its methods are those of `Client`."""

    def __init__(
        self,
        address: str,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        options = channel_options(max_message_bytes)
        self.address = address
        self._channel = (
            grpc.aio.insecure_channel(address, options)
            if credentials is None
            else grpc.aio.secure_channel(address, credentials, options)
        )
        self._get_worker_info = _GET_WORKER_INFO.on_async(self._channel)
        self._execute_step = _EXECUTE_STEP.on_async(self._channel)
        self._execute_steps: grpc.aio.StreamStreamMultiCallable[bytes, pb.ExecuteStepsResponse] = self._channel.stream_stream(
            _EXECUTE_STEPS, None, pb.ExecuteStepsResponse.FromString
        )
        self._release_sequences = _RELEASE_SEQUENCES.on_async(self._channel)
        self._reset_kv_cache = _RESET_KV_CACHE.on_async(self._channel)
        self._check_health = _CHECK_HEALTH.on_async(self._channel)

    async def wait_ready(self, timeout: float, on_state: Callable[[str], None] | None = None) -> None:
        """Waits until the worker's health service says that it is ready; see `Client.wait_ready`."""
        wait = _ReadinessWait(timeout, on_state)
        while not wait.is_over(await self._readiness(wait.call_timeout)):
            await asyncio.sleep(_READINESS_POLL_SECONDS)

    async def _readiness(self, timeout: float) -> health_pb2.HealthCheckResponse | WorkerCallError:
        try:
            with worker_errors():
                return await self._check_health(health_pb2.HealthCheckRequest(service=READINESS), timeout)
        except WorkerCallError as error:
            return error

    async def info(self, timeout: float | None = None) -> WorkerInfo:
        """Asks what the worker is: limits, KV cache geometry, epoch."""
        with worker_errors():
            return await self._get_worker_info(pb.GetWorkerInfoRequest(), timeout)

    async def execute(self, request: ExecuteStepRequest, timeout: float | None = None) -> StepAnswer:
        """Executes one step."""
        with worker_errors():
            return decode_answer(await self._execute_step(request, timeout))

    def stream_steps(self) -> AsyncStepStream:
        """Opens a stream of steps."""
        return AsyncStepStream(self._execute_steps())

    async def release_sequences(self, epoch: int, router_id: int, sequence_ids: list[int], timeout: float | None = None) -> int:
        """Drops the token-feedback state of sequences. Returns how many were known."""
        request = pb.ReleaseSequencesRequest(worker_epoch=epoch, router_id=router_id, sequence_ids=sequence_ids)
        with worker_errors():
            return (await self._release_sequences(request, timeout)).num_released

    async def reset_kv_cache(self, epoch: int, timeout: float | None = None) -> int:
        """Ends the epoch, with all content of the KV cache and the lease. Returns the new epoch."""
        with worker_errors():
            return (await self._reset_kv_cache(pb.ResetKvCacheRequest(worker_epoch=epoch), timeout)).worker_epoch

    async def close(self) -> None:
        """Closes the connection; calls that run end with CANCELLED."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
