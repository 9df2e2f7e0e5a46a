"""Runs a real server around a small real engine, inside a test's event loop or as a process of its own."""

import asyncio
import functools
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import numpy as np
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from modelworker.proto import model_worker_pb2 as pb
from modelworker.proto import model_worker_pb2_grpc
from modelworker.worker.arrays import UInt64Array
from modelworker.worker.batch import StepBatch
from modelworker.worker.description import KvCacheDescription, StepLimits, WorkerDescription
from modelworker.worker.progress import LogProgress
from modelworker.worker.result import GraphExecution, GraphMode, StepResult
from modelworker.worker.server import BuildEngine, ExitCode, WorkerServer
from modelworker.worker.settings import WorkerSettings
from modelworker.worker.statuses import STATUS_DETAILS_KEY
from modelworker.worker.telemetry import configure_logging
from modelworker_testing.descriptions import describe_engine

VOCAB_SIZE = 1000
BLOCK_SIZE = 4
MAX_MODEL_LEN = 100_000
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_PATIENCE = 300


def async_test(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Lets pytest run a coroutine function; one that waits for what never comes fails."""

    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), _PATIENCE))

    return run


class SumEngine:
    """An engine whose model adds up: the next token is the sum of the sequence's tokens, read back from its blocks, mod VOCAB_SIZE.

    Attributes:
        before_step: called on the engine thread before each step; a test may wait or raise in it.
        executed: step ids in the order of their execution.
        released: of each release, what was executed before and the sequence ids, all of which count as known.
    """

    def __init__(self, settings: WorkerSettings, *, num_blocks: int = 30_000) -> None:
        self.description = describe(settings, num_blocks)
        self.before_step: Callable[[StepBatch], None] = lambda batch: None
        self.executed: list[int] = []
        self.released: list[tuple[list[int], list[int]]] = []
        self._slots = np.zeros(num_blocks * BLOCK_SIZE, np.int64)

    def step(self, batch: StepBatch) -> StepResult:
        self.before_step(batch)
        self.executed.append(batch.step_id)
        self._slots[batch.slots(BLOCK_SIZE)] = batch.token_ids
        tokens = self._slots.reshape(-1, BLOCK_SIZE)[batch.block_tables].reshape(
            batch.num_sequences, batch.block_tables.shape[1] * BLOCK_SIZE
        )
        sums = np.where(np.arange(tokens.shape[1]) < batch.seq_lens[:, None], tokens, 0).sum(1) % VOCAB_SIZE
        return StepResult(
            sampled_counts=batch.sample.astype(np.int32),
            sampled_ids=sums[batch.sample].astype(np.int32),
            logprobs=None,
            sequence_errors=(),
            tainted_block_ids=np.zeros(0, np.int32),
            graph=GraphExecution(
                mode=GraphMode.NONE,
                padded_tokens=batch.num_tokens,
                padded_sequences=batch.num_sequences,
                compiled=False,
                fallback_reason="disabled",
            ),
        )

    def reset_kv_cache(self) -> None:
        self._slots[:] = 0

    def release_sequences(self, sequence_ids: UInt64Array) -> int:
        self.released.append((list(self.executed), sequence_ids.tolist()))
        return len(sequence_ids)


def describe(settings: WorkerSettings, num_blocks: int) -> WorkerDescription:
    return describe_engine(
        "sum",
        vocab_size=VOCAB_SIZE,
        max_model_len=MAX_MODEL_LEN,
        kv_cache=KvCacheDescription(
            dtype="int64", layout_fingerprint="sum", block_size=BLOCK_SIZE, num_blocks=num_blocks, bytes_per_block=8 * BLOCK_SIZE
        ),
        limits=StepLimits(
            max_sequences=settings.step.max_sequences,
            max_tokens_per_step=settings.step.max_tokens_per_step,
            max_steps_in_flight=settings.fencing.max_steps_in_flight,
            max_message_bytes=settings.server.max_message_size,
            max_feedback_sequences=0,
            lease_idle_ms=int(settings.fencing.lease_idle_seconds * 1000),
            max_replays=8,
        ),
    )


@dataclass
class Running:
    """A server that runs in this event loop, and a channel to it."""

    server: WorkerServer
    task: "asyncio.Task[ExitCode]"
    engine: SumEngine
    channel: grpc.aio.Channel
    stub: model_worker_pb2_grpc.ModelWorkerStub

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    async def health(self, service: str) -> int:
        answer = await health_pb2_grpc.HealthStub(self.channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        return answer.status


@asynccontextmanager
async def running_server(
    settings: WorkerSettings | None = None,
    *,
    build: BuildEngine | None = None,
    wait_ready: bool = True,
    channel_options: tuple[tuple[str, int], ...] = (),
) -> AsyncIterator[Running]:
    """Serves on a free port until the block ends.

    Args:
        settings: of the worker; the port is replaced by 0.
        build: makes the engine; None = a `SumEngine`.
        wait_ready: enter the block only when the worker is ready.
        channel_options: of the channel to it.
    """
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    configure_logging(log_format="json", log_level=(settings or WorkerSettings()).server.log_level)
    settings = settings or WorkerSettings()
    settings = replace(settings, server=replace(settings.server, port=0))
    engine = SumEngine(settings)
    listening = asyncio.Event()
    server = WorkerServer(settings, build or (lambda *_: engine), LogProgress(), on_listening=lambda port: listening.set())
    task = asyncio.create_task(server.run())
    limit = settings.server.max_message_size + 2**24
    options = (("grpc.max_send_message_length", limit), ("grpc.max_receive_message_length", limit), *channel_options)
    try:
        await _until(listening, task)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
            if wait_ready:
                await _until(server.ready, task)
            yield Running(server, task, engine, channel, model_worker_pb2_grpc.ModelWorkerStub(channel))
    finally:
        if not task.done():
            server.request_stop()
        done, _ = await asyncio.wait([task], timeout=30)
        root.handlers = handlers
        root.setLevel(level)
    assert done, "the server does not end"


async def _until(event: asyncio.Event, task: "asyncio.Task[ExitCode]") -> None:
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait((waiting, task), return_when=asyncio.FIRST_COMPLETED, timeout=30)
    if not event.is_set():
        waiting.cancel()
        task.result()
        raise AssertionError("the server ended before it was there")


class Gate:
    """Makes steps wait on the engine thread until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.entered = threading.Event()

    def __call__(self, batch: StepBatch) -> None:
        self.entered.set()
        assert self._open.wait(60)

    def open(self) -> None:
        self._open.set()

    async def wait_entered(self) -> None:
        await asyncio.to_thread(self.entered.wait, 30)


def step_request(tokens: list[int] | None = None, **fields: object) -> pb.ExecuteStepRequest:
    """A step of one sequence, in blocks 1, 2, ..., with nothing in the cache."""
    tokens = [1, 2, 3] if tokens is None else tokens
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    values: dict[str, object] = {
        "query_lens": [len(tokens)],
        "context_lens": [0],
        "token_ids": tokens,
        "block_counts": [num_blocks],
        "block_ids": list(range(1, num_blocks + 1)),
    }
    return pb.ExecuteStepRequest(**(values | fields))


def status_details(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    """The google.rpc.Status of a failed call."""
    values = [value for key, value in error.trailing_metadata() or () if key == STATUS_DETAILS_KEY]
    assert len(values) == 1, f"{error.code()} {error.details()} came without details"
    return status_pb2.Status.FromString(values[0])
