import json
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).with_name("run_benchmarks.py")


def run(folder: Path, *names: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(TOOL), str(folder), str(folder / "out"), *names]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_results_are_kept_as_json_lines_and_shown_as_a_table(tmp_path: Path) -> None:
    (tmp_path / "bench_step.py").write_text(
        "print('warming up')\nprint('{\"tokens\": 8, \"ms\": 1.23456}')\nprint('{\"tokens\": 16}')\n"
    )
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in (tmp_path / "out" / "step.jsonl").read_text().splitlines()] == [
        {"tokens": 8, "ms": 1.23456},
        {"tokens": 16},
    ]
    assert done.stdout.splitlines() == ["step", "tokens  ms", "8       1.235", "16      -"]
    assert "warming up" in done.stderr


def test_a_benchmark_that_fails_fails_the_run_but_not_the_others(tmp_path: Path) -> None:
    (tmp_path / "bench_a.py").write_text("raise SystemExit(3)")
    (tmp_path / "bench_b.py").write_text("print('{\"ms\": 2}')")
    (tmp_path / "bench_c.py").write_text("print('no result')")
    done = run(tmp_path)
    assert done.returncode == 1
    assert "a (exit code 3, 0 results), c (exit code 0, 0 results)" in done.stderr
    assert "ms\n2" in done.stdout


def test_a_name_that_is_no_benchmark_is_refused_with_those_there_are(tmp_path: Path) -> None:
    (tmp_path / "bench_a.py").write_text("print('{}')")
    done = run(tmp_path, "b")
    assert done.returncode == 2
    assert "no benchmark b; there are: a" in done.stderr
