"""Which ops a worker on a GPU runs: planned here without one."""

import sys

import pytest
import torch

from modelworker.ops.catalog import UNFUSED_OPS
from modelworker.ops.op_settings import OpSettings
from modelworker.worker.cpu_kernels import CpuKernels
from modelworker.worker.models.registry import build_model
from modelworker.worker.op_plan import describe_ops, missing_kernels, plan_ops
from modelworker.worker.settings import OpsSettings
from modelworker.worker.uncapturable import full_obstacle
from modelworker_testing.bare_engine import model_config_of
from modelworker_testing.checkpoints import TINY

CUDA = torch.device("cuda", 0)


def plan(*custom_ops: str, compiles: bool = True) -> OpSettings:
    return plan_ops(OpsSettings(custom_ops=custom_ops), CUDA, CpuKernels(missing="the model runs on cuda"), compiles=compiles)


def running(ops: OpSettings) -> dict[str, tuple[str, str]]:
    """What `modelworker info --ops` shows: implementation and reason, by name."""
    model = build_model(model_config_of(TINY), dtype=torch.float32, ops=ops)
    return {op.name: (op.implementation, op.reason) for op in describe_ops(model) if op.implementation}


def test_under_inductor_ops_that_it_does_not_look_into_run_their_kernels_and_others_are_fused() -> None:
    ops = plan()
    assert missing_kernels(ops) == ()
    found = running(ops)
    assert found["paged_attention"] == ("triton", "custom_ops has +paged_attention")
    assert found["rotary_store_kv"] == ("triton", "custom_ops has +rotary_store_kv")
    assert found["sample_tokens"] == ("triton", "custom_ops has +sample_tokens")
    assert found["rms_norm"] == found["silu_and_mul"] == ("native", "custom_ops is none")


def test_without_a_compiler_every_op_with_a_kernel_runs_it() -> None:
    found = running(plan(compiles=False))
    assert {name for name, (implementation, _) in found.items() if implementation == "triton"} == {
        *("embedding", "paged_attention", "rms_norm", "rotary_store_kv", "sample_tokens", "silu_and_mul")
    }
    assert found["linear"] == ("native", "custom_ops is all, but there is no triton implementation")


@pytest.mark.parametrize("name", [*UNFUSED_OPS, "rms_norm"])
def test_each_kernel_is_switched_off_by_its_name(name: str) -> None:
    found = running(plan("all", f"-{name}"))
    if name == "store_kv":
        assert found["rotary_store_kv"][0] == "triton"
    else:
        assert found[name] == ("native", f"custom_ops has -{name}")


def test_whole_steps_can_be_captured_with_the_kernels_and_not_without() -> None:
    config = model_config_of(TINY)

    def obstacle(*custom_ops: str) -> str:
        return full_obstacle(build_model(config, dtype=torch.float32, ops=plan(*custom_ops)), CUDA)

    assert obstacle() == ""
    assert obstacle("-rotary_store_kv") == ""
    assert obstacle("-paged_attention") == "native code reads a step's values on the host: paged_attention"
    assert obstacle("none") == "native code reads a step's values on the host: paged_attention, store_kv"


def test_a_machine_without_triton_runs_native_ops_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelworker.ops.kernels.forms", None)
    ops = plan()
    (degradation,) = missing_kernels(ops)
    assert degradation.reason == "no_triton_kernels"
    assert degradation.message.startswith("Triton can't be loaded: ")
    assert running(ops)["paged_attention"] == ("native", f"custom_ops has +paged_attention, but {ops.no_triton_reason}")


def test_on_a_cpu_triton_is_not_loaded() -> None:
    ops = plan_ops(OpsSettings(), torch.device("cpu"), CpuKernels(), compiles=False)
    assert (ops.triton, ops.no_triton_reason) == (None, "the model runs on cpu")
    assert "sample_tokens" not in running(ops)
    assert missing_kernels(ops) == ()
