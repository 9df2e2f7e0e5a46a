"""`modelworker serve`: a worker as a process."""

import argparse
import asyncio
import gc
import importlib
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from modelworker.worker.counters import Counters
from modelworker.worker.doctor import Report, Surroundings, examine, format_report
from modelworker.worker.errors import SetupError
from modelworker.worker.executor import ENGINE_THREAD_NAME, StepEngine
from modelworker.worker.flags import CommandParser, add_settings, read_settings, warn_of_unknown_variables
from modelworker.worker.progress import LogProgress, Progress
from modelworker.worker.recording import RecordingEngine, RepeatableEngine, StepRecorder, prepare_folder
from modelworker.worker.server import BuildEngine, serve
from modelworker.worker.settings import WorkerSettings
from modelworker.worker.telemetry import configure_logging, wants_console
from modelworker.worker.terminal import TerminalProgress

_ENGINE_END_SECONDS = 0.5
_EXIT_NO_GO = 1
# On the hub, names have an owner: `models/x` may be one, `/models/x`, `./models/x` and `x` are not.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model",
        description="Serves a model over gRPC (modelworker.v1). Every flag has an environment twin, shown in brackets; flags win.",
    )
    add_settings(parser, WorkerSettings)
    parser.add_argument("--dry-run", action="store_true", help="examine machine and model as `modelworker doctor` does, and end")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Serves until SIGTERM. See `ExitCode` for what is returned; with --dry-run, 0 is go and 1 no-go."""
    if arguments.dry_run:
        report = examine_worker(arguments)
        print(format_report(report))
        return 0 if report.go else _EXIT_NO_GO
    warn_of_unknown_variables(arguments.parser)
    settings = read_settings(WorkerSettings, arguments)
    if not settings.model.model:
        arguments.parser.error("no model: give --model DIR or set MODELWORKER_MODEL")
    check_model_path(settings.model.model)
    if settings.recording.record_steps:
        return _run_recorded(settings)
    return run_worker(settings, build_model_engine)


def _run_recorded(settings: WorkerSettings) -> int:
    prepare_folder(Path(settings.recording.record_steps))
    with ExitStack() as at_end:

        def build(settings: WorkerSettings, progress: Progress, counters: Counters) -> StepEngine:
            engine = build_model_engine(settings, progress, counters)
            recorder = StepRecorder(settings, engine.description, counters)
            at_end.callback(recorder.close)
            return RecordingEngine(engine, recorder, settings.recording.record_steps)

        return run_worker(settings, build)


def check_model_path(name: str) -> None:
    """Refuses what can't be a model before anything is started for it.

    Raises:
        SetupError: it is a file, or neither a directory nor a name on the hub.
    """
    if Path(name).is_file():
        hint = "; `modelworker import-gguf` makes one of it" if name.endswith(".gguf") else ""
        raise SetupError(f"{name}: is a file, expected a model directory{hint}")
    if not Path(name).exists() and not _HUB_NAME.fullmatch(name):
        raise SetupError(f"{name}: there is no such directory, and it is no name on the hub (owner/name)")


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
        if thread.name == ENGINE_THREAD_NAME:
            thread.join(_ENGINE_END_SECONDS)
            if thread.is_alive():
                logging.shutdown()
                sys.stdout.flush()
                os._exit(code)


def build_model_engine(settings: WorkerSettings, progress: Progress, counters: Counters) -> RepeatableEngine:
    """Builds the engine of a model. Runs on the engine's thread.

    `startup` is imported here and not above because it imports torch, which takes seconds: the worker answers probes before that,
    and `serve --help` and wrong flags do not wait for it.

    Raises:
        SetupError: the engine can't be built.
    """
    with progress.stage("importing torch"), _without_collections():
        startup = _load("startup", needed_by="`serve`", extra="worker")
    engine: RepeatableEngine = startup.build_engine(find_model(settings, progress), progress, counters)
    return engine


@contextmanager
def _without_collections() -> Iterator[None]:
    """Looks for no garbage meanwhile, and afterwards for none among what is there by then.

    Imports make hardly any. Torch's make 180,000 objects: going through them again and again takes 0.5 s of 2.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()


def find_model(settings: WorkerSettings, progress: Progress | None) -> WorkerSettings:
    """Turns a name on the Hugging Face hub into the directory of its files; a directory that exists always wins.

    Args:
        settings: of the worker.
        progress: receives the progress of fetching; None: nothing is fetched, the local cache must have the model.

    Raises:
        SetupError: the model can't be found or fetched.
    """
    name = settings.model.model
    if Path(name).exists() or not _HUB_NAME.fullmatch(name):
        return settings
    hub = _load("hub", needed_by=f"{name}: is no directory; as a name on the Hugging Face hub it", extra="hub")
    directory = hub.find_cached_model(name) if progress is None else hub.fetch_model(name, progress)
    served_name = settings.model.served_model_name or name
    return replace(settings, model=replace(settings.model, model=str(directory), served_model_name=served_name))


def examine_worker(arguments: argparse.Namespace) -> Report:
    """Examines machine, settings and model, for `serve --dry-run` and `doctor`."""
    surroundings = Surroundings(
        variables=frozenset(arguments.parser.variables()),
        environment=arguments.parser.environment,
        find_model=lambda settings: find_model(settings, None),
        load_model_checks=lambda: _load("doctor_model", needed_by="`serve`", extra="worker").examine_model,
    )
    return examine(read_settings(WorkerSettings, arguments), surroundings)


def _load(module: str, *, needed_by: str, extra: str) -> ModuleType:
    """Imports a module that needs packages of an extra of this distribution.

    Raises:
        SetupError: one of them is not installed.
    """
    try:
        return importlib.import_module(f"modelworker.worker.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("modelworker"):
            raise
        raise SetupError(f"{needed_by} needs the package {error.name}: pip install 'modelworker[{extra}]'") from error


def _progress(settings: WorkerSettings) -> LogProgress | TerminalProgress:
    if sys.stderr.isatty() and wants_console(settings.server.log_format, sys.stderr):
        return TerminalProgress(sys.stderr)
    return LogProgress()
