"""The check for machines with a GPU, run here on the CPU: with the packages of such a machine, to its end, and when parts fail."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

# What a bare machine with a GPU lacks, and what need not fit together there.
ABSENT = ("structlog", "grpc_health", "grpc_reflection", "grpc_status", "hypothesis", "grpc", "modelworker.proto")
PARTS = {
    "versions",
    "limits",
    "tests",
    "decode 1B",
    "prefill 1B",
    "decode 8B",
    "prefill 8B",
    "attention 8B",
    "sampling",
    "host 135M",
    "transformers",
    "all",
}

_REFUSING = """
import importlib.machinery, sys

class Refusing:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if any(name == absent or name.startswith(absent + ".") for absent in {names!r}):
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Refusing, sys.meta_path)
"""
_FAILING = """
import os, sys, time

if "--part" in sys.orig_argv:
    part = sys.orig_argv[sys.orig_argv.index("--part") + 1]
    if part == "versions":
        print("the driver is gone", flush=True)
        os._exit(3)
    time.sleep(300)
"""


def environment(tmp_path: Path, customization: str) -> dict[str, str]:
    """Lets every Python of the check run some code first."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(customization)
    return {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path / "site"), "OMP_NUM_THREADS": "1"}


def check(root: Path, env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(root / "tests" / "gpu_check.sh"), *arguments, "--device", "cpu", "--tiny"]
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


def rows_of(output: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((output / "results.json").read_text())
    return rows


@pytest.mark.slow
def test_the_whole_check_runs_with_the_packages_of_a_bare_machine_and_prints_its_table_last(root: Path, tmp_path: Path) -> None:
    output = tmp_path / "results"
    done = check(root, environment(tmp_path, _REFUSING.format(names=ABSENT)), str(output), "--seconds", "600")
    rows = rows_of(output)
    assert done.returncode == 0, done.stdout[-6000:]
    assert {row["part"] for row in rows} == PARTS
    assert {row["status"] for row in rows} <= {"ok", "skipped"}
    table = (output / "table.txt").read_text()
    assert done.stdout.endswith(table)
    assert len(table.splitlines()) == len(rows) + 1
    figures = [row for row in rows if row["part"].startswith(("decode", "prefill", "host")) and row["what"] != "start"]
    assert all(row["value"] > 0 for row in figures)
    assert {row["way"] for row in figures} == {"eager", "compiled", "PIECEWISE", "FULL"}
    assert all(row["share"] > 0 for row in figures if not row["part"].startswith("host"))


def test_the_row_of_transformers_is_skipped_with_a_word_where_that_is_missing(root: Path, tmp_path: Path) -> None:
    output = tmp_path / "results"
    output.mkdir()
    env = environment(tmp_path, _REFUSING.format(names=(*ABSENT, "transformers")))
    done = check(root, env, str(output), "--part", "transformers")
    assert done.returncode == 0, done.stdout
    (row,) = map(json.loads, (output / "transformers.rows.jsonl").read_text().splitlines())
    assert row["status"] == "skipped"
    assert row["note"] == "transformers can't be imported: No module named 'transformers'"


def test_what_a_bare_machine_lacks_is_absent_in_these_tests(tmp_path: Path) -> None:
    program = "import importlib.util, sys; print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
    env = {**environment(tmp_path, _REFUSING.format(names=ABSENT)), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", program, *ABSENT, "torch"], env=env, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "['torch']\n"


def test_a_part_that_fails_or_takes_too_long_is_named_in_the_table_and_the_check_goes_on(root: Path, tmp_path: Path) -> None:
    output = tmp_path / "results"
    begun = time.monotonic()
    done = check(root, environment(tmp_path, _FAILING), str(output), "--seconds", "10")
    assert time.monotonic() - begun < 60
    assert done.returncode == 1
    rows = {row["part"]: row for row in rows_of(output)}
    assert rows["versions"]["note"] == "the driver is gone; see versions.log"
    assert rows["limits"]["note"].endswith("s are over; see limits.log")
    assert rows["transformers"]["note"] == "there was no time left of 10 s"
    assert {row["status"] for part, row in rows.items() if part != "all"} == {"FAILED"}
    assert "FAILED: the driver is gone" in done.stdout.splitlines()[-len(rows)]
