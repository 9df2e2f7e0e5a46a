"""The C++ kernels of this machine's ISA levels, compiled once and kept in the build folder."""

from pathlib import Path

from modelworker.ops.cpu.isa import IsaLevel, cpu_flags, usable_levels
from modelworker.ops.cpu.library import CpuLibrary, load_library
from modelworker.ops.op_settings import OpSettings

CACHE_FOLDER = Path(__file__).resolve().parents[3] / "build"


def kernels_of(level: IsaLevel) -> CpuLibrary:
    """Loads the kernels of an ISA level."""
    return load_library(level, CACHE_FOLDER / "cpu-kernels")


def own_kernels() -> CpuLibrary:
    """Loads the kernels of the best ISA level of this machine."""
    return kernels_of(usable_levels(cpu_flags())[0])


def kernel_ops() -> OpSettings:
    """The settings of ops that run these kernels."""
    return OpSettings(kernels=own_kernels())
