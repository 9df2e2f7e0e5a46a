"""`modelworker replay`: executes recorded steps again in a fresh engine, and says which token comes out otherwise."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from modelworker.worker.engine import Engine
from modelworker.worker.errors import SetupError
from modelworker.worker.flags import CommandParser, add_settings
from modelworker.worker.offline_engine import build_offline_engine
from modelworker.worker.recording import FILE_PATTERN, RecordingFile, facts_of
from modelworker.worker.replay import ReplayReport, replay_files
from modelworker.worker.replay_logprobs import LogprobsComparison
from modelworker.worker.settings import (
    CacheSettings,
    DeviceSettings,
    ExecutionSettings,
    FeedbackSettings,
    KvCacheSettings,
    ModelSettings,
    OpsSettings,
    StepSettings,
    WorkerSettings,
)
from modelworker.worker.settings_record import settings_from_record, with_overrides

_EXIT_OK = 0
_EXIT_DIFFERS = 1
# What decides what an engine computes; the others are about the server.
_SECTIONS = (
    ModelSettings,
    KvCacheSettings,
    StepSettings,
    FeedbackSettings,
    DeviceSettings,
    OpsSettings,
    ExecutionSettings,
    CacheSettings,
)
# Facts that need not be the same, and may explain a difference.
_COMPARED = ("device_name", "attention", "optimization_level", "graph_mode", "ops", "versions")


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "replay",
        help="execute recorded steps again and compare their tokens",
        description="Executes steps that `serve --record-steps` wrote, in a fresh engine with the recorded settings, and reports "
        "the first token that comes out otherwise. Settings that are given here replace recorded ones: --enforce-eager shows "
        "whether compiled code or graphs make the difference. Exit code 0: all tokens are equal; 1: one is not, or there are none.",
    )
    parser.add_argument("recording", type=Path, metavar="DIR|FILE", help="what was recorded: a folder, or one of its files")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    for section in _SECTIONS:
        add_settings(parser, section, has_defaults=False)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Executes and prints. Returns 0 if all came out as recorded."""
    files = find_recordings(arguments.recording)
    given = {name: value for name, value in vars(arguments).items() if name not in ("recording", "json", "run", "parser")}
    recorded = _common_settings(files)
    settings = with_overrides(_without_what_eager_contradicts(recorded, given), given)
    engine, progress = build_offline_engine(settings)
    check_same_model(engine, files)
    # Why a recording ended may stand in its header: one thing more to report.
    total = sum(file.count_records() + bool(file.header.ended) for file in files)
    with progress.stage("replaying", total=total, unit="records") as advance:
        report = replay_files(engine, files, advance=advance)
    changed = [name for name, value in given.items() if with_overrides(recorded, {name: value}) != recorded]
    report.notes += _other_facts(engine, files[0], changed)
    print(json.dumps(_as_record(report)) if arguments.json else format_report(report))
    return _EXIT_OK if report.is_equal and report.num_steps else _EXIT_DIFFERS


def find_recordings(path: Path) -> list[RecordingFile]:
    """Finds the recordings at a path, in the order in which they were written.

    Raises:
        SetupError: there are none, or one can't be read.
    """
    if path.is_dir():
        files = [RecordingFile(file) for file in sorted(path.glob(FILE_PATTERN))]
        if not files:
            raise SetupError(f"{path}: has no recordings ({FILE_PATTERN}) in it")
        return files
    return [RecordingFile(path)]


def check_same_model(engine: Engine, files: Sequence[RecordingFile]) -> None:
    """Refuses recordings of another model.

    Raises:
        SetupError: the weights or the config are others.
    """
    for file in files:
        for name in ("weights_digest", "config_digest"):
            recorded, found = file.header.worker.get(name), getattr(engine.description.model, name)
            if recorded != found:
                raise SetupError(
                    f"{file.path}: was recorded with {name} {recorded}, and this model has {found}: not the same model"
                )


def format_report(report: ReplayReport) -> str:
    """Lays a report out for people: the result comes last."""
    lines = [f"note: {note}" for note in report.notes]
    lines += [*_format_logprobs("logprobs", report.logprobs), *_format_logprobs("prompt logprobs", report.prompt_logprobs)]
    counted = f"{report.num_steps} steps, {report.num_tokens} tokens"
    if report.first is not None:
        lines += [f"first difference: {report.first}", f"DIFFERENT: {report.num_differing_steps} of {counted}"]
    else:
        lines.append(f"equal: {counted}" if report.num_steps else "there were no steps to execute")
    return "\n".join(lines)


def _format_logprobs(name: str, found: LogprobsComparison) -> Iterator[str]:
    if found.max_difference is not None:
        yield f"{name}: {found.num_compared} compared, which differ by at most {found.max_difference:.3g}"
    if found.num_not_compared:
        yield f"{name}: {found.num_not_compared} not compared, for they are of other tokens than the recorded ones"


def _common_settings(files: Sequence[RecordingFile]) -> WorkerSettings:
    """Returns the settings of recordings of one worker.

    Raises:
        SetupError: they are of several workers.
    """
    for file in files:
        if file.header.settings != files[0].header.settings:
            raise SetupError(f"{file.path}: was recorded with other settings than {files[0].path}: replay them one by one")
    return settings_from_record(WorkerSettings, files[0].header.settings)


def _without_what_eager_contradicts(recorded: WorkerSettings, given: Mapping[str, Any]) -> WorkerSettings:
    """Drops how steps were recorded to run where --enforce-eager replaces all of it: it contradicts graphs that were asked for."""
    return replace(recorded, execution=ExecutionSettings()) if given.get("enforce_eager") else recorded


def _other_facts(engine: Engine, file: RecordingFile, changed: Sequence[str]) -> list[str]:
    """Says what is not as it was when the steps were recorded."""
    now = facts_of(engine.description)
    notes = [
        f"{name.replace('_', ' ')} was {file.header.worker.get(name)} when it was recorded, and is {now[name]}"
        for name in _COMPARED
        if file.header.worker.get(name) != now[name]
    ]
    flags = [f"--{name.replace('_', '-')}" for name in changed]
    return [f"replayed with {', '.join(flags)}", *notes] if flags else notes


def _as_record(report: ReplayReport) -> dict[str, Any]:
    return {"equal": report.is_equal, **asdict(report)}
