"""Steps in order over a stream, several in flight, with retries that are safe: `StreamSession` and `AsyncStreamSession`.

What a session is to single calls (`session`), these are to a stream. When it breaks, nobody knows which of the unanswered steps
were executed: the worker is asked for its epoch, and all of them are sent again on a new stream, with the same ids and content. The
worker executes none of them twice. When a step is refused, those behind it are refused with it: they are sent again after a pause
where that can help, else the error is raised and all of them are void.
"""

import asyncio
import time

from modelworker.proto.model_worker_pb2 import ExecuteStepRequest, WorkerInfo
from modelworker.worker.client.answer import StepAnswer
from modelworker.worker.client.connection import AsyncClient, Client
from modelworker.worker.client.errors import WorkerCallError
from modelworker.worker.client.pipeline import Pipeline
from modelworker.worker.client.session import DEFAULT_PATIENCE_SECONDS, AsyncFencedSession, FencedSession
from modelworker.worker.client.session_state import Attempts
from modelworker.worker.client.stream import AsyncStepStream, StepStream


class StreamSession(FencedSession):
    """A router's hold on one worker: sequenced steps over a stream, each executed once however often the connection breaks.

    For one thread.

    Attributes:
        client: the connection.
        info: the worker, as of the last `renew`.
    """

    def __init__(
        self,
        client: Client,
        *,
        router_id: int | None = None,
        patience: float = DEFAULT_PATIENCE_SECONDS,
        max_unanswered: int | None = None,
    ) -> None:
        """Reads the worker's epoch and next step id.

        Args:
            client: the connection; stays the caller's to close.
            router_id: identity of the router, not 0; None: a random one.
            patience: seconds after which a call that gets no answer fails.
            max_unanswered: how many steps may be sent before the first of them is answered; None: the worker's in-flight limit.

        Raises:
            WorkerCallError: the worker can't be asked.
        """
        self._stream: StepStream | None = None
        super().__init__(client, router_id=router_id, patience=patience)
        self._pipeline = Pipeline(self._state, max_unanswered)

    @property
    def depth(self) -> int:
        """How many steps may be unanswered at once without a refusal."""
        return min(self._pipeline.max_unanswered(self.info), self.info.limits.max_steps_in_flight)

    def send(self, request: ExecuteStepRequest) -> None:
        """Sends the next step, without waiting; sets its epoch, router id and step id. It must not be changed until it is answered.

        Raises:
            StepPendingError: too many steps are not answered: `receive` first.
        """
        is_only = self._pipeline.stamp(request, self.info)
        if self._stream is not None:
            self._stream.send(request)
        elif is_only:
            self._begin()

    def receive(self) -> StepAnswer:
        """Returns the answer of the first unanswered step.

        Raises:
            KvCacheLostError: the epoch is over; `renew`, then recompute everything.
            StepPendingError: no step is unanswered.
            WorkerCallError: the worker refuses the step: it and all behind it are void, and its id is the next step's; or patience
                is over, and `receive` may settle it later (`is_pending` tells).
        """
        self._state.first_pending()
        attempts = Attempts(self._patience)
        while True:
            try:
                outcome = self._next(attempts)
            except WorkerCallError as error:
                self.close()
                time.sleep(self._state.pause_after(error, attempts))
                continue
            if isinstance(outcome, StepAnswer):
                return outcome
            if outcome is not None:
                time.sleep(self._state.pause_after(outcome, attempts, in_band=True))
                self._send_again()

    def _next(self, attempts: Attempts) -> StepAnswer | WorkerCallError | None:
        if self._stream is None:
            self._pipeline.check_epoch(self.client.info(attempts.remaining))
        stream = self._stream or self._begin()
        return self._pipeline.take(stream.receive(attempts.remaining))

    def _begin(self) -> StepStream:
        stream = self._stream = self.client.stream_steps()
        for request in self._pipeline.begin():
            stream.send(request)
        return stream

    def _send_again(self) -> None:
        if self._stream is not None:
            for request in self._state.unanswered:
                self._stream.send(request)

    def execute(self, request: ExecuteStepRequest) -> StepAnswer:
        """Executes the next step and waits for it; errors as `send` and `receive`.

        Raises:
            StepPendingError: a step before it is not answered.
        """
        self._pipeline.check_settled()
        self.send(request)
        return self.receive()

    def resume(self) -> StepAnswer:
        """Is `receive`."""
        return self.receive()

    def renew(self) -> WorkerInfo:
        """Enters the worker's present epoch, in which nothing that was sent before counts. Returns the worker's info."""
        self.close()
        return super().renew()

    def release(self) -> None:
        """Ends the stream, and gives the worker back as `FencedSession.release` does."""
        self.close()
        super().release()

    def close(self) -> None:
        """Ends the stream. Steps that are not answered stay pending: `receive` opens another one for them."""
        if self._stream is not None:
            if self.is_pending:
                self._stream.cancel()
            else:
                self._stream.finish()  # A call that ends well, for the worker's counters.
            self._stream = None


class AsyncStreamSession(AsyncFencedSession):
    """`StreamSession` for asyncio, for one task; made by `open`."""

    def __init__(
        self,
        client: AsyncClient,
        *,
        router_id: int | None = None,
        patience: float = DEFAULT_PATIENCE_SECONDS,
        max_unanswered: int | None = None,
    ) -> None:
        super().__init__(client, router_id=router_id, patience=patience)
        self._stream: AsyncStepStream | None = None
        self._pipeline = Pipeline(self._state, max_unanswered)

    @classmethod
    async def open(
        cls,
        client: AsyncClient,
        *,
        router_id: int | None = None,
        patience: float = DEFAULT_PATIENCE_SECONDS,
        max_unanswered: int | None = None,
    ) -> "AsyncStreamSession":
        """Reads the worker's epoch and next step id; arguments and errors as `StreamSession`."""
        session = cls(client, router_id=router_id, patience=patience, max_unanswered=max_unanswered)
        await session.renew()
        return session

    async def send(self, request: ExecuteStepRequest) -> None:
        """Sends the next step; see `StreamSession.send`. Waits while the transport takes no more."""
        is_only = self._pipeline.stamp(request, self.info)
        if self._stream is not None:
            await self._stream.send(request, self._patience)
        elif is_only:
            await self._begin()

    async def receive(self) -> StepAnswer:
        """Returns the answer of the first unanswered step; see `StreamSession.receive`."""
        self._state.first_pending()
        try:
            return await self._receive(Attempts(self._patience))
        except asyncio.CancelledError:
            self.close()  # What was read of it and what was not can't be told any more.
            raise

    async def _receive(self, attempts: Attempts) -> StepAnswer:
        while True:
            try:
                outcome = await self._next(attempts)
            except WorkerCallError as error:
                self.close()
                await asyncio.sleep(self._state.pause_after(error, attempts))
                continue
            if isinstance(outcome, StepAnswer):
                return outcome
            if outcome is not None:
                await asyncio.sleep(self._state.pause_after(outcome, attempts, in_band=True))
                await self._send_again()

    async def _next(self, attempts: Attempts) -> StepAnswer | WorkerCallError | None:
        if self._stream is None:
            self._pipeline.check_epoch(await self.client.info(attempts.remaining))
        stream = self._stream or await self._begin()
        return self._pipeline.take(await stream.receive(attempts.remaining))

    async def _begin(self) -> AsyncStepStream:
        stream = self._stream = self.client.stream_steps()
        for request in self._pipeline.begin():
            await stream.send(request, self._patience)
        return stream

    async def _send_again(self) -> None:
        if self._stream is not None:
            for request in self._state.unanswered:
                await self._stream.send(request, self._patience)

    async def execute(self, request: ExecuteStepRequest) -> StepAnswer:
        """Executes the next step and waits for it; see `StreamSession.execute`."""
        self._pipeline.check_settled()
        await self.send(request)
        return await self.receive()

    async def resume(self) -> StepAnswer:
        """Is `receive`."""
        return await self.receive()

    async def renew(self) -> WorkerInfo:
        """Enters the worker's present epoch; see `StreamSession.renew`."""
        self.close()
        return await super().renew()

    def close(self) -> None:
        """Ends the stream; see `StreamSession.close`."""
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None
