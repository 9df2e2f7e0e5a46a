"""`modelworker serve`: a worker as a process."""

import argparse
import asyncio
import importlib
import logging
import os
import sys
import threading
from contextlib import suppress

from modelworker.worker.counters import Counters
from modelworker.worker.errors import SetupError
from modelworker.worker.executor import StepEngine
from modelworker.worker.flags import CommandParser, add_settings, read_settings, warn_of_unknown_variables
from modelworker.worker.progress import LogProgress, Progress
from modelworker.worker.server import BuildEngine, serve
from modelworker.worker.settings import WorkerSettings
from modelworker.worker.telemetry import configure_logging, wants_console
from modelworker.worker.terminal import TerminalProgress

_ENGINE_THREAD_NAME = "engine"
_ENGINE_END_SECONDS = 0.5


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model",
        description="Serves a model over gRPC (modelworker.v1). Every flag has an environment twin, shown in brackets; flags win.",
    )
    add_settings(parser, WorkerSettings)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM. See `ExitCode` for what is returned."""
    warn_of_unknown_variables(arguments.parser)
    settings = read_settings(WorkerSettings, arguments)
    if not settings.model.model:
        arguments.parser.error("no model: give --model DIR or set MODELWORKER_MODEL")
    return run_worker(settings, build_model_engine)


def run_worker(settings: WorkerSettings, build: BuildEngine) -> int:
    """Runs a worker on this process's main thread, with logs, signals and progress; returns its exit code."""
    progress = _progress(settings)
    before_line = progress.hide if isinstance(progress, TerminalProgress) else None
    configure_logging(log_format=settings.server.log_format, log_level=settings.server.log_level, before_line=before_line)

    def announce(port: int) -> None:
        with suppress(BrokenPipeError):
            print(f"modelworker: listening on {settings.server.host}:{port}", flush=True)

    code = asyncio.run(serve(settings, build, progress, on_listening=announce))
    _leave_engine_behind(code)
    return code


def _leave_engine_behind(code: int) -> None:
    """Ends the process here if the engine thread is still at work: the interpreter can't be torn down around native code."""
    for thread in threading.enumerate():
        if thread.name == _ENGINE_THREAD_NAME:
            thread.join(_ENGINE_END_SECONDS)
            if thread.is_alive():
                logging.shutdown()
                sys.stdout.flush()
                os._exit(code)


def build_model_engine(settings: WorkerSettings, progress: Progress, counters: Counters) -> StepEngine:
    """Builds the engine of a model. Runs on the engine's thread.

    `startup` is imported here and not above because it imports torch, which takes seconds: the worker answers probes before that,
    and `serve --help` and wrong flags do not wait for it.

    Raises:
        SetupError: the engine can't be built.
    """
    with progress.stage("importing torch"):
        try:
            startup = importlib.import_module("modelworker.worker.startup")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("modelworker"):
                raise
            raise SetupError(f"`serve` needs the package {error.name}: pip install 'modelworker[worker]'") from error
    engine: StepEngine = startup.build_engine(settings, progress, counters)
    return engine


def _progress(settings: WorkerSettings) -> LogProgress | TerminalProgress:
    if sys.stderr.isatty() and wants_console(settings.server.log_format, sys.stderr):
        return TerminalProgress(sys.stderr)
    return LogProgress()
