"""The one engine thread: it builds the engine, then executes what the queue gives it, one item at a time.

grpc's threads never touch the engine, and the event loop never computes: it admits steps in the order of their arrival
(`step_queue`, `fencing`) and waits; the engine thread hands each outcome back with `loop.call_soon_threadsafe`.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from modelworker.worker.arrays import UInt64Array
from modelworker.worker.batch import StepBatch
from modelworker.worker.counters import Counters
from modelworker.worker.description import WorkerDescription
from modelworker.worker.errors import (
    EngineFaultError,
    FatalEngineError,
    OverloadedError,
    PreconditionError,
    UnavailableError,
)
from modelworker.worker.fencing import FenceState
from modelworker.worker.result import StepResult
from modelworker.worker.settings import FencingSettings
from modelworker.worker.step_queue import StepQueue
from modelworker.worker.ticket import Answer, Control, Item, Outcomes, Step, Ticket
from modelworker.worker.trace_context import trace_id_of

ENGINE_THREAD_NAME = "engine"

_RETRY_WHILE_STARTING_MS = 1000

_log = logging.getLogger(__name__)


class StepEngine(Protocol):
    """What the executor needs of an engine. All of it runs on the engine thread."""

    @property
    def description(self) -> WorkerDescription:
        """What the worker is."""

    def step(self, batch: StepBatch) -> StepResult:
        """Executes a step. The arrays of the result own their memory: they are kept for retries.

        Raises:
            PreconditionError: refused before anything was executed; the KV cache is as it was.
            OverloadedError: likewise.
            FatalEngineError: the device can't be used any more.
            Exception: anything else counts as executed, with unknown KV content.
        """

    def reset_kv_cache(self) -> None:
        """Fills the KV cache with zeros. Any exception ends the worker."""

    def release_sequences(self, sequence_ids: UInt64Array) -> int:
        """Forgets what is kept of sequences for token feedback. Returns how many were known. Any exception ends the worker.

        Args:
            sequence_ids: [number of sequences], any number, in any order; one that is not known is no error.
        """


class Executor:
    """Executes steps on the engine thread for callers on the event loop. Its methods belong to the event loop.

    Args:
        settings: order, ownership, retries and the in-flight limit.
        stall_seconds: an item that runs longer than this makes `stalled` true until it ends.
        counters: where it counts.

    Attributes:
        fatal: gets what ended the engine thread, when something did. Nothing is served afterwards: the process has to end.
    """

    fatal: asyncio.Future[BaseException]

    def __init__(self, *, settings: FencingSettings, stall_seconds: float, counters: Counters) -> None:
        self._queue = StepQueue(settings, counters, tell=self._tell, clear_kv_cache=self._clear_kv_cache)
        self._stall_seconds = stall_seconds
        self._engine: StepEngine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_built = asyncio.Event()
        self._build_error: BaseException | None = None
        self._is_drained = asyncio.Event()

    # -- life --

    def start(self, build: Callable[[], StepEngine]) -> None:
        """Starts the engine thread, which calls `build` first."""
        self._loop = asyncio.get_running_loop()
        self.fatal = self._loop.create_future()
        # A daemon: neither a build nor a step can be interrupted, and they must not hold up a process that has to end.
        self._thread = threading.Thread(target=self._run, args=(build,), name=ENGINE_THREAD_NAME, daemon=True)
        self._thread.start()

    async def wait_ready(self) -> None:
        """Waits until the engine is built. Raises what `build` raised."""
        await self._is_built.wait()
        if self._build_error is not None:
            raise self._build_error

    def begin_drain(self) -> None:
        """Refuses new work from now on. Accepted work goes on, and retries of executed steps are still answered."""
        self._queue.begin_drain()
        self._deliver([])

    async def drained(self) -> None:
        """Waits, after `begin_drain`, until all accepted work is answered."""
        await self._is_drained.wait()

    def stop(self) -> None:
        """Ends the engine thread after the item it is on, without waiting for it. What is queued is refused.

        A process that ends while an item is still running has to use `os._exit`: native code on a daemon thread can crash the
        interpreter's own ending.
        """
        self._queue.close()

    # -- facts --

    @property
    def description(self) -> WorkerDescription | None:
        """What the worker is; None until it is built."""
        return None if self._engine is None else self._engine.description

    @property
    def ready(self) -> bool:
        """Whether it takes new steps: built, not draining, not stopped."""
        return self._engine is not None and not self._queue.is_draining and not self._queue.is_closed

    @property
    def is_alive(self) -> bool:
        """Whether the engine thread is there to build the engine or to execute what comes."""
        return self._thread is not None and self._thread.is_alive() and not self._queue.is_closed

    @property
    def stalled(self) -> bool:
        """Whether the engine has been on one item for longer than `stall_seconds`. Idling and building are no stalls."""
        return self._queue.running_seconds > self._stall_seconds

    @property
    def num_queued(self) -> int:
        """Steps and other calls that wait for the engine."""
        return self._queue.num_queued

    @property
    def num_steps_in_flight(self) -> int:
        """Steps queued or running."""
        return self._queue.num_steps_in_flight

    def state(self) -> FenceState:
        """Returns epoch, expected step id and lease."""
        return self._queue.state

    # -- calls --

    def admit(self, batch: StepBatch) -> Ticket[Answer]:
        """Queues a step, joins it to the same one in flight, or answers it from the kept answers; at once.

        Raises:
            WorkerError: it is refused.
        """
        self._built_engine()
        return self._queue.admit(batch)

    async def submit(self, batch: StepBatch) -> Answer:
        """Executes a step. It is admitted before anything is awaited; cancellation withdraws the caller's interest.

        Raises:
            WorkerError: the step was refused, not executed, or failed.
        """
        return await self.admit(batch).answer()

    async def reset_kv_cache(self, expected_epoch: int) -> int:
        """Starts a new epoch, without a lease, after the steps admitted before. Returns it.

        Raises:
            WorkerError: `expected_epoch` is not the worker's, or no work is taken now.
        """
        self._built_engine()
        return await self._queue.call(lambda: self._reset(expected_epoch)).answer()

    async def release_sequences(self, *, worker_epoch: int, router_id: int, sequence_ids: UInt64Array) -> int:
        """Forgets sequences, after the steps admitted before. Returns how many were known.

        Raises:
            WorkerError: the epoch is not the worker's, another router owns it, or no work is taken now.
        """
        engine = self._built_engine()

        def release() -> int:
            self._queue.check_caller(worker_epoch, router_id)
            return engine.release_sequences(sequence_ids)

        return await self._queue.call(release).answer()

    def _built_engine(self) -> StepEngine:
        if self._engine is None:
            raise UnavailableError("the worker is starting", retry_after_ms=_RETRY_WHILE_STARTING_MS)
        return self._engine

    # -- from the engine thread to the event loop --

    def _tell(self, outcomes: Outcomes) -> None:
        self._on_loop(lambda: self._deliver(outcomes))

    def _deliver(self, outcomes: Outcomes) -> None:
        for tickets, outcome in outcomes:
            for ticket in tickets:
                ticket.resolve(outcome)
        if self._queue.is_drained:
            self._is_drained.set()

    def _on_loop(self, callback: Callable[[], object]) -> None:
        if self._loop is None:
            return  # not started: nobody can wait for anything
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            if not self._loop.is_closed():  # a loop that ended before the engine has left nobody to be told
                raise

    # -- engine thread --

    def _run(self, build: Callable[[], StepEngine]) -> None:
        try:
            engine = build()
        except BaseException as error:  # whatever it is, it is for `wait_ready` to raise
            self._build_error = error
            self._queue.close()
            self._on_loop(self._is_built.set)
            return
        self._engine = engine
        self._on_loop(self._is_built.set)
        try:
            while (item := self._queue.take()) is not None:
                if isinstance(item, Step):
                    self._execute(engine, item)
                else:
                    self._call(item)
        except BaseException as error:  # a dead engine thread must never look like an idle one
            self._die(error)

    def _execute(self, engine: StepEngine, step: Step) -> None:
        """Hot path: executes one step and answers it."""
        batch = step.batch
        started_ns = time.monotonic_ns()
        try:
            result = engine.step(batch)
        except FatalEngineError:
            raise
        except (PreconditionError, OverloadedError) as refusal:
            self._queue.refuse(step, refusal)
        except Exception:
            _log.exception("%s failed on the engine: a new epoch begins", step.name, extra=_log_fields(step))
            self._queue.fail(step, EngineFaultError(f"{step.name} failed on the engine: the KV cache content is lost"))
        else:
            total_ns = time.monotonic_ns() - batch.arrival_ns
            timings = replace(result.timings, queue_ns=started_ns - batch.arrival_ns, total_ns=total_ns)
            self._queue.finish(step, replace(result, timings=timings))

    def _call(self, control: Control) -> None:
        outcome: object
        try:
            outcome = control.action()
        except PreconditionError as refusal:
            outcome = refusal
        self._queue.answer(control, outcome)

    def _reset(self, expected_epoch: int) -> int:
        epoch = self._queue.reset(expected_epoch)
        self._clear_kv_cache()
        return epoch

    def _clear_kv_cache(self) -> None:
        if self._engine is not None:
            self._engine.reset_kv_cache()

    def _die(self, error: BaseException) -> None:
        _log.critical("the engine can't be used any more", exc_info=error, extra=_log_fields(self._queue.running))
        self._queue.close(running_error=EngineFaultError("the engine can't be used any more: the worker ends"))
        self._on_loop(lambda: self.fatal.set_result(error))


def _log_fields(item: Item | None) -> dict[str, object]:
    """Returns what every log line of a step carries; the event loop has bound the same to its own lines of the call."""
    if not isinstance(item, Step):
        return {}
    fields: dict[str, object] = {
        "step_id": item.batch.step_id,
        "epoch": item.started_epoch,
        "client_tag": item.batch.client_tag,
    }
    trace_id = trace_id_of(item.batch.traceparent)
    return fields | {"trace_id": trace_id} if trace_id else fields
