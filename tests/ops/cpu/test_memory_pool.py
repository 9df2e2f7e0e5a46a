"""Memory of recorded lists: given out without overlap, used again, and alive as long as anything lies in it."""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from modelworker.ops.cpu.kernel_list import KernelList
from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.cpu.memory_pool import MemoryPool
from modelworker_testing.kernels import CACHE_FOLDER

MIB = 1 << 20


@pytest.fixture
def recorded_pool(memory_pool: MemoryPool) -> Iterator[MemoryPool]:
    """A pool whose list is being recorded."""
    kernels = KernelList(memory_pool)
    with kernels.recording():
        yield memory_pool
    kernels.close()


def take(pool: MemoryPool, num_bytes: int) -> Tensor:
    result = pool.library.ops.pool_empty([num_bytes], [1], torch.uint8)
    assert isinstance(result, Tensor)
    return result


@hypothesis.settings(max_examples=40, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(sizes=st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 5)), min_size=1, max_size=30))
def test_living_tensors_never_overlap_and_lie_on_64_byte_boundaries(
    recorded_pool: MemoryPool, sizes: list[tuple[int, int]]
) -> None:
    living: dict[int, Tensor] = {}
    for step, (size, name) in enumerate(sizes):
        living.pop(name, None)
        living[name] = take(recorded_pool, size).fill_(step % 251)
        living[name + 10] = torch.tensor(step % 251)
        for other in [key for key in living if key < 10]:
            assert living[other].eq(living[other + 10]).all()
            assert living[other].data_ptr() % 64 == 0


def test_memory_of_dead_tensors_is_used_again_and_neighbours_merge(recorded_pool: MemoryPool) -> None:
    parts = [take(recorded_pool, MIB) for _ in range(6)]
    first = parts[0].data_ptr()
    assert recorded_pool.num_bytes == 6 * MIB
    # From the middle outwards: each merges with a free neighbour in front of it, behind it, or both.
    for index in (2, 3, 1, 5, 4, 0):
        parts[index] = torch.empty(0)
    whole = take(recorded_pool, 6 * MIB)
    assert whole.data_ptr() == first
    assert recorded_pool.num_bytes == 6 * MIB


def test_a_request_takes_the_smallest_chunk_that_holds_it(recorded_pool: MemoryPool) -> None:
    large, _wall, small, _other_wall = (take(recorded_pool, size) for size in (3000, 64, 1000, 64))
    addresses = large.data_ptr(), small.data_ptr()
    del large, small
    assert (take(recorded_pool, 900).data_ptr(), take(recorded_pool, 2900).data_ptr()) == (addresses[1], addresses[0])


def test_what_lies_free_at_the_end_is_extended_rather_than_left(recorded_pool: MemoryPool) -> None:
    del (part := [take(recorded_pool, 2 * MIB)])[0]
    assert not part
    take(recorded_pool, 3 * MIB)
    assert recorded_pool.num_bytes == 4 * MIB


def test_a_tensor_without_elements_takes_no_memory(recorded_pool: MemoryPool) -> None:
    empty = recorded_pool.library.ops.pool_empty([3, 0], [1, 1], torch.float32)
    assert empty.shape == (3, 0)
    assert recorded_pool.num_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_tensors_have_the_strides_that_were_asked_for(recorded_pool: MemoryPool, dtype: torch.dtype) -> None:
    tensor = recorded_pool.library.ops.pool_empty([3, 4], [1, 5], dtype)
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((3, 4), (1, 5), dtype)
    behind = take(recorded_pool, 64)
    assert behind.data_ptr() >= tensor.data_ptr() + (2 + 3 * 5 + 1) * dtype.itemsize
    assert recorded_pool.holds(tensor)
    assert not recorded_pool.holds(torch.empty(3))


def test_an_alias_does_not_keep_its_memory_from_being_used_again(recorded_pool: MemoryPool) -> None:
    tensor = recorded_pool.library.ops.pool_empty([4, 6], [6, 1], torch.float32)
    tensor.copy_(torch.arange(24).view(4, 6))
    alias = recorded_pool.library.ops.pool_alias(tensor.t()[1:3])
    assert torch.equal(alias, tensor.t()[1:3])
    assert alias.stride() == (1, 6)
    del tensor
    again = recorded_pool.library.ops.pool_empty([4, 6], [6, 1], torch.float32).zero_()
    assert alias.eq(0).all()
    assert recorded_pool.holds(again)


def test_only_a_list_that_is_recorded_gives_memory(cpu_library: CpuLibrary, memory_pool: MemoryPool) -> None:
    with pytest.raises(RuntimeError, match="this thread records no list"):
        take(memory_pool, 1)
    with KernelList(memory_pool).recording(), pytest.raises(RuntimeError, match="expected a tensor in the memory of the list"):
        cpu_library.ops.pool_alias(torch.empty(1))


def test_more_than_the_machine_has_is_refused_and_leaves_the_pool_as_it_was(recorded_pool: MemoryPool) -> None:
    with pytest.raises(MemoryError, match="the system gives a memory pool of 0 bytes no further 1125899906842624"):
        take(recorded_pool, 1 << 50)
    rows = torch.zeros(16).expand(1 << 45, 16)
    with pytest.raises(MemoryError, match="the system gives a memory pool of 0 bytes no further 1125899906842624"):
        recorded_pool.library.ops.silu_and_mul(rows)
    assert take(recorded_pool, 10).fill_(1).sum() == 10


def test_tensors_outlive_their_pool_and_die_on_any_thread(cpu_library: CpuLibrary) -> None:
    pool = MemoryPool(cpu_library)
    kernels = KernelList(pool)
    with kernels.recording():
        tensors = [take(pool, MIB).fill_(7)]
    pool.close()
    kernels.close()
    with pytest.raises(RuntimeError, match="the memory pool is closed"):
        _ = pool.num_bytes
    with pytest.raises(RuntimeError, match="the list is closed"):
        kernels.replay()
    del pool, kernels
    gc.collect()
    assert tensors[0].eq(7).all()
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    assert not tensors


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:  # noqa: PTH123
        return int(statm.read().split()[1]) * 4096


def test_a_pool_that_nothing_uses_any_more_goes_back_to_the_system(cpu_library: CpuLibrary) -> None:
    before = resident_bytes()
    for _ in range(4):
        pool = MemoryPool(cpu_library)
        with KernelList(pool).recording():
            tensor = take(pool, 64 * MIB).fill_(1)
        assert resident_bytes() - before > 48 * MIB
        del tensor
        pool.close()
    assert resident_bytes() - before < 48 * MIB


# How much of the limit Python itself needs differs between machines, so it is not a part of every run.
@pytest.mark.slow
def test_where_the_system_has_no_more_memory_recording_fails_with_a_memory_error_and_other_steps_are_recorded(
    cpu_library: CpuLibrary,
) -> None:
    code = f"""
import resource
from pathlib import Path
import torch
from modelworker.ops.cpu.isa import IsaLevel
from modelworker.ops.cpu.library import load_library
from modelworker.ops.cpu.memory_pool import MemoryPool
from modelworker.ops.cpu.recorder import Recorder

library = load_library({cpu_library.level!r}, Path({str(CACHE_FOLDER / "cpu-kernels")!r}))
small = torch.ones(2, 16)
library.ops.silu_and_mul(small)
with open("/proc/self/statm") as statm:
    taken = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (256 << 20), resource.RLIM_INFINITY))
recorder = Recorder(library)
wide = torch.ones(32).expand(8 << 20, 32)  # the result takes 512 MiB
messages = []
for step in (lambda: library.ops.silu_and_mul(wide), lambda: wide.clone()):
    try:
        recorder.record(step)
    except MemoryError as error:
        messages.append(str(error))
assert "the system gives a memory pool of 0 bytes no further 536870912" in messages[0], messages
assert "DefaultCPUAllocator" in messages[1], messages
recorded = recorder.record(lambda: library.ops.silu_and_mul(small))
with torch.inference_mode():
    recorded.outputs.zero_()
recorded.replay()
assert recorded.outputs.gt(0.7).all()
pools = []
try:
    while len(pools) < 1000:
        pools.append(MemoryPool(library))
except MemoryError as error:
    assert str(error) == "the system reserves no addresses for a memory pool", error
else:
    raise AssertionError("a limit of addresses that does not limit")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
