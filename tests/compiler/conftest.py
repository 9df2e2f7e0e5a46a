"""The C++ kernels, with which a compiled piece holds no generated kernels and compiles in a second."""

from pathlib import Path

import pytest

from modelworker.ops.cpu.isa import cpu_flags, usable_levels
from modelworker.ops.cpu.library import CpuLibrary, load_library

_CACHE = Path(__file__).resolve().parents[2] / "build" / "cpu-kernels"


@pytest.fixture(scope="session")
def kernels() -> CpuLibrary:
    """The kernels that this machine would use."""
    return load_library(usable_levels(cpu_flags())[0], _CACHE)
