"""What a start on compiled code does not do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.kernels import CACHE_FOLDER

SUPPORT = Path(__file__).parents[1] / "support"

PROGRAM = """
import json, sys
from dataclasses import replace
from pathlib import Path
from modelworker.worker.counters import Counters
from modelworker.worker.settings import CacheSettings, ExecutionSettings
from modelworker_testing.engines import engine_of, tiny_settings

model, cache, compiler = sys.argv[1:]
settings = lambda model: replace(
    tiny_settings(model), cache=CacheSettings(cache_dir=cache), execution=ExecutionSettings(compiler=compiler)
)
counters = Counters()
with engine_of(Path(model), settings, counters) as engine:
    slow = {"torch._dynamo", "torch._inductor", "sympy", "triton", "torch.fx.experimental.symbolic_shapes"}
    counted = counters.snapshot()
    print(json.dumps({
        "loaded": sorted(slow & set(sys.modules)),
        "compiled": sorted(name for name in counted if "cache" in name),
        "graphs": sorted({size.mode.name for size in engine.description.execution.captured}),
    }))
"""


def start(model: Path, cache: Path, compiler: str) -> dict[str, Any]:
    """Starts a worker's engine in a process of its own."""
    path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), str(cache), compiler],
        env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def starts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """A cold start and a warm one, with plain code of pieces and with generated code."""
    folder = tmp_path_factory.mktemp("warm")
    model, cache = save_tiny(folder), folder / "cache"
    cache.mkdir()
    (cache / "cpu-kernels").symlink_to(CACHE_FOLDER / "cpu-kernels")
    return start(model, cache, request.param), start(model, cache, request.param)


def test_a_start_on_compiled_code_loads_nothing_that_compiling_needs(starts: tuple[dict[str, Any], dict[str, Any]]) -> None:
    cold, warm = starts
    assert {"sympy", "torch._dynamo"} <= set(cold["loaded"])
    assert warm["loaded"] == []


def test_a_start_on_compiled_code_finds_it_and_captures_what_the_first_one_captured(
    starts: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    cold, warm = starts
    assert cold["compiled"] == ['compile_events_total{event="cache_misses:absent"}']
    assert warm["compiled"] == ['compile_events_total{event="cache_hits"}']
    assert cold["graphs"] == warm["graphs"] == ["FULL", "PIECEWISE"]
