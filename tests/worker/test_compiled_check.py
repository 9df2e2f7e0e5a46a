"""Generated code that computes something else than plain modules is not served."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelworker.worker import decoder_setup
from modelworker.worker.counters import Counters
from modelworker.worker.settings import ExecutionSettings, WorkerSettings
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.code_faults import CODE_FAULTS, plant_in_code
from modelworker_testing.engines import engine_of, execute, tiny_settings
from modelworker_testing.mode_world import Row, mode_settings, mode_world

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

PROMPTS = [Row(2, 0, 7), Row(9, 13, 1), Row(4, 4, 3)]


def compiled_settings(model: Path) -> WorkerSettings:
    return replace(tiny_settings(model), execution=ExecutionSettings(optimization_level=1, compiler="inductor"))


def prompt(engine: Any) -> tuple[int, bool]:
    result = execute(engine, query_lens=[9], context_lens=[0], token_ids=list(range(1, 10)), tables=[[1, 2, 3]])
    return int(result.sampled_ids[0]), result.graph.compiled


def test_pieces_that_compute_what_plain_modules_do_are_served(tmp_path: Path) -> None:
    with engine_of(save_tiny(tmp_path), compiled_settings) as engine:
        assert prompt(engine)[1]
        assert any("compiled pieces and plain modules agree" in finding for finding in engine.description.self_check.findings)


@pytest.mark.parametrize("fault", [1.0, float("nan")])
def test_pieces_that_compute_something_else_are_out_of_service_counted_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: float
) -> None:
    model = save_tiny(tmp_path)
    with engine_of(model, compiled_settings) as engine:
        expected, _ = prompt(engine)
    compile_decoder = decoder_setup.compile_decoder

    def miscompiled(*args: Any, **kwargs: Any) -> Any:
        decoder = compile_decoder(*args, **kwargs)

        def run(*inputs: torch.Tensor) -> Any:
            (hidden,) = decoder.run(*inputs)
            # Only where there are many tokens: a wrong tile of a kernel.
            return (torch.cat((hidden[:16], hidden[16:] + fault)),)

        return replace(decoder, run=run)

    monkeypatch.setattr(decoder_setup, "compile_decoder", miscompiled)
    counters = Counters()
    with engine_of(model, compiled_settings, counters) as engine:
        assert prompt(engine) == (expected, False)
        [degradation] = [entry for entry in engine.description.degradations if entry.reason == "compiled_failed_self_check"]
        assert "plain modules are served" in degradation.message
    assert counters.snapshot()['degradations_total{reason="compiled_failed_self_check"}'] == 1


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CODE_FAULTS)
def test_a_fault_of_compiled_code_takes_it_out_of_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    plant_in_code(monkeypatch, CODE_FAULTS[name])
    counters = Counters()
    with mode_world(tmp_path, mode_settings(dtype=dtype, optimization_level=1), counters=counters) as world:
        reasons = [degradation.reason for degradation in world.engine.description.degradations]
        assert reasons == ["compiled_failed_self_check"]
        batch = world.batch(PROMPTS)
        world.run(PROMPTS, world.ways(batch)["eager"])
        result = world.engine.step(batch)
        assert (result.graph.compiled, result.graph.fallback_reason) == (False, "failed_self_check")
        assert world.engine.description.execution.optimization_level == 0
        if dtype == "float32":
            assert result.sampled_ids.tolist() == world.expected_tokens(PROMPTS)
    assert counters.snapshot()['degradations_total{reason="compiled_failed_self_check"}'] == 1


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_sound_code_is_held_against_plain_modules_and_served(tmp_path: Path, dtype: str) -> None:
    with mode_world(tmp_path, mode_settings(dtype=dtype, optimization_level=1)) as world:
        assert world.engine.description.degradations == ()
        assert any("compiled pieces and plain modules agree" in found for found in world.engine.description.self_check.findings)
        assert world.engine.step(world.batch(PROMPTS)).graph.compiled
