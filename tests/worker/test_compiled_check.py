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
from modelworker_testing.engines import engine_of, execute, tiny_settings


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
