"""Whether a worker runs the C++ kernels, and what it says and does where it can't."""

from dataclasses import replace
from pathlib import Path

import pytest

from modelworker.ops.cpu.isa import LEVELS, cpu_flags, usable_levels
from modelworker.worker.counters import Counters
from modelworker.worker.cpu_kernels import choose_isa
from modelworker.worker.engine import Engine
from modelworker.worker.errors import SettingsError
from modelworker.worker.settings import CacheSettings, OpsSettings, WorkerSettings
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.engines import engine_of, execute, tiny_settings

USABLE = [level.name for level in usable_levels(cpu_flags())]


def implementations(engine: Engine) -> set[str]:
    return {op.implementation for op in engine.description.ops if op.implementation not in ("", "built in")}


def greedy(engine: Engine) -> list[int]:
    result = execute(engine, query_lens=[5, 3], context_lens=[0, 0], token_ids=[1, 2, 3, 4, 5, 6, 7, 8], tables=[[1, 2], [3]])
    return [int(token) for token in result.sampled_ids]


def test_a_worker_on_a_cpu_runs_the_kernels_and_says_so(tmp_path: Path) -> None:
    with engine_of(save_tiny(tmp_path)) as engine:
        assert implementations(engine) == {"c++"}
        assert engine.description.execution.attention == "c++"
        assert "no_cpu_kernels" not in {degradation.reason for degradation in engine.description.degradations}


@pytest.mark.parametrize("cause", ["no compiler", "a compiler that fails"])
def test_where_there_are_no_kernels_plain_ops_serve_the_same_tokens_and_the_degradation_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    model = save_tiny(tmp_path / "model")
    with engine_of(model) as engine:
        expected = greedy(engine)
    (tmp_path / "bin").mkdir()
    cache = tmp_path / "cache"
    if cause == "a compiler that fails":
        compiler = tmp_path / "bin" / "g++"
        compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "g++ 99" && exit 0\necho "error: it is broken" >&2; exit 1\n')
        compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin" if cause == "a compiler that fails" else str(tmp_path / "bin"))

    def settings(directory: Path) -> WorkerSettings:
        return replace(tiny_settings(directory), cache=CacheSettings(cache_dir=str(cache)))

    counters = Counters()
    with engine_of(model, settings, counters) as engine:
        assert greedy(engine) == expected
        assert implementations(engine) == {"native"}
        [degradation] = [entry for entry in engine.description.degradations if entry.reason == "no_cpu_kernels"]
        named = {"no compiler": "g++ was not found", "a compiler that fails": "it is broken"}[cause]
        assert named in degradation.message
        assert "\n" not in degradation.message
        [norm] = [op for op in engine.description.ops if op.name == "rms_norm"]
        assert named in norm.reason
        assert counters.snapshot()['degradations_total{reason="no_cpu_kernels"}'] == 1


def test_a_cache_folder_that_cannot_be_made_costs_a_compilation_and_no_kernels(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")

    def settings(directory: Path) -> WorkerSettings:
        return replace(tiny_settings(directory), cache=CacheSettings(cache_dir=str(tmp_path / "cache")))

    with engine_of(save_tiny(tmp_path / "model"), settings) as engine:
        assert implementations(engine) == {"c++"}
        assert "no_cpu_kernels" not in {degradation.reason for degradation in engine.description.degradations}


@pytest.mark.slow
@pytest.mark.parametrize("level", USABLE)
def test_every_isa_level_serves_the_same_tokens(tmp_path: Path, level: str) -> None:
    model = save_tiny(tmp_path)
    with engine_of(model) as engine:
        expected = greedy(engine)
    with engine_of(model, lambda path: replace(tiny_settings(path), ops=OpsSettings(cpu_isa=level))) as engine:
        assert greedy(engine) == expected


def test_a_level_that_the_machine_lacks_is_refused_with_those_it_has() -> None:
    lesser = tuple(level for level in LEVELS if level.name in ("avx2", "portable"))
    assert choose_isa(OpsSettings(), lesser).name == "avx2"
    assert choose_isa(OpsSettings(cpu_isa="portable"), lesser).name == "portable"
    with pytest.raises(SettingsError, match="--cpu-isa amx_bf16: this machine has avx2, portable"):
        choose_isa(OpsSettings(cpu_isa="amx_bf16"), lesser)
