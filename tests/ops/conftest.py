"""The C++ kernels, compiled once for every ISA level that this machine has, what records them, and registries to add to."""

from collections.abc import Iterator

import pytest

from modelworker.ops.cpu.isa import IsaLevel, cpu_flags, usable_levels
from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.cpu.memory_pool import MemoryPool
from modelworker.ops.cpu.recorder import Recorder
from modelworker_testing.kernels import kernels_of
from modelworker_testing.registries import restored_registries

_LEVELS = usable_levels(cpu_flags())
# Each level takes a minute to compile and test: the one that this machine would use always, the others in `make test-full`.
_PARAMETERS = [pytest.param(level, id=level.name, marks=() if level == _LEVELS[0] else pytest.mark.slow) for level in _LEVELS]


@pytest.fixture(autouse=True)
def _same_registries() -> Iterator[None]:
    with restored_registries():
        yield


@pytest.fixture(scope="session", params=_PARAMETERS)
def cpu_library(request: pytest.FixtureRequest) -> CpuLibrary:
    """The kernels; a test that takes them runs once for every level."""
    level: IsaLevel = request.param
    return kernels_of(level)


@pytest.fixture
def memory_pool(cpu_library: CpuLibrary) -> Iterator[MemoryPool]:
    """A pool for recorded lists."""
    pool = MemoryPool(cpu_library)
    yield pool
    pool.close()


@pytest.fixture
def recorder(cpu_library: CpuLibrary) -> Iterator[Recorder]:
    """A recorder with a pool of its own."""
    recorder = Recorder(cpu_library)
    yield recorder
    recorder.close()
