"""`modelworker bench step`: what a step takes on this machine, in every way to run it, against what the machine can do at most."""

import argparse
import itertools
import json
import sys

import torch

from modelworker.worker.engine import Engine
from modelworker.worker.flags import CommandParser, add_settings, checked_type
from modelworker.worker.machine_limits import LimitProbe
from modelworker.worker.offline_engine import build_offline_engine, limit_probe, settings_with_model
from modelworker.worker.progress import Progress
from modelworker.worker.setting_values import positive_int, positive_ints
from modelworker.worker.settings import WorkerSettings
from modelworker.worker.step_bench import StepCase, StepTimes, as_record, format_times, obstacle, run_cases


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "bench",
        help="measure steps on this machine",
        description="Builds a worker's engine in this process, without a server, and measures steps in every way to run them: "
        "plain modules (eager), compiled pieces, PIECEWISE and FULL graphs. The ways take turns in rounds; the floor (the longer "
        "of reading all weights and cached keys and values, and computing all products) is measured in the same rounds.",
    )
    parser.add_argument("subject", choices=("step",), help="what is measured")
    parser.add_argument(
        "--batch", type=checked_type(positive_ints), default=(1, 4, 16), metavar="LIST", help="sequences of a decode, e.g. 1,16"
    )
    parser.add_argument(
        "--context", type=checked_type(positive_ints), default=(128,), metavar="LIST", help="tokens of each sequence in the cache"
    )
    parser.add_argument(
        "--prefill", type=checked_type(positive_ints), default=(512,), metavar="LIST", help="tokens of a prompt without context"
    )
    parser.add_argument("--rounds", type=checked_type(positive_int), default=10, metavar="N", help="measurements of each")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    add_settings(parser, WorkerSettings)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures and prints a table, or JSON lines."""
    settings = settings_with_model(arguments)
    engine, progress = build_offline_engine(settings)
    results = _measure(engine, limit_probe(engine, settings, progress), arguments, progress)
    if arguments.json:
        machine = {
            "model": engine.description.model.name,
            "dtype": engine.description.model.dtype,
            "device": engine.description.execution.device_name,
            "threads": engine.description.execution.num_threads,
            "torch": torch.__version__,
        }
        for result in results:
            print(json.dumps({"benchmark": "step", **as_record(result), **machine}))
    else:
        print(format_times(results))
    return 0


def _measure(engine: Engine, probe: LimitProbe, arguments: argparse.Namespace, progress: Progress) -> list[StepTimes]:
    decodes = itertools.product(arguments.context, arguments.batch)
    cases = [StepCase(num_sequences=batch, query_len=1, context_len=context) for context, batch in decodes]
    cases += [StepCase(num_sequences=1, query_len=tokens, context_len=0) for tokens in arguments.prefill]
    obstacles = {case: obstacle(case, engine.description) for case in cases}
    for case, reason in obstacles.items():
        if reason:
            print(f"modelworker: {case} is left out: {reason}", file=sys.stderr)
    fitting = [case for case, reason in obstacles.items() if not reason]
    with progress.stage("measuring", total=len(fitting) * arguments.rounds, unit="rounds") as advance:
        return list(run_cases(engine, fitting, probe, rounds=arguments.rounds, advance=advance))
