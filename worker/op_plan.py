"""What is decided about ops before a model is built, and what is said of them afterwards."""

import torch
from torch import nn

from modelworker.ops.catalog import UNFUSED_OPS
from modelworker.ops.op_settings import OpSettings, OpSettingsError, Platform, choose_custom_ops
from modelworker.ops.plugins import PluginError, load_plugins
from modelworker.ops.replaceable import warn_of_unused_replacements
from modelworker.ops.report import report_ops, switchable_ops
from modelworker.ops.triton_library import TritonError, TritonLibrary, load_triton
from modelworker.worker.cpu_kernels import CpuKernels
from modelworker.worker.description import Degradation, OpDescription
from modelworker.worker.errors import SettingsError, SetupError
from modelworker.worker.settings import OpsSettings


def plan_ops(
    settings: OpsSettings,
    device: torch.device,
    kernels: CpuKernels,
    *,
    compiles: bool,
    backend: str = "inductor",
    captures: bool = False,
) -> OpSettings:
    """Loads the plug-ins, and resolves --custom-ops.

    Args:
        settings: what was asked for.
        device: where the model runs.
        kernels: of the CPU.
        compiles: whether the model is compiled.
        backend: of the compiler.
        captures: whether there are graphs, which on a CPU are recorded lists of kernels.

    Raises:
        SetupError: a plug-in can't be loaded.
        SettingsError: --custom-ops contradicts itself or names an op that there is not.
    """
    try:
        load_plugins()
    except PluginError as error:
        raise SetupError(str(error)) from error
    platform: Platform = "cuda" if device.type == "cuda" else "cpu"
    try:
        custom_ops = choose_custom_ops(
            settings.custom_ops,
            known=switchable_ops(),
            opaque=UNFUSED_OPS,
            platform=platform,
            compiles=compiles,
            backend=backend,
        )
    except OpSettingsError as error:
        raise SettingsError(f"--custom-ops: {error}") from error
    triton, no_triton_reason = _load_triton(device)
    return OpSettings(
        platform=platform,
        custom_ops=custom_ops,
        compiles=compiles,
        backend=backend,
        records=captures and platform == "cpu" and kernels.library is not None,
        kernels=kernels.library,
        no_kernels_reason=kernels.missing,
        triton=triton,
        no_triton_reason=no_triton_reason,
    )


def missing_kernels(ops: OpSettings) -> tuple[Degradation, ...]:
    """Says what it means that there are no Triton kernels on a GPU; of C++ kernels `load_cpu_kernels` says it."""
    if ops.platform != "cuda" or ops.triton is not None:
        return ()
    message = f"{ops.no_triton_reason}: plain PyTorch ops run instead, several times slower, and without FULL graphs"
    return (Degradation(reason="no_triton_kernels", message=message),)


def _load_triton(device: torch.device) -> tuple[TritonLibrary | None, str]:
    """Returns the Triton kernels where the model runs on a GPU, or None and why there are none."""
    if device.type != "cuda":
        return None, f"the model runs on {device.type}"
    try:
        return load_triton(), ""
    except TritonError as error:
        return None, str(error)


def describe_ops(model: nn.Module) -> tuple[OpDescription, ...]:
    """Says which ops a model runs, and warns of plug-ins that replace something it does not use."""
    warn_of_unused_replacements()
    return tuple(
        OpDescription(
            name=report.name, implementation=report.implementation, reason=report.reason, alternatives=report.alternatives
        )
        for report in report_ops(model)
    )
