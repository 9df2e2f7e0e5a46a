"""The C++ kernels that this machine would use, compiled once and kept in the build folder."""

from pathlib import Path

from modelworker.ops.cpu.isa import cpu_flags, usable_levels
from modelworker.ops.cpu.library import CpuLibrary, load_library
from modelworker.ops.op_settings import OpSettings

CACHE_FOLDER = Path(__file__).resolve().parents[3] / "build"


def own_kernels() -> CpuLibrary:
    """Loads the kernels of the best ISA level of this machine."""
    return load_library(usable_levels(cpu_flags())[0], CACHE_FOLDER / "cpu-kernels")


def kernel_ops() -> OpSettings:
    """The settings of ops that run these kernels."""
    return OpSettings(kernels=own_kernels())
