"""Steps in order, with retries that are safe: `FencedSession` and `AsyncFencedSession`.

A session holds the worker's epoch, the router's id and the next step id. When the connection breaks, nobody knows whether the
step was executed; it is sent again with the same id and content until it is answered, and the worker executes it at most once
(it joins a running one, or answers a finished one from memory).
"""

import asyncio
import secrets
import time
from collections import deque
from contextlib import suppress

import grpc

from modelworker.proto.model_worker_pb2 import ExecuteStepRequest, WorkerInfo
from modelworker.worker.client.connection import AsyncClient, Client
from modelworker.worker.client.errors import (
    CallDeadlineError,
    KvCacheLostError,
    WorkerBusyError,
    WorkerCallError,
    WorkerFaultError,
    WorkerUnavailableError,
)
from modelworker.worker.client.step import StepAnswer

DEFAULT_PATIENCE_SECONDS = 60.0
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0


class StepPendingError(Exception):
    """A step may or may not have been executed. `resume` has to settle that before another step is sent."""


class Attempts:
    """The attempts of one call: when to give up, and how long to pause before the next."""

    def __init__(self, patience: float) -> None:
        self._deadline = time.monotonic() + patience
        self._pause = _FIRST_PAUSE_SECONDS
        self._num_faults = 0

    @property
    def remaining(self) -> float:
        """Seconds left for the next attempt."""
        return max(self._deadline - time.monotonic(), 0.001)

    def pause_after(self, error: WorkerCallError) -> float | None:
        """Returns the seconds to pause before the next attempt, None when another attempt can't help or time is up."""
        pause: float | None = None
        if isinstance(error, WorkerUnavailableError) or error.code is grpc.StatusCode.CANCELLED:
            pause = self._pause if error.retry_after is None else error.retry_after
            self._pause = min(self._pause * 2, _LONGEST_PAUSE_SECONDS)
        elif isinstance(error, WorkerBusyError):
            pause = error.retry_after
        elif isinstance(error, WorkerFaultError) or error.code is grpc.StatusCode.UNKNOWN:
            # Once more under the same id: the worker then says what became of the step (usually KV_CACHE_LOST).
            self._num_faults += 1
            pause = self._pause if self._num_faults == 1 else None
        return pause if pause is not None and time.monotonic() + pause < self._deadline else None


def _may_have_executed(error: WorkerCallError) -> bool:
    unclear = (WorkerUnavailableError, CallDeadlineError, WorkerFaultError)
    return isinstance(error, unclear) or error.code in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)


class Fence:
    """Epoch, router id, next step id and the steps that are not answered: a session without its transport.

    Attributes:
        unanswered: the steps, in order; the first of them has the id after the last one that was executed.
    """

    def __init__(self, router_id: int | None) -> None:
        self.router_id = secrets.randbits(64) or 1 if router_id is None else router_id
        self.worker_epoch = 0
        self.unanswered: deque[ExecuteStepRequest] = deque()
        self._first_step_id = 1
        self._is_unclear = False

    @property
    def next_step_id(self) -> int:
        """Id that the next step will have."""
        return self._first_step_id + len(self.unanswered)

    @property
    def pending(self) -> ExecuteStepRequest | None:
        """The first of the steps."""
        return self.unanswered[0] if self.unanswered else None

    def enter(self, info: WorkerInfo) -> None:
        """Takes over the worker's epoch and step id; what was not answered is void."""
        self.worker_epoch = info.worker_epoch
        self._first_step_id = info.next_step_id
        self.unanswered.clear()

    def stamp(self, request: ExecuteStepRequest, max_unanswered: int = 1) -> None:
        """Makes the request the step that is next.

        Raises:
            StepPendingError: as many steps as may be are not answered.
        """
        if len(self.unanswered) >= max_unanswered:
            first, number = self._first_step_id, len(self.unanswered)
            if number == 1:
                raise StepPendingError(f"step {first} is not settled: call resume() first")
            raise StepPendingError(f"{number} steps from {first} on are not answered, the most there may be: call receive() first")
        request.worker_epoch = self.worker_epoch
        request.router_id = self.router_id
        request.step_id = self.next_step_id
        self.unanswered.append(request)

    def settle(self) -> None:
        """The first of the steps was executed."""
        self.unanswered.popleft()
        self._first_step_id += 1
        self._is_unclear = False

    def pause_after(self, error: WorkerCallError, attempts: Attempts, *, in_band: bool = False) -> float:
        """Returns the seconds to pause before the steps are sent again.

        Args:
            error: what came in place of an answer.
            attempts: of the call that waits for it.
            in_band: it came in the step's turn on a stream, so that it is the worker's last word on this step.

        Raises:
            WorkerCallError: `error` itself, when sending them again can't help. The steps stay pending where the first one may
                have been executed: only an answer that speaks of this very step settles it, being out of room does not.
        """
        self._is_unclear |= _may_have_executed(error)
        pause = attempts.pause_after(error)
        if pause is None:
            if in_band or not (self._is_unclear and (_may_have_executed(error) or isinstance(error, WorkerBusyError))):
                self.abandon()
            raise error
        return pause

    def abandon(self) -> None:
        """The first of the steps will not be executed, and none behind it."""
        self.unanswered.clear()
        self._is_unclear = False


class _Session:
    """What a session knows of itself, whatever its transport."""

    _fence: Fence

    @property
    def worker_epoch(self) -> int:
        """The epoch in which steps are sent."""
        return self._fence.worker_epoch

    @property
    def router_id(self) -> int:
        """Who this session is for the worker."""
        return self._fence.router_id

    @property
    def next_step_id(self) -> int:
        """Id that the next step will have."""
        return self._fence.next_step_id

    @property
    def is_pending(self) -> bool:
        """Whether a step may have been executed without an answer; `resume` settles it."""
        return self._fence.pending is not None


class FencedSession(_Session):
    """A router's hold on one worker: sequenced steps, one at a time, each executed once however often the connection breaks.

    Attributes:
        client: the connection.
        info: the worker, as of the last `renew`.
    """

    def __init__(self, client: Client, *, router_id: int | None = None, patience: float = DEFAULT_PATIENCE_SECONDS) -> None:
        """Reads the worker's epoch and next step id.

        Args:
            client: the connection; stays the caller's to close.
            router_id: identity of the router, not 0; None: a random one.
            patience: seconds after which a call that gets no answer fails.

        Raises:
            WorkerCallError: the worker can't be asked.
        """
        self.client = client
        self._patience = patience
        self._fence = Fence(router_id)
        self.info = self.renew()

    @property
    def depth(self) -> int:
        """How many steps may be unanswered at once."""
        return 1

    def send(self, request: ExecuteStepRequest) -> None:
        """Takes the next step, which `receive` executes; errors as `execute`."""
        self._fence.stamp(request)

    def receive(self) -> StepAnswer:
        """Executes the step that was sent; errors as `execute`."""
        return self.resume()

    def execute(self, request: ExecuteStepRequest) -> StepAnswer:
        """Executes the next step; sets the request's epoch, router id and step id.

        Raises:
            KvCacheLostError: the epoch is over; `renew`, then recompute everything.
            StepPendingError: the step before it is not settled.
            WorkerCallError: the worker refuses the step, or patience is over (then `resume` may settle it later).
        """
        self._fence.stamp(request)
        return self.resume()

    def resume(self) -> StepAnswer:
        """Sends the pending step (again) until it is answered; errors as `execute`."""
        request = self._fence.pending
        if request is None:
            raise StepPendingError("no step is pending")
        attempts = Attempts(self._patience)
        while True:
            try:
                answer = self.client.execute(request, attempts.remaining)
            except WorkerCallError as error:
                time.sleep(self._fence.pause_after(error, attempts))
            else:
                self._fence.settle()
                return answer

    def renew(self) -> WorkerInfo:
        """Enters the worker's present epoch, in which nothing that was sent before counts. Returns the worker's info."""
        attempts = Attempts(self._patience)
        while True:
            try:
                self.info = self.client.info(attempts.remaining)
            except WorkerCallError as error:
                pause = attempts.pause_after(error)
                if pause is None:
                    raise
                time.sleep(pause)
            else:
                self._fence.enter(self.info)
                return self.info

    def release(self) -> None:
        """Gives the worker back if this session holds its lease: resets the KV cache, so that others can have it at once."""
        info = self.client.info(self._patience)
        if info.lease_holder == self.router_id:
            with suppress(KvCacheLostError):
                self.client.reset_kv_cache(info.worker_epoch, self._patience)


class AsyncFencedSession(_Session):
    """`FencedSession` for asyncio; made by `open`."""

    def __init__(self, client: AsyncClient, *, router_id: int | None = None, patience: float = DEFAULT_PATIENCE_SECONDS) -> None:
        self.client = client
        self.info = WorkerInfo()
        self._patience = patience
        self._fence = Fence(router_id)

    @classmethod
    async def open(
        cls, client: AsyncClient, *, router_id: int | None = None, patience: float = DEFAULT_PATIENCE_SECONDS
    ) -> "AsyncFencedSession":
        """Reads the worker's epoch and next step id; arguments and errors as `FencedSession`."""
        session = cls(client, router_id=router_id, patience=patience)
        await session.renew()
        return session

    async def execute(self, request: ExecuteStepRequest) -> StepAnswer:
        """Executes the next step; see `FencedSession.execute`."""
        self._fence.stamp(request)
        return await self.resume()

    async def resume(self) -> StepAnswer:
        """Sends the pending step (again) until it is answered; errors as `execute`."""
        request = self._fence.pending
        if request is None:
            raise StepPendingError("no step is pending")
        attempts = Attempts(self._patience)
        while True:
            try:
                answer = await self.client.execute(request, attempts.remaining)
            except WorkerCallError as error:
                await asyncio.sleep(self._fence.pause_after(error, attempts))
            else:
                self._fence.settle()
                return answer

    async def renew(self) -> WorkerInfo:
        """Enters the worker's present epoch; see `FencedSession.renew`."""
        attempts = Attempts(self._patience)
        while True:
            try:
                self.info = await self.client.info(attempts.remaining)
            except WorkerCallError as error:
                pause = attempts.pause_after(error)
                if pause is None:
                    raise
                await asyncio.sleep(pause)
            else:
                self._fence.enter(self.info)
                return self.info

    async def release(self) -> None:
        """Gives the worker back; see `FencedSession.release`."""
        info = await self.client.info(self._patience)
        if info.lease_holder == self.router_id:
            with suppress(KvCacheLostError):
                await self.client.reset_kv_cache(info.worker_epoch, self._patience)
