"""What is compiled and captured, from what was asked for."""

import re
from typing import Any

import pytest

from modelworker.compiler.settings import PASS_NAMES
from modelworker.graphs.settings import CaptureMode
from modelworker.graphs.sizes import full_sizes, mixed_sizes
from modelworker.worker.errors import SettingsError
from modelworker.worker.execution_plan import plan_execution
from modelworker.worker.settings import ExecutionSettings, StepSettings


def plan(**settings: Any) -> tuple[int, str]:
    made = plan_execution(ExecutionSettings(**settings), StepSettings(max_sequences=8, max_tokens_per_step=64))
    return made.optimization_level, made.graphs.mode.value


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (2, "FULL_AND_PIECEWISE")),
        ({"optimization_level": 0}, (0, "NONE")),
        ({"optimization_level": 1}, (1, "NONE")),
        ({"optimization_level": 3}, (3, "FULL_AND_PIECEWISE")),
        ({"enforce_eager": True}, (0, "NONE")),
        ({"enforce_eager": True, "optimization_level": 3}, (0, "NONE")),
        ({"enforce_eager": True, "graph_mode": "NONE"}, (0, "NONE")),
        ({"optimization_level": 0, "graph_mode": "FULL"}, (0, "FULL")),
        ({"optimization_level": 0, "graph_mode": "FULL_DECODE_ONLY"}, (0, "FULL_DECODE_ONLY")),
        ({"optimization_level": 1, "graph_mode": "PIECEWISE"}, (1, "PIECEWISE")),
        ({"graph_mode": "NONE"}, (2, "NONE")),
        ({"graph_partition": "inductor"}, (2, "FULL_DECODE_ONLY")),
        ({"graph_partition": "inductor", "optimization_level": 1}, (1, "NONE")),
        ({"graph_partition": "inductor", "graph_mode": "FULL"}, (2, "FULL")),
    ],
)
def test_a_level_fills_only_what_is_unset(settings: dict[str, Any], expected: tuple[int, str]) -> None:
    assert plan(**settings) == expected


@pytest.mark.parametrize("mode", [mode.value for mode in CaptureMode if mode is not CaptureMode.NONE])
def test_eager_mode_and_graphs_contradict_each_other(mode: str) -> None:
    with pytest.raises(SettingsError, match=f"--enforce-eager captures nothing, but --graph-mode {mode} asks for graphs"):
        plan(enforce_eager=True, graph_mode=mode)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_pieces_can_not_be_captured_where_nothing_is_compiled(mode: str) -> None:
    with pytest.raises(SettingsError, match=f"--graph-mode {mode} needs compiled pieces, but optimization level 0"):
        plan(optimization_level=0, graph_mode=mode)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"decode_query_lens": (65,)}, "65"),
        ({"decode_query_lens": (2, 2)}, "2"),
        ({"mixed_graph_sizes": (128,)}, "128"),
        ({"decode_graph_sizes": (9,)}, "9"),
        ({"graph_mode": "FULL_DECODE_ONLY", "mixed_graph_sizes": (8,)}, "FULL_DECODE_ONLY"),
    ],
)
def test_sizes_that_no_step_can_have_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        plan(**settings)


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_what_the_compiler_divides_has_no_pieces_to_capture(mode: str) -> None:
    with pytest.raises(SettingsError, match=f"--graph-mode {mode} .* --graph-partition inductor .* take FULL_DECODE_ONLY"):
        plan(graph_partition="inductor", graph_mode=mode)


@pytest.mark.parametrize("given", [{"graph_partition": "inductor"}, {"compiler_passes": ("none",)}])
@pytest.mark.parametrize(
    ("nothing", "named"),
    [
        ({"optimization_level": 0}, "optimization level 0"),
        ({"enforce_eager": True}, "optimization level 0"),
        ({"compiler": "eager"}, "--compiler eager"),
    ],
)
def test_settings_of_the_compiler_are_refused_where_nothing_is_compiled(
    given: dict[str, Any], nothing: dict[str, Any], named: str
) -> None:
    flag = "--" + next(iter(given)).replace("_", "-")
    with pytest.raises(SettingsError, match=f"{flag}.* is about compiling, but {named} compiles nothing"):
        plan(**given, **nothing)


@pytest.mark.parametrize(
    ("switches", "disabled"),
    [
        ((), ()),
        (("-convert_before_cat", "-no_op_elimination"), ("no_op_elimination", "convert_before_cat")),
        (("none",), PASS_NAMES),
    ],
)
def test_passes_are_switched_off_by_name(switches: tuple[str, ...], disabled: tuple[str, ...]) -> None:
    made = plan_execution(ExecutionSettings(compiler_passes=switches), StepSettings())
    assert made.disabled_passes == disabled


@pytest.mark.parametrize("switch", ["-nothing", "read_past_scatter", "+read_past_scatter", "all", "-"])
def test_what_is_no_pass_to_switch_off_is_refused_with_those_that_are(switch: str) -> None:
    with pytest.raises(SettingsError, match=f"--compiler-passes: '{re.escape(switch)}' .* none, or some of -no_op_elimination, "):
        plan(compiler_passes=(switch,))


def test_level_3_captures_every_size_up_to_64_and_level_2_a_ladder() -> None:
    step = StepSettings(max_sequences=72, max_tokens_per_step=1024)
    exact = plan_execution(ExecutionSettings(optimization_level=3), step).graphs
    assert full_sizes(exact, 1) == (*range(1, 65), 72)
    assert mixed_sizes(exact)[:65] == (*range(1, 65), 72)
    assert full_sizes(plan_execution(ExecutionSettings(), step).graphs, 1) == (1, 2, 4, *range(8, 73, 8))
    given = plan_execution(ExecutionSettings(optimization_level=3, decode_graph_sizes=(5,)), step).graphs
    assert full_sizes(given, 1) == (5,)
