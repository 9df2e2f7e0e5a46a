"""The C++ kernels, compiled once for every ISA level that this machine has."""

from pathlib import Path

import pytest

from modelworker.ops.cpu.isa import IsaLevel, cpu_flags, usable_levels
from modelworker.ops.cpu.library import CpuLibrary, load_library

_CACHE = Path(__file__).resolve().parents[3] / "build" / "cpu-kernels"


@pytest.fixture(scope="session", params=usable_levels(cpu_flags()), ids=lambda level: level.name)
def cpu_library(request: pytest.FixtureRequest) -> CpuLibrary:
    """The kernels; a test that takes them runs once for every level."""
    level: IsaLevel = request.param
    return load_library(level, _CACHE)
