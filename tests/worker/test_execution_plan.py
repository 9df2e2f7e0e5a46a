"""What is compiled and captured, from what was asked for."""

from typing import Any

import pytest

from modelworker.graphs.settings import GraphMode
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
    ],
)
def test_a_level_fills_only_what_is_unset(settings: dict[str, Any], expected: tuple[int, str]) -> None:
    assert plan(**settings) == expected


@pytest.mark.parametrize("mode", [mode.value for mode in GraphMode if mode is not GraphMode.NONE])
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
