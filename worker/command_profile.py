"""`modelworker profile`: where the time of a step goes, op by op."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from modelworker.compiler.environment import environment
from modelworker.worker.batch import StepBatch
from modelworker.worker.engine import Engine
from modelworker.worker.errors import SettingsError, SetupError
from modelworker.worker.flags import CommandParser, add_settings, checked_type
from modelworker.worker.machine_limits import MachineLimits
from modelworker.worker.offline_engine import build_offline_engine, limit_probe, settings_with_model
from modelworker.worker.profile import StepProfile, profile_step
from modelworker.worker.profile_table import OpTime, shown_ops
from modelworker.worker.setting_values import positive_int
from modelworker.worker.settings import WorkerSettings
from modelworker.worker.step_bench import StepCase, make_batch, obstacle, ways_to_run
from modelworker.worker.step_runner import Way
from modelworker.worker.terminal import format_table

_AS_SERVED = "auto"
_DECODE_CONTEXT = 128
# Of torch's profiler: by default it tells stderr that it starts and stops. Errors come as exceptions, whatever it logs.
_LOG_LEVEL = "KINETO_LOG_LEVEL"
_LOG_NOTHING = "6"


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "profile",
        help="show where the time of a step goes",
        description="Builds a worker's engine in this process, without a server, runs one step again and again, and shows its time "
        "by op, with what reading the weights would take at least. --output writes a Chrome trace of the measured steps.",
    )
    add = parser.add_argument
    add("--batch", type=checked_type(positive_int), default=1, metavar="N", help="sequences of the step")
    add("--query-len", type=checked_type(positive_int), default=1, metavar="N", help="new tokens of each sequence; 1: a decode")
    default_context = f"{_DECODE_CONTEXT} for a decode (or what fits), else 0"
    add("--context", type=int, default=None, metavar="N", help=f"tokens of each in the cache; default: {default_context}")
    add(
        "--mode",
        choices=(_AS_SERVED, "eager", "compiled", "PIECEWISE", "FULL"),
        default=_AS_SERVED,
        help="how the step is run; auto: as the worker would serve it",
    )
    add("--steps", type=checked_type(positive_int), default=10, metavar="N", help="measured steps")
    add("--rows", type=checked_type(positive_int), default=12, metavar="N", help="rows of the table")
    add("--output", type=Path, metavar="FILE", help="write a trace for chrome://tracing or https://ui.perfetto.dev")
    add("--json", action="store_true", help="print one JSON object, with all ops")
    add_settings(parser, WorkerSettings)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints a table or JSON, and writes the trace if one is asked for."""
    settings = settings_with_model(arguments)
    if arguments.output is not None:
        _check_output(arguments.output)
    engine, progress = build_offline_engine(settings)
    case = _case(arguments, engine)
    batch = make_batch(case, engine.description)
    way = _way(engine, batch, arguments.mode)
    with progress.stage("measuring"):
        limits = limit_probe(engine, settings, progress).measure()
        with environment(**{_LOG_LEVEL: os.environ.get(_LOG_LEVEL, _LOG_NOTHING)}):
            profile = profile_step(engine, batch, way, limits, num_steps=arguments.steps)
    if arguments.output is not None:
        _write_trace(profile, arguments.output)
    if arguments.json:
        print(json.dumps(as_record(profile, case, engine)))
    else:
        print(f"{case}, {engine.description.model.name} in {engine.description.model.dtype}")
        print(format_profile(profile, limits, arguments.rows))
        if arguments.output is not None:
            print(f"trace: {arguments.output} (chrome://tracing, https://ui.perfetto.dev)")
    return 0


def format_profile(profile: StepProfile, limits: MachineLimits, num_rows: int) -> str:
    """Lays a profile out for people."""
    execution = profile.execution
    reason = f", because {execution.fallback_reason}" if execution.fallback_reason else ""
    weight_bytes = sum(each.weight_bytes for each in profile.ops)
    lines = [
        f"ran {execution.mode.name}{reason}{', in generated code' if execution.compiled else ''}, padded to "
        f"{execution.padded_tokens} tokens and {execution.padded_sequences} sequences",
        f"{profile.step_ms:.3f} ms a step undisturbed: prepare {profile.prepare_ms:.3f}, forward {profile.forward_ms:.3f}, "
        f"sample {profile.sample_ms:.3f}; {profile.measured_ms:.3f} ms while measured, which the table divides up",
        format_table(
            [_cells(each, profile.measured_ms) for each in shown_ops(profile.ops, num_rows)],
            header=("op", "weights", "calls", "ms", "share", "GB/s", "x floor"),
            right=(2, 3, 4, 5, 6),
        ),
    ]
    if weight_bytes:
        floor_ms = sum(each.floor_ms for each in profile.ops)
        lines.append(
            f"floor of the weights' ops: {floor_ms:.3f} ms for {weight_bytes / 2**20:.1f} MiB, "
            f"{100 * floor_ms / profile.step_ms:.0f} % of the undisturbed step "
            f"(this machine reads {limits.read_bytes_per_second / 1e9:.1f} GB/s)"
        )
    return "\n".join(lines)


def as_record(profile: StepProfile, case: StepCase, engine: Engine) -> dict[str, Any]:
    """Returns a profile for programs."""
    return {
        "step": str(case),
        "model": engine.description.model.name,
        "dtype": engine.description.model.dtype,
        "device": engine.description.execution.device_name,
        "threads": engine.description.execution.num_threads,
        "mode": profile.execution.mode.name,
        "fallback_reason": profile.execution.fallback_reason,
        "compiled": profile.execution.compiled,
        "step_ms": profile.step_ms,
        "prepare_ms": profile.prepare_ms,
        "forward_ms": profile.forward_ms,
        "sample_ms": profile.sample_ms,
        "measured_ms": profile.measured_ms,
        "ops": [asdict(each) for each in profile.ops],
    }


def _cells(op: OpTime, measured_ms: float) -> tuple[str, ...]:
    return (
        op.op,
        op.what,
        f"{op.calls:g}",
        f"{op.ms:.3f}",
        f"{100 * op.ms / measured_ms:.1f} %",
        f"{op.weight_bytes / op.ms / 1e6:.1f}" if op.weight_bytes and op.ms else "",
        f"{op.ms / op.floor_ms:.2f}" if op.floor_ms else "",
    )


def _check_output(path: Path) -> None:
    """Finds out before anything is loaded whether the trace has a place."""
    if path.is_dir() or not path.parent.is_dir():
        raise SettingsError(f"--output {path}: is no place for a file")


def _write_trace(profile: StepProfile, path: Path) -> None:
    try:
        path.write_text(json.dumps(profile.trace))
    except OSError as error:
        raise SetupError(f"--output {path}: can't be written: {error.strerror}") from error


def _case(arguments: argparse.Namespace, engine: Engine) -> StepCase:
    """Returns the step to measure.

    Raises:
        SettingsError: the worker would not execute it.
    """
    limits, max_model_len = engine.description.limits, engine.description.model.max_model_len
    context = arguments.context
    if context is None:
        context = min(_DECODE_CONTEXT, max_model_len - 1) if arguments.query_len == 1 else 0
    case = StepCase(num_sequences=arguments.batch, query_len=arguments.query_len, context_len=context)
    for name, found, most in (
        ("--batch", case.num_sequences, limits.max_sequences),
        ("--batch x --query-len", case.num_sequences * case.query_len, limits.max_tokens_per_step),
        ("--context + --query-len", case.context_len + case.query_len, max_model_len),
    ):
        if found > most:
            raise SettingsError(f"{name} is {found}, and the worker takes at most {most}")
    if context < 0:
        raise SettingsError(f"--context is {context}, expected 0 or more")
    if reason := obstacle(case, engine.description):
        raise SettingsError(f"--batch, --query-len, --context: {case}: {reason}")
    return case


def _way(engine: Engine, batch: StepBatch, mode: str) -> Way:
    """Returns how the step is run.

    Raises:
        SettingsError: there is no such way for it.
    """
    if mode == _AS_SERVED:
        return Way(engine.runner.choose(batch))
    ways = dict(ways_to_run(engine, batch))
    if mode not in ways:
        raise SettingsError(f"--mode {mode}: this step can't be run so here, expected one of auto, {', '.join(ways)}")
    return ways[mode]
