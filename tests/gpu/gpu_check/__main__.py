"""Runs the parts one after the other, and prints one table last."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from gpu_check.parts import PARTS, TOTAL_SECONDS
from gpu_check.plan import Plan
from gpu_check.pytest_part import ROOT
from gpu_check.row import Row, format_rows, row_from_json, row_to_json

# Less is not enough to load torch and find anything out.
_LEAST_SECONDS = 8


def main() -> int:
    """Returns 0 where nothing failed, and there was time for everything."""
    arguments = _parse()
    # As an exception it ends the running part, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    plan = Plan(
        device=torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu"),
        tiny=arguments.tiny,
        output=arguments.output.resolve(),
        cache=ROOT / "build",
    )
    if arguments.part is not None:
        _run_here(plan, arguments.part)
        return 0
    return _run_all(plan, arguments.seconds)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/gpu_check.sh", description="Checks a machine with a GPU and measures it.")
    parser.add_argument(
        "output", nargs="?", type=Path, default=ROOT / "build" / "gpu", help="folder for results; default: build/gpu"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="make models so small that any machine runs them")
    parser.add_argument("--seconds", type=int, default=TOTAL_SECONDS, help=f"time for all parts; default: {TOTAL_SECONDS}")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_here(plan: Plan, name: str) -> None:
    """Runs a part in this process, and writes each row as soon as it is known."""
    with _rows_file(plan, name).open("a") as file:
        for row in PARTS[name].run(plan):
            print(row_to_json(row), file=file, flush=True)


def _run_all(plan: Plan, total_seconds: float) -> int:
    plan.output.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    rows: list[Row] = []
    for name, part in PARTS.items():
        left = total_seconds - (time.monotonic() - begun)
        seconds = min(part.budget_seconds, left)
        if seconds < _LEAST_SECONDS:
            rows.append(Row(part=name, what="all", status="FAILED", note=f"there was no time left of {total_seconds:.0f} s"))
            continue
        print(f"== {name}: at most {seconds:.0f} s", flush=True)
        failure = _run_apart(plan, name, seconds)
        rows += _rows_of(plan, name)
        if failure:
            rows.append(Row(part=name, what="all", status="FAILED", note=failure))
    num_failed = sum(row.status == "FAILED" for row in rows)
    rows.append(Row(part="all", what="time", value=time.monotonic() - begun, unit="s", note=f"{num_failed} rows FAILED"))
    table = format_rows(rows)
    (plan.output / "results.json").write_text(json.dumps([json.loads(row_to_json(row)) for row in rows], indent=1) + "\n")
    (plan.output / "table.txt").write_text(table + "\n")
    print(table)
    return 1 if num_failed else 0


def _run_apart(plan: Plan, name: str, seconds: float) -> str:
    """Runs a part in a process of its own: a fault of the device, or too little time, ends this part and no other.

    Returns:
        why it did not come to its end; "" where it did.
    """
    _rows_file(plan, name).unlink(missing_ok=True)
    command = [sys.executable, "-m", "gpu_check", str(plan.output), "--device", plan.device.type, "--part", name]
    log = plan.output / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, *(["--tiny"] if plan.tiny else [])], stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            # Compilers and tests run in processes of the same group.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"its {seconds:.0f} s are over; see {log.name}"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if code == 0:
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1][:200] if lines else f'it ended with {code}'}; see {log.name}"


def _rows_of(plan: Plan, name: str) -> list[Row]:
    path = _rows_file(plan, name)
    return [row_from_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def _rows_file(plan: Plan, name: str) -> Path:
    return plan.output / f"{name}.rows.jsonl"


if __name__ == "__main__":
    sys.exit(main())
