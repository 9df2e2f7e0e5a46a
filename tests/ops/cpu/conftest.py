"""The C++ kernels, compiled once for every ISA level that this machine has."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from modelworker.ops.cpu.isa import IsaLevel, cpu_flags, usable_levels
from modelworker.ops.cpu.library import CpuLibrary, load_library
from modelworker.ops.cpu.memory_pool import MemoryPool

_CACHE = Path(__file__).resolve().parents[3] / "build" / "cpu-kernels"
_LEVELS = usable_levels(cpu_flags())
# Each level takes a minute to compile and test: the one that this machine would use always, the others in `make test-full`.
_PARAMETERS = [pytest.param(level, id=level.name, marks=() if level == _LEVELS[0] else pytest.mark.slow) for level in _LEVELS]


@pytest.fixture(scope="session", params=_PARAMETERS)
def cpu_library(request: pytest.FixtureRequest) -> CpuLibrary:
    """The kernels; a test that takes them runs once for every level."""
    level: IsaLevel = request.param
    return load_library(level, _CACHE)


@pytest.fixture
def memory_pool(cpu_library: CpuLibrary) -> Iterator[MemoryPool]:
    """A pool for recorded lists."""
    pool = MemoryPool(cpu_library)
    yield pool
    pool.close()
