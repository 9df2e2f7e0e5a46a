"""Whole steps that CUDA could not capture are refused before it is tried, and PIECEWISE graphs serve them."""

import pytest
import torch

from modelworker.graphs.backend import UnknownKeyError
from modelworker.graphs.cpu_backend import CpuGraphBackend
from modelworker.graphs.dispatch import Dispatcher, Reason
from modelworker.graphs.graph_set import GraphSet
from modelworker.graphs.settings import CaptureMode, GraphSettings, RuntimeMode
from modelworker.graphs.shapes import StepShape
from modelworker.ops.op_settings import OpSettings, Platform
from modelworker.worker.models.registry import build_model
from modelworker.worker.uncapturable import Uncapturable, UncapturableError, full_obstacle
from modelworker_testing.aten_recorder import AtenRecorder
from modelworker_testing.bare_engine import model_config_of
from modelworker_testing.checkpoints import TINY
from modelworker_testing.graph_world import GraphWorld

OBSTACLE = "native code reads a step's values on the host: paged_attention, store_kv"


@pytest.mark.parametrize(("platform", "obstacle"), [("cpu", ""), ("cuda", OBSTACLE)])
@pytest.mark.parametrize("custom_ops", ["all", "none"])
def test_native_ops_that_read_values_on_the_host_are_an_obstacle_on_cuda(
    platform: Platform, obstacle: str, custom_ops: str
) -> None:
    ops = OpSettings(platform=platform, custom_ops=(custom_ops,))
    model = build_model(model_config_of(TINY), dtype=torch.float32, ops=ops)
    assert full_obstacle(model, torch.device(platform)) == obstacle


def test_the_mode_is_not_captured_with_the_obstacle_as_reason_and_the_other_mode_is() -> None:
    world = GraphWorld(max_sequences=4, max_tokens=16)
    dispatcher = Dispatcher(GraphSettings(max_sequences=4, max_tokens_per_step=16, mode=CaptureMode.FULL_AND_PIECEWISE))
    program = Uncapturable(world.forward, OBSTACLE)
    graphs = GraphSet(backend=CpuGraphBackend(AtenRecorder()), programs={**world.programs(), RuntimeMode.FULL: program})
    with torch.inference_mode():
        report = graphs.capture(dispatcher, inputs_for=world.inputs_for)
    (failure,) = report.failures
    assert isinstance(failure.error, UncapturableError)
    assert str(failure) == f"FULL 4 tokens 4 sequences of 1: UncapturableError: {OBSTACLE}"
    assert {key.mode for key in report.captured} == {RuntimeMode.PIECEWISE}
    choice = dispatcher.choose(StepShape(2, 2, 1, True))
    assert (choice.mode, choice.reason) == (RuntimeMode.PIECEWISE, Reason.NOT_CAPTURED)
    with pytest.raises(UnknownKeyError, match="FULL 4 tokens"):
        program.replay(failure.key, ())
    graphs.close()
