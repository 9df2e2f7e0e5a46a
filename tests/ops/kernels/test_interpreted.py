"""Runs the tests of the Triton kernels' values under Triton's interpreter, which has to be chosen before Triton is imported."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def cases() -> Iterator[Any]:
    for path in sorted(HERE.glob("interpreted_*.py")):
        for marks in ("not slow", "slow"):
            yield pytest.param(path, marks, id=f"{path.stem}-{marks}", marks=pytest.mark.slow if marks == "slow" else ())


@pytest.mark.parametrize(("path", "marks"), list(cases()))
def test_the_tests_of_a_file_pass_under_the_interpreter(path: Path, marks: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "-m", marks, str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    # 5: there are none with these marks.
    assert done.returncode in (0, 5) if marks == "slow" else done.returncode == 0, done.stdout + done.stderr
