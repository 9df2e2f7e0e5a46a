"""`modelworker doctor`: whether `modelworker serve` would start with the same flags and environment, and what it would choose."""

import argparse

from modelworker.worker.command_serve import examine_worker
from modelworker.worker.doctor import format_json, format_report
from modelworker.worker.flags import CommandParser, add_settings
from modelworker.worker.settings import WorkerSettings

_EXIT_GO = 0
_EXIT_NO_GO = 1


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "doctor",
        help="examine machine, settings and model without loading it",
        description="Examines machine, settings and model in seconds and without loading weights. Takes the flags of `serve` and "
        "ends with 0 (go: a worker would start) or 1 (no-go).",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_settings(parser, WorkerSettings)
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Examines, prints the report, and returns 0 for go and 1 for no-go."""
    report = examine_worker(arguments)
    print(format_json(report) if arguments.json else format_report(report))
    return _EXIT_GO if report.go else _EXIT_NO_GO
