"""An executor with a real engine thread and a small engine whose answers depend on its KV cache."""

import asyncio
import threading
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np
import pytest

from modelworker.worker.arrays import UInt64Array
from modelworker.worker.batch import StepBatch
from modelworker.worker.counters import Counters
from modelworker.worker.description import KvCacheDescription, StepLimits, WorkerDescription
from modelworker.worker.errors import (
    PreconditionError,
    PreconditionReason,
    WorkerError,
)
from modelworker.worker.executor import Executor
from modelworker.worker.result import GraphExecution, GraphMode, StepResult, StepTimings
from modelworker.worker.settings import FencingSettings
from modelworker.worker.ticket import Answer
from modelworker_testing.descriptions import describe_engine

ALICE, BOB = 11, 22
BLOCK_SIZE = 4
NUM_BLOCKS = 161
PATIENCE_SECONDS = 60.0
"""How long a test may hang before it fails."""

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a test's coroutine; one that hangs fails."""

    async def bounded() -> T:
        async with asyncio.timeout(PATIENCE_SECONDS):
            return await main

    return asyncio.run(bounded())


class KvEngine:
    """An engine without a model: the token sampled for a row is a checksum of all its tokens in the KV cache.

    A wrong block, a step that ran twice with other tokens, one that was left out, or a cache that was not cleared change every
    token after it.
    """

    def __init__(self) -> None:
        self.cache = np.zeros((NUM_BLOCKS, BLOCK_SIZE), np.int32)
        self.executed: list[tuple[int, int, int]] = []  # (epoch, router, id)
        self.thread = threading.current_thread()
        self.thread_ids = {threading.get_ident()}
        self.num_resets = 0
        self.releases: list[tuple[list[int], int]] = []  # (sequence ids, steps executed before)
        self.before_step: Callable[[StepBatch], object] = lambda batch: None
        self.before_reset: Callable[[], object] = lambda: None
        self.description = describe()

    def step(self, batch: StepBatch) -> StepResult:
        self.thread_ids.add(threading.get_ident())
        self.before_step(batch)
        self.executed.append((batch.worker_epoch, batch.router_id, batch.step_id))
        self.cache.reshape(-1)[batch.slots(BLOCK_SIZE)] = batch.token_ids
        sampled = [self._checksum(batch, row) for row in range(batch.num_sequences)]
        return StepResult(
            sampled_counts=np.ones(batch.num_sequences, np.int32),
            sampled_ids=np.array(sampled, np.int32),
            logprobs=None,
            sequence_errors=(),
            tainted_block_ids=np.zeros(0, np.int32),
            graph=GraphExecution(
                mode=GraphMode.NONE,
                padded_tokens=batch.num_tokens,
                padded_sequences=batch.num_sequences,
                compiled=False,
                fallback_reason="",
            ),
            timings=StepTimings(forward_ns=123),
        )

    def reset_kv_cache(self) -> None:
        self.thread_ids.add(threading.get_ident())
        self.before_reset()
        self.num_resets += 1
        self.cache[:] = 0

    def release_sequences(self, sequence_ids: UInt64Array) -> int:
        """All sequences count as known."""
        self.thread_ids.add(threading.get_ident())
        self.releases.append((sequence_ids.tolist(), len(self.executed)))
        return len(sequence_ids)

    def _checksum(self, batch: StepBatch, row: int) -> int:
        tokens = self.cache[batch.block_tables[row]].reshape(-1)[: batch.seq_lens[row]]
        return zlib.crc32(tokens.tobytes()) % 1_000_000


def describe() -> WorkerDescription:
    return describe_engine(
        "checksum",
        vocab_size=1_000_000,
        max_model_len=NUM_BLOCKS * BLOCK_SIZE,
        kv_cache=KvCacheDescription(
            dtype="int32", layout_fingerprint="", block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, bytes_per_block=4 * BLOCK_SIZE
        ),
        limits=StepLimits(
            max_sequences=8,
            max_tokens_per_step=64,
            max_steps_in_flight=64,
            max_message_bytes=1,
            max_feedback_sequences=0,
            lease_idle_ms=30_000,
            max_replays=128,
        ),
    )


def step_of(
    step_id: int,
    epoch: int,
    *,
    router: int = ALICE,
    tokens: tuple[int, ...] = (7,),
    context: int = 0,
    blocks: tuple[int, ...] = (1, 2, 3),
    deadline_seconds: float | None = None,
) -> StepBatch:
    """One row. The digest covers what a request's digest covers: everything but the deadline."""
    now_ns = time.monotonic_ns()
    return StepBatch(
        step_id=step_id,
        worker_epoch=epoch,
        router_id=router,
        client_tag=0,
        arrival_ns=now_ns,
        deadline_ns=None if deadline_seconds is None else now_ns + int(deadline_seconds * 1e9),
        digest=repr((step_id, epoch, router, tokens, context, blocks)).encode() if step_id else b"",
        traceparent="",
        sequence_ids=np.zeros(0, np.uint64),
        query_lens=np.array([len(tokens)], np.int32),
        context_lens=np.array([context], np.int32),
        token_ids=np.array(tokens, np.int32),
        draft_lens=np.zeros(1, np.int32),
        block_counts=np.array([len(blocks)], np.int32),
        block_ids=np.array(blocks, np.int32),
        sample=np.ones(1, np.bool_),
        sampling=None,
        finished_sequence_ids=np.zeros(0, np.uint64),
        zero_block_ids=np.zeros(0, np.int32),
        copy_source_ids=np.zeros(0, np.int32),
        copy_destination_ids=np.zeros(0, np.int32),
    )


def trial(**arguments: Any) -> StepBatch:
    """An unsequenced step."""
    return step_of(0, 0, router=0, **arguments)


class Gate:
    """Holds the engine at the start of every step until it is told to go on, or to fail."""

    def __init__(self, engine: KvEngine) -> None:
        self._loop = asyncio.get_running_loop()
        self._passes: SimpleQueue[BaseException | None] = SimpleQueue()
        self._arrived: asyncio.Queue[StepBatch] = asyncio.Queue()
        engine.before_step = self._hold

    def _hold(self, batch: StepBatch) -> None:
        self._loop.call_soon_threadsafe(self._arrived.put_nowait, batch)
        error = self._passes.get(timeout=PATIENCE_SECONDS)
        if error is not None:
            raise error

    async def arrival(self) -> StepBatch:
        """Waits until the engine is at the start of another step."""
        return await self._arrived.get()

    def let_one_pass(self, error: BaseException | None = None) -> None:
        self._passes.put(error)

    def open(self) -> None:
        for _ in range(1000):
            self._passes.put(None)


class World:
    """A running executor, its engine, and what it counted."""

    def __init__(self, executor: Executor, engine: KvEngine, counters: Counters) -> None:
        self.executor = executor
        self.engine = engine
        self.counters = counters

    @property
    def epoch(self) -> int:
        return self.executor.state().worker_epoch

    def count(self, key: str) -> int:
        return self.counters.snapshot().get(key, 0)

    def send(self, batch: StepBatch) -> "asyncio.Task[Answer]":
        """Admits at once, as a stream does, and waits in a task."""
        ticket = self.executor.admit(batch)
        return asyncio.ensure_future(ticket.answer())

    def sequenced(self, step_id: int, **arguments: Any) -> StepBatch:
        return step_of(step_id, self.epoch, **arguments)

    def executed_ids(self) -> list[int]:
        return [step_id for _, _, step_id in self.engine.executed]


@asynccontextmanager
async def worker(*, stall_seconds: float = 60.0, **settings: Any) -> AsyncIterator[World]:
    counters = Counters()
    executor = Executor(settings=FencingSettings(**settings), stall_seconds=stall_seconds, counters=counters)
    engines: list[KvEngine] = []

    def build() -> KvEngine:
        engines.append(KvEngine())
        return engines[0]

    executor.start(build)
    await executor.wait_ready()
    try:
        yield World(executor, engines[0], counters)
    finally:
        executor.stop()
        await asyncio.to_thread(engines[0].thread.join, PATIENCE_SECONDS)
        assert not engines[0].thread.is_alive()


async def error_of(call: Awaitable[object]) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        await call
    return caught.value


async def reason_of(call: Awaitable[object]) -> PreconditionReason:
    error = await error_of(call)
    assert isinstance(error, PreconditionError)
    return error.reason


async def settle(*tasks: "asyncio.Task[Any]") -> list[Any]:
    """Waits for all; exceptions are results."""
    return await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    """Waits for a state that another thread or time brings about. One that never comes lets the test hang, and fail, see `run`."""
    while not condition():
        await asyncio.sleep(0.005)


def token(answer: Answer) -> int:
    return int(answer.result.sampled_ids[0])
