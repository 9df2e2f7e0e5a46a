"""The server: listens before anything is loaded, becomes ready, drains, and ends with an exit code that says why.

listen, liveness SERVING -> build the engine -> readiness SERVING -> SIGTERM: readiness NOT_SERVING, accepted steps finish -> 0
"""

import asyncio
import logging
import os
import signal
import tempfile
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import grpc
import structlog
from grpc_health.v1 import health_pb2_grpc

from modelworker.proto import model_worker_pb2_grpc
from modelworker.worker.address import check_address
from modelworker.worker.call import RequestRoom
from modelworker.worker.call_log import CallLog
from modelworker.worker.counters import Counters
from modelworker.worker.errors import SetupError
from modelworker.worker.executor import Executor, StepEngine
from modelworker.worker.health import HealthService
from modelworker.worker.interceptor import StatusInterceptor
from modelworker.worker.progress import Progress
from modelworker.worker.reflection import add_reflection
from modelworker.worker.servicer import ITEM_STREAMS, ModelWorkerServicer
from modelworker.worker.settings import WorkerSettings
from modelworker.worker.stage import StageTracker

BuildEngine = Callable[[WorkerSettings, Progress, Counters], StepEngine]

_HEALTH_POLL_SECONDS = 0.2
# Of all requests in the house, in largest messages. Steps in flight have a limit of their own, but their retries come beside them.
_MAX_HELD_MESSAGES = 4
# After a drain or a fault: time for answers that are ready and for watchers of health to be told.
_LAST_ANSWERS_SECONDS = 2.0
_FAULT_LINGER_SECONDS = 1.0
# For calls that were cancelled to come to their end. They need a turn of the loop each, not time.
_CANCELLED_CALLS_SECONDS = 1.0


class ExitCode(IntEnum):
    """How the process ended."""

    OK = 0
    SETUP_FAILED = 1
    WRONG_USAGE = 2
    ENGINE_FAULT = 3
    DRAIN_OVERRUN = 4


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Returns the options of the gRPC server.

    Without so_reuseport = 0 a second worker shares the port silently. The key of the ping interval is the one that the core reads
    (a spelling with "recv" in it is ignored); without it and the strikes, a client whose keepalive pings arrive while a long step
    runs is cut off with "too many pings". The server's own pings find peers that vanished without a word: their calls are
    cancelled, so that queued steps are withdrawn. By default gRPC asks after two hours, never while no call runs, and waits a
    minute for the answer, whatever the keepalive's timeout says, unless the ping's own timeout is shorter. Message limits hold for
    one direction each.
    """
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


class _WatchError(Exception):
    """The task that turns health over has ended."""


class WorkerServer:
    """One worker process's server: the gRPC side, health, and the life of the executor. Used on one event loop."""

    _watching: "asyncio.Task[None]"

    def __init__(
        self, settings: WorkerSettings, build: BuildEngine, progress: Progress, *, on_listening: Callable[[int], None]
    ) -> None:
        self._settings = settings
        self._build = build
        self._stage = StageTracker(progress)
        self.counters = Counters()
        self.executor = Executor(settings=settings.fencing, stall_seconds=settings.server.stall_seconds, counters=self.counters)
        self.health = HealthService()
        self._call_log = CallLog(self.counters)
        self._room = RequestRoom(_MAX_HELD_MESSAGES * settings.server.max_message_size)
        self._servicer = ModelWorkerServicer(
            executor=self.executor,
            stage=self._stage,
            counters=self.counters,
            room=self._room,
            log=self._call_log,
            keeps_requests=bool(settings.recording.record_steps),
        )
        self.port = 0
        self.ready = asyncio.Event()
        self._on_listening = on_listening
        self._stop_requested = asyncio.Event()
        self._log: structlog.stdlib.BoundLogger = structlog.get_logger("modelworker.server")

    @property
    def stopping(self) -> bool:
        """Whether the worker was asked to stop."""
        return self._stop_requested.is_set()

    def request_stop(self) -> None:
        """Starts the end: no new steps from now on; `run` returns when the accepted ones are answered."""
        self._stop_requested.set()
        if self.executor.is_alive:
            self.executor.begin_drain()
        self._update_health()

    async def run(self) -> ExitCode:
        """Serves until it is asked to stop or the engine fails.

        Returns:
            OK, ENGINE_FAULT or DRAIN_OVERRUN.

        Raises:
            SetupError: the port can't be opened, or the engine can't be built.
        """
        server = await self._listen()
        self._watching = asyncio.create_task(self._watch_engine())
        try:
            if self._settings.server.port_file:
                write_port_file(Path(self._settings.server.port_file), self.port)
            self._on_listening(self.port)
            if self.stopping:
                return ExitCode.OK
            self.executor.start(lambda: self._build(self._settings, self._stage, self.counters))
            self._update_health()
            if not await self._become_ready():
                return ExitCode.OK
            return await self._serve()
        except _WatchError as error:
            self._log.critical("the engine is not watched any more: the process ends", exc_info=error.__cause__)
            return await self._end_by_fault()
        finally:
            self._watching.cancel()
            self.health.update(live=False, ready=False)
            self.health.close()
            self._servicer.end_streams()
            await server.stop(_LAST_ANSWERS_SECONDS)
            self.executor.stop()

    async def _listen(self) -> grpc.aio.Server:
        """Opens the port with all services on it; everything but health answers UNAVAILABLE until the engine is built."""
        settings = self._settings.server
        interceptor = StatusInterceptor(
            self._call_log, check_size=self._servicer.check_size, room=self._room, item_streams=ITEM_STREAMS
        )
        server = grpc.aio.server(interceptors=[interceptor], options=server_options(settings.max_message_size))
        model_worker_pb2_grpc.add_ModelWorkerServicer_to_server(self._servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        if settings.reflection:
            add_reflection(server)
        self.port = _bind(server, settings.host, settings.port)
        await server.start()
        self._log.info("listening", host=settings.host, port=self.port)
        return server

    async def _become_ready(self) -> bool:
        """Waits for the engine. Returns False when the worker was asked to stop before."""
        built = asyncio.ensure_future(self.executor.wait_ready())
        stopped = asyncio.ensure_future(self._stop_requested.wait())
        await self._first_of(built, stopped)
        if not built.done():
            built.cancel()
            self._log.info("stopped while starting", stage=str(self._stage))
            return False
        stopped.cancel()
        await self._check_built(built)
        if self._stop_requested.is_set():
            return False
        self._update_health()
        self.ready.set()
        self._log.info("ready", port=self.port)
        return True

    async def _check_built(self, built: "asyncio.Future[None]") -> None:
        try:
            await built
        except SetupError:
            raise
        except Exception as error:
            self._log.error("start-up failed", exc_info=error)
            raise SetupError(f"start-up failed: {type(error).__name__}: {error} (the log has the details)") from error

    async def _serve(self) -> ExitCode:
        stopped = asyncio.ensure_future(self._stop_requested.wait())
        fault = self.executor.fatal
        await self._first_of(stopped, fault)
        stopped.cancel()
        if fault.done():
            return await self._end_by_fault()
        limit_seconds = self._settings.server.drain_seconds
        self._log.info("draining", limit_seconds=limit_seconds)
        drained = asyncio.ensure_future(self.executor.drained())
        try:
            await self._first_of(drained, fault, timeout=limit_seconds)
            is_drained = drained.done()
        finally:
            drained.cancel()
        if fault.done():
            return await self._end_by_fault()
        if not is_drained:
            self._log.error(
                "drain limit passed with steps unfinished", limit_seconds=limit_seconds, steps=self.executor.num_steps_in_flight
            )
            return ExitCode.DRAIN_OVERRUN
        self._log.info("drained")
        return ExitCode.OK

    async def _first_of(self, *events: "asyncio.Future[Any]", timeout: float | None = None) -> None:
        """Waits for the first of some events.

        Raises:
            _WatchError: the engine is not watched any more, so that nobody would learn of a stall.
        """
        await asyncio.wait((*events, self._watching), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._watching.done():
            raise _WatchError from self._watching.exception()

    async def _end_by_fault(self) -> ExitCode:
        self.health.update(live=False, ready=False)
        self._log.critical("the engine can't be used any more: the process ends")
        # Probes shall see NOT_SERVING before the listener closes.
        await asyncio.sleep(_FAULT_LINGER_SECONDS)
        return ExitCode.ENGINE_FAULT

    async def _watch_engine(self) -> None:
        """Turns health over when a step stalls, moves again, or the engine dies."""
        while True:
            self._update_health()
            await asyncio.sleep(_HEALTH_POLL_SECONDS)

    def _update_health(self) -> None:
        live = self.executor.is_alive and not self.executor.stalled
        ready = live and self.executor.ready and not self._stop_requested.is_set()
        if self.health.update(live=live, ready=ready):
            self._log.log(logging.INFO if live else logging.ERROR, "health changed", live=live, ready=ready)


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    """Opens the port and returns its number.

    Raises:
        SetupError: it can't be opened.
    """
    target = check_address(host, port)
    try:
        bound = server.add_insecure_port(target)
    except RuntimeError as error:
        raise SetupError(f"can't listen on host {host} port {port}: {error}") from error
    if bound == 0:
        raise SetupError(f"can't listen on host {host} port {port}")
    return bound


def write_port_file(path: Path, port: int) -> None:
    """Writes the port's number as one line; a reader sees all of it or no file.

    Raises:
        SetupError: the file can't be written.
    """
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{port}\n")
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        raise SetupError(f"can't write the port file {path}: {error.strerror}") from error


async def serve(
    settings: WorkerSettings, build: BuildEngine, progress: Progress, *, on_listening: Callable[[int], None]
) -> ExitCode:
    """Runs a worker until SIGTERM or SIGINT. The second signal ends the process at once with 128 + its number.

    Args:
        settings: of the worker.
        build: makes the engine; called on the engine's thread.
        progress: receives the progress of start-up.
        on_listening: called with the port once the worker listens.
    """
    server = WorkerServer(settings, build, progress, on_listening=on_listening)

    def on_signal(number: int) -> None:
        if server.stopping:
            os._exit(128 + number)
        server.request_stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await server.run()
    finally:
        await _let_cancelled_calls_end()


async def _let_cancelled_calls_end() -> None:
    """Waits for the tasks of calls that the server has cancelled: gRPC prints a traceback for each that ends with the loop."""
    if calls := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(calls, timeout=_CANCELLED_CALLS_SECONDS)
