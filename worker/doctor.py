"""The doctor: whether a worker with these settings would start here, found out in seconds and without loading weights."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import wrap

from modelworker.worker.doctor_machine import check_compiler, check_cpu, check_packages, check_port, check_threads, check_variables
from modelworker.worker.errors import CheckpointError, SettingsError
from modelworker.worker.examination import Check, Examination, Found, Outcome, Status
from modelworker.worker.settings import WorkerSettings
from modelworker.worker.terminal import format_table
from modelworker.worker.versions import installed_versions

_FINDING_CHARACTERS = 100

ModelChecks = Callable[[Examination, WorkerSettings, Outcome[Path], Outcome[int]], None]
"""Adds the checks that need torch: `doctor_model.examine_model`, with the model's directory and the number of threads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What the command line knows and the doctor needs.

    Attributes:
        variables: names of the environment variables that the command reads.
        environment: of the process.
        find_model: makes the settings' model a directory, without fetching anything.
        load_model_checks: imports torch, and with it the checks that need it.
    """

    variables: frozenset[str]
    environment: Mapping[str, str]
    find_model: Callable[[WorkerSettings], WorkerSettings]
    load_model_checks: Callable[[], ModelChecks]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What the doctor found.

    Attributes:
        go: whether a worker would start.
        checks: in the order in which they ran.
    """

    go: bool
    checks: tuple[Check, ...]


def examine(settings: WorkerSettings, surroundings: Surroundings) -> Report:
    """Examines machine, settings and model. Nothing stays changed, nothing is fetched, no weights are read."""
    examination = Examination()
    examination.check("packages", check_packages)
    examination.check("cpu", check_cpu)
    threads = examination.check("threads", lambda: check_threads(settings.device))
    examination.check("compiler", lambda: check_compiler(surroundings.environment))
    examination.check(
        "port",
        lambda: check_port(settings.server),
        advice="end what listens there, or choose another --port; --port 0 takes a free one",
    )
    examination.check("variables", lambda: check_variables(surroundings.variables, surroundings.environment))
    directory = examination.check("model_directory", lambda: _find_model(settings, surroundings.find_model))
    model_checks = examination.check("torch", lambda: _load(surroundings.load_model_checks))
    if model_checks.is_known:
        model_checks.value(examination, settings, directory, threads)
    else:
        examination.check("model", lambda: Found(value=model_checks.value, text=""))
    return Report(go=examination.passed, checks=tuple(examination.checks))


def _find_model(settings: WorkerSettings, find_model: Callable[[WorkerSettings], WorkerSettings]) -> Found[Path]:
    if not settings.model.model:
        raise SettingsError("no model: give --model DIR or set MODELWORKER_MODEL")
    directory = Path(find_model(settings).model.model)
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: is not a directory; expected one with config.json and *.safetensors")
    cached = "" if directory == Path(settings.model.model) else f" (of {settings.model.model}, in the local cache)"
    return Found(value=directory, text=f"{directory}{cached}")


def _load(load_model_checks: Callable[[], ModelChecks]) -> Found[ModelChecks]:
    checks = load_model_checks()
    return Found(value=checks, text=f"{installed_versions().get('torch', 'of unknown version')} can be imported")


def format_report(report: Report) -> str:
    """Returns a report as a table for people, and a last line that says go or no-go."""
    rows = []
    for check in report.checks:
        lines = wrap(check.finding, _FINDING_CHARACTERS, break_long_words=False, break_on_hyphens=False)
        if check.advice:
            lines += wrap(
                f"-> {check.advice}", _FINDING_CHARACTERS, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False
            )
        first, *others = lines or [""]
        rows += [(check.name, check.status.value, first), *(("", "", other) for other in others)]
    return f"{format_table(rows, header=('check', 'status', 'finding'))}\n\n{_verdict(report)}"


def _verdict(report: Report) -> str:
    counts = {status: sum(check.status is status for check in report.checks) for status in Status}
    details = [f"{counts[status]} {status.value}" for status in (Status.FAILED, Status.SKIPPED, Status.WARNING) if counts[status]]
    return f"{'go' if report.go else 'no-go'}: {', '.join(details) or 'every check is ok'}"


def format_json(report: Report) -> str:
    """Returns a report for programs: `go`, and `checks` with `name`, `status`, `finding` and `advice`."""
    return json.dumps({"go": report.go, "checks": [asdict(check) for check in report.checks]}, indent=2, ensure_ascii=False)
