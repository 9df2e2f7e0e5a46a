"""Steps in order, with retries that are safe: `FencedSession` and `AsyncFencedSession`.

A session holds the worker's epoch, the router's id and the next step id. When the connection breaks, nobody knows whether the
step was executed; it is sent again with the same id and content until it is answered, and the worker executes it at most once
(it joins a running one, or answers a finished one from memory).
"""

import asyncio
import time
from contextlib import suppress

from modelworker.proto.model_worker_pb2 import ExecuteStepRequest, WorkerInfo
from modelworker.worker.client.answer import StepAnswer
from modelworker.worker.client.connection import AsyncClient, Client
from modelworker.worker.client.errors import KvCacheLostError, WorkerCallError
from modelworker.worker.client.session_state import Attempts, SessionState

DEFAULT_PATIENCE_SECONDS = 60.0


class _Session:
    """What a session knows of itself, whatever its transport."""

    _state: SessionState

    @property
    def worker_epoch(self) -> int:
        """The epoch in which steps are sent."""
        return self._state.worker_epoch

    @property
    def router_id(self) -> int:
        """Who this session is for the worker."""
        return self._state.router_id

    @property
    def next_step_id(self) -> int:
        """Id that the next step will have."""
        return self._state.next_step_id

    @property
    def is_pending(self) -> bool:
        """Whether a step may have been executed without an answer; `resume` settles it."""
        return self._state.pending is not None


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
        self._state = SessionState(router_id)
        self.info = self.renew()

    @property
    def depth(self) -> int:
        """How many steps may be unanswered at once."""
        return 1

    def send(self, request: ExecuteStepRequest) -> None:
        """Takes the next step, which `receive` executes; errors as `execute`."""
        self._state.stamp(request)

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
        self._state.stamp(request)
        return self.resume()

    def resume(self) -> StepAnswer:
        """Sends the pending step (again) until it is answered; errors as `execute`."""
        request = self._state.first_pending()
        attempts = Attempts(self._patience)
        while True:
            try:
                answer = self.client.execute(request, attempts.remaining)
            except WorkerCallError as error:
                time.sleep(self._state.pause_after(error, attempts))
            else:
                self._state.settle()
                return answer

    def renew(self) -> WorkerInfo:
        """Enters the worker's present epoch, in which nothing that was sent before counts. Returns the worker's info."""
        attempts = Attempts(self._patience)
        while True:
            try:
                self.info = self.client.info(attempts.remaining)
            except WorkerCallError as error:
                time.sleep(attempts.pause_or_raise(error))
            else:
                self._state.enter(self.info)
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
        self._state = SessionState(router_id)

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
        self._state.stamp(request)
        return await self.resume()

    async def resume(self) -> StepAnswer:
        """Sends the pending step (again) until it is answered; errors as `execute`."""
        request = self._state.first_pending()
        attempts = Attempts(self._patience)
        while True:
            try:
                answer = await self.client.execute(request, attempts.remaining)
            except WorkerCallError as error:
                await asyncio.sleep(self._state.pause_after(error, attempts))
            else:
                self._state.settle()
                return answer

    async def renew(self) -> WorkerInfo:
        """Enters the worker's present epoch; see `FencedSession.renew`."""
        attempts = Attempts(self._patience)
        while True:
            try:
                self.info = await self.client.info(attempts.remaining)
            except WorkerCallError as error:
                await asyncio.sleep(attempts.pause_or_raise(error))
            else:
                self._state.enter(self.info)
                return self.info

    async def release(self) -> None:
        """Gives the worker back; see `FencedSession.release`."""
        info = await self.client.info(self._patience)
        if info.lease_holder == self.router_id:
            with suppress(KvCacheLostError):
                await self.client.reset_kv_cache(info.worker_epoch, self._patience)
