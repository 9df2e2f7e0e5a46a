"""Graphs are checked before readiness: whatever is wrong with them alone, they are not served, and what serves instead is right."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelworker.graphs.settings import RuntimeMode
from modelworker.graphs.shapes import GraphKey
from modelworker.worker import decoder_setup
from modelworker.worker.counters import Counters
from modelworker.worker.graph_check import ModeCheck
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.result import GraphMode
from modelworker.worker.settings import ExecutionSettings, KvCacheSettings, ModelSettings
from modelworker.worker.step_buffers import RunDecoder, StepBuffers, StepInputs
from modelworker.worker.step_runner import StepRunner
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.code_faults import CODE_FAULTS, plant_in_code_of_graphs
from modelworker_testing.engines import engine_of, tiny_settings_with
from modelworker_testing.graph_faults import (
    FULL_FAULTS,
    PIECEWISE_FAULTS,
    plant_in_full_graphs,
    plant_in_piecewise_graphs,
    swapped_gate_and_up,
)
from modelworker_testing.mode_world import ModeWorld, Row, mode_settings, mode_world

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

DECODES = [Row(2, 7, 1), Row(9, 13, 1), Row(4, 2, 1)]
PROMPTS = [Row(2, 0, 7), Row(9, 13, 1), Row(4, 4, 3)]


def assert_not_served(world: ModeWorld, counters: Counters, mode: RuntimeMode) -> None:
    description = world.engine.description
    failed = [entry for entry in description.degradations if entry.reason == "graphs_failed_self_check"]
    assert len(failed) == 1
    assert f"{mode.name} graphs and plain modules do not agree" in failed[0].message
    assert "is not served" in failed[0].message
    assert counters.snapshot()['degradations_total{reason="graphs_failed_self_check"}'] == 1
    assert GraphMode[mode.name] not in {size.mode for size in description.execution.captured}
    assert mode not in {key.mode for key in world.engine.runner.captured}


def assert_full_graphs_are_not_served(folder: Path) -> None:
    counters = Counters()
    settings = mode_settings(optimization_level=0, graph_mode="FULL_DECODE_ONLY", decode_query_lens=(1,))
    with mode_world(folder, settings, counters=counters) as world:
        assert_not_served(world, counters, RuntimeMode.FULL)


def run_as_dispatched(world: ModeWorld, rows: list[Row]) -> tuple[GraphMode, str, bool]:
    """Runs a step as a router's would, checks its tokens, and returns how it ran."""
    batch = world.batch(rows)
    world.run(rows, world.ways(batch)["eager"])
    result = world.engine.step(batch)
    assert result.sampled_ids.tolist() == world.expected_tokens(rows)
    return result.graph.mode, result.graph.fallback_reason, result.graph.compiled


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", FULL_FAULTS)
def test_a_fault_of_full_graphs_takes_them_out_of_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    plant_in_full_graphs(monkeypatch, FULL_FAULTS[name])
    counters = Counters()
    settings = mode_settings(dtype=dtype, optimization_level=0, graph_mode="FULL_DECODE_ONLY", decode_query_lens=(1,))
    with mode_world(tmp_path, settings, counters=counters) as world:
        assert_not_served(world, counters, RuntimeMode.FULL)
        if dtype == "float32":
            assert run_as_dispatched(world, DECODES) == (GraphMode.NONE, "failed_self_check", False)


def test_where_full_graphs_are_wrong_piecewise_ones_serve_their_batches_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_in_full_graphs(monkeypatch, swapped_gate_and_up)
    counters = Counters()
    with mode_world(tmp_path, mode_settings(), counters=counters) as world:
        assert_not_served(world, counters, RuntimeMode.FULL)
        assert run_as_dispatched(world, DECODES) == (GraphMode.PIECEWISE, "failed_self_check", False)
        assert run_as_dispatched(world, PROMPTS) == (GraphMode.PIECEWISE, "not_decode", False)


@pytest.mark.parametrize("name", PIECEWISE_FAULTS)
def test_a_fault_of_piecewise_graphs_takes_them_out_of_service_and_leaves_full_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plant_in_piecewise_graphs(monkeypatch, PIECEWISE_FAULTS[name]())
    counters = Counters()
    with mode_world(tmp_path, mode_settings(), counters=counters) as world:
        assert_not_served(world, counters, RuntimeMode.PIECEWISE)
        assert run_as_dispatched(world, PROMPTS) == (GraphMode.NONE, "failed_self_check", True)
        assert run_as_dispatched(world, DECODES) == (GraphMode.FULL, "", False)


@pytest.mark.parametrize(
    "name", ["a wrong RoPE row", "swapped gate and up", "a zeroed residual", "padding of length 0 that isn't finite"]
)
def test_a_fault_in_the_pieces_of_piecewise_graphs_takes_them_out_of_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plant_in_code_of_graphs(monkeypatch, CODE_FAULTS[name])
    counters = Counters()
    with mode_world(tmp_path, mode_settings(), counters=counters) as world:
        assert_not_served(world, counters, RuntimeMode.PIECEWISE)
        assert run_as_dispatched(world, PROMPTS) == (GraphMode.NONE, "failed_self_check", True)


def test_padding_that_is_written_somewhere_takes_every_mode_that_pads_out_of_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of padding are what an earlier step left there, as if their tail were never cleared."""
    pad = StepBuffers._pad

    def without_slots(self: Any, real_tokens: int, num_tokens: int, *sequences: int) -> None:
        left = self._slots[real_tokens:num_tokens].copy()
        pad(self, real_tokens, num_tokens, *sequences)
        self._slots[real_tokens:num_tokens] = left

    monkeypatch.setattr(StepBuffers, "_pad", without_slots)
    with mode_world(tmp_path, mode_settings()) as world:
        reasons = [degradation.reason for degradation in world.engine.description.degradations]
        # Compiled pieces are checked over a padded step as well.
        assert reasons == ["graphs_failed_self_check", "graphs_failed_self_check", "compiled_failed_self_check"]
        assert world.engine.runner.captured == ()
        assert run_as_dispatched(world, DECODES) == (GraphMode.NONE, "failed_self_check", False)
        assert run_as_dispatched(world, PROMPTS) == (GraphMode.NONE, "failed_self_check", False)


def test_block_tables_whose_second_column_is_that_of_the_step_before_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although what the graphs are compared with is as wrong as they are: the two find other blocks there."""
    stage_tables = StepBuffers._stage_tables

    def without_second_column(self: Any, tables: Any, num_sequences: int) -> None:
        rows, width = tables.shape
        left = self._tables[:rows, 1].copy()
        stage_tables(self, tables, num_sequences)
        if width > 1:
            self._tables[:rows, 1] = left

    check_modes = decoder_setup.check_modes

    def check_with_fault(*args: Any, **kwargs: Any) -> Any:
        # Later checks would stop the start.
        with monkeypatch.context() as patch:
            patch.setattr(StepBuffers, "_stage_tables", without_second_column)
            return check_modes(*args, **kwargs)

    monkeypatch.setattr(decoder_setup, "check_modes", check_with_fault)
    assert_full_graphs_are_not_served(tmp_path)


def test_what_is_written_into_a_block_that_no_row_has_takes_the_graphs_out_of_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the null block, nor the last one."""
    stray = 5

    def with_stray_write(run: RunDecoder, _model: CausalLM, kv_cache: KvCache) -> RunDecoder:
        def writing(*inputs: Tensor) -> Sequence[Tensor]:
            kv_cache.layers[0][1][kv_cache.num_blocks - stray].mul_(0.5)
            return run(*inputs)

        return writing

    plant_in_full_graphs(monkeypatch, with_stray_write)
    assert_full_graphs_are_not_served(tmp_path)


def test_graphs_of_long_decodes_are_checked_and_those_without_room_are_said_not_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of 17 tokens has five blocks; of two blocks for a row there are none."""
    check_modes, checks = decoder_setup.check_modes, []

    def remember(*args: Any, **kwargs: Any) -> Any:
        checks.append(check_modes(*args, **kwargs))
        return checks[-1]

    monkeypatch.setattr(decoder_setup, "check_modes", remember)
    settings = tiny_settings_with(
        execution=ExecutionSettings(
            optimization_level=0, graph_mode="FULL_DECODE_ONLY", decode_query_lens=(17,), decode_graph_sizes=(17,)
        )
    )
    with engine_of(save_tiny(tmp_path), settings) as engine:
        assert [(str(check.key), check.passed) for check in checks[0].worst] == [("FULL 17 tokens 1 sequences of 17", True)]
        assert engine.description.degradations == ()
    small = dataclasses.replace(settings(tmp_path), kv_cache=KvCacheSettings(block_size=4, num_blocks=6))
    small = dataclasses.replace(small, model=ModelSettings(model=str(tmp_path), max_model_len=20))
    with engine_of(tmp_path, lambda _: small) as engine:
        assert (checks[1].worst, list(map(str, checks[1].unchecked))) == ((), ["FULL 17 tokens 1 sequences of 17"])
        assert [entry.reason for entry in engine.description.degradations if entry.reason != "memory_tight"] == [
            "graphs_not_checked"
        ]


def test_a_sound_worker_says_by_how_much_each_mode_differs(tmp_path: Path) -> None:
    counters = Counters()
    with mode_world(tmp_path, mode_settings(), counters=counters) as world:
        findings = [
            finding for finding in world.engine.description.self_check.findings if "graphs and plain modules agree" in finding
        ]
        assert {finding.split()[0] for finding in findings} == {"FULL", "PIECEWISE"}
        assert world.engine.description.degradations == ()
        assert all(size.cost_ms > 0 for size in world.engine.description.execution.captured)
        assert len(world.engine.description.execution.captured) == len(world.engine.runner.captured)


def test_the_first_replay_of_a_graph_does_not_decide_what_it_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds nothing in caches. All graphs have a second one, on the same rows, however long the first took."""
    replay = StepRunner.replay
    seen: dict[GraphKey, list[Any]] = {}

    def slow_at_first(self: StepRunner, key: GraphKey, inputs: StepInputs) -> Sequence[Tensor]:
        if key not in seen:
            time.sleep(0.5)
        seen.setdefault(key, []).append([inputs.token_ids.clone(), inputs.slots.clone()])
        return replay(self, key, inputs)

    monkeypatch.setattr(StepRunner, "replay", slow_at_first)
    with engine_of(save_tiny(tmp_path)) as engine:
        captured = engine.description.execution.captured
        assert len(captured) == len(seen) > 1
        assert all(0 < size.cost_ms < 500 for size in captured)
        for first, second, *_ in seen.values():
            torch.testing.assert_close(second, first, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("difference", "fault", "passes"),
    [(0.0, "", True), (0.1, "", True), (0.11, "", False), (float("inf"), "", False), (float("nan"), "", False), (0.0, "x", False)],
)
def test_only_a_difference_within_the_bound_passes(difference: float, fault: str, passes: bool) -> None:
    key = GraphKey(RuntimeMode.FULL, 4, 4, 1)
    check = ModeCheck(mode=RuntimeMode.FULL, key=key, difference=difference, bound=0.1, fault=fault)
    assert check.passed is passes
    assert ("do not agree" in str(check)) is not passes
    sound = dataclasses.replace(check, difference=0.05, fault="")
    assert (check.badness > sound.badness) is (difference > 0.05 or difference != difference or bool(fault))  # noqa: PLR0124  (NaN)
