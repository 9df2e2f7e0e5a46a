"""Runs every benchmark, one after the other, and prints their results as a table.

Usage: run_benchmarks.py FOLDER INTO [NAME ...]

A benchmark is FOLDER/bench_NAME.py; each line that it prints on stdout and that is a JSON object is a result. Results are kept in
INTO/NAME.jsonl, other lines are shown as they come.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def run(script: Path, into: Path) -> tuple[list[Result], int]:
    """Runs one benchmark; returns its results and its exit code."""
    results: list[Result] = []
    # Benchmarks share modules that lie beside them, which a safe path leaves out, and some of those of the tests.
    paths = (str(script.parent), str(script.parent.parent / "support"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            result = _parse(line)
            if result is None:
                sys.stderr.write(line)
            else:
                results.append(result)
    into.write_text("".join(json.dumps(result) + "\n" for result in results), encoding="utf-8")
    return results, process.returncode


def _parse(line: str) -> Result | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def table(results: list[Result]) -> str:
    """Lays the results out: a column for every name that occurs, in the order of its first occurrence."""
    names = list(dict.fromkeys(name for result in results for name in result))
    rows = [names, *([_cell(result.get(name)) for name in names] for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(names))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    """Runs the command line; exits with 1 when a benchmark failed or printed no result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("into", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME")
    arguments = parser.parse_args()
    scripts = {path.stem.removeprefix("bench_"): path for path in sorted(arguments.folder.glob("bench_*.py"))}
    if unknown := [name for name in arguments.names if name not in scripts]:
        parser.error(f"no benchmark {', '.join(unknown)}; there are: {', '.join(scripts) or 'none'}")
    arguments.into.mkdir(parents=True, exist_ok=True)
    tables, failed = [], []
    for name in arguments.names or scripts:
        sys.stderr.write(f"== {name}\n")
        started = time.monotonic()
        results, code = run(scripts[name], arguments.into / f"{name}.jsonl")
        sys.stderr.write(f"   {len(results)} results in {time.monotonic() - started:.0f} s\n")
        tables.append(f"{name}\n{table(results)}\n")
        if code != 0 or not results:
            failed.append(f"{name} (exit code {code}, {len(results)} results)")
    sys.stdout.write("\n".join(tables))
    if failed:
        sys.stderr.write(f"error: failed: {', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
