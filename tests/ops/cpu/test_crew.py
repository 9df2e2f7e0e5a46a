"""The threads that run kernels: every share once, in order, whoever is there to compute it."""

import os
import threading

import pytest
import torch
from torch import Tensor

from modelworker.ops.cpu.kernel_list import KernelList
from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.cpu.memory_pool import MemoryPool
from modelworker.ops.cpu.packing import WeightArena, pack_weight
from modelworker.ops.cpu.threads import torch_threads

LENGTH = 40
SIZE = 96


def chain(library: CpuLibrary, x: Tensor, weight: Tensor) -> Tensor:
    """Products each of which needs all of the one before: a share is some of the columns, and reads whole rows."""
    for _ in range(LENGTH):
        x = library.ops.linear(x, weight, None, SIZE)
    return x


def tensors(library: CpuLibrary, seed: int) -> tuple[Tensor, Tensor]:
    """Makes rows, and a packed weight that about keeps their size."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(SIZE, SIZE, generator=generator) * SIZE**-0.5
    return torch.randn(5, SIZE, generator=generator), pack_weight(library, weight, WeightArena())


def expected(library: CpuLibrary, seed: int) -> Tensor:
    with torch_threads(1):
        return chain(library, *tensors(library, seed))


@pytest.mark.parametrize("num_threads", [2, 3, 7])
def test_a_chain_of_ops_is_the_same_with_any_number_of_threads_every_time(cpu_library: CpuLibrary, num_threads: int) -> None:
    wanted = expected(cpu_library, 0)
    with torch_threads(num_threads):
        for _ in range(15):
            assert torch.equal(chain(cpu_library, *tensors(cpu_library, 0)), wanted)


@pytest.mark.parametrize("num_threads", [2, 7])
def test_a_recorded_list_runs_its_kernels_in_order_every_time(cpu_library: CpuLibrary, num_threads: int) -> None:
    wanted = expected(cpu_library, 1)
    x, weight = tensors(cpu_library, 1)
    fresh = x.clone()
    recorded = KernelList(MemoryPool(cpu_library))
    with torch_threads(num_threads):
        with recorded.recording():
            result = chain(cpu_library, x, weight)
        assert len(recorded) == LENGTH
        for _ in range(60):
            x.copy_(fresh)
            result.zero_()
            recorded.replay()
            assert torch.equal(result, wanted)
    recorded.close()


def test_threads_that_compute_at_the_same_time_do_not_disturb_each_other(cpu_library: CpuLibrary) -> None:
    wanted = [expected(cpu_library, seed) for seed in range(3)]
    wrong: list[int] = []

    def work(seed: int) -> None:
        torch.set_num_threads(2)
        for _ in range(40):
            if not torch.equal(chain(cpu_library, *tensors(cpu_library, seed)), wanted[seed]):
                wrong.append(seed)

    with torch_threads(2):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_a_forked_process_computes_without_the_threads_that_it_did_not_inherit(cpu_library: CpuLibrary) -> None:
    wanted = expected(cpu_library, 2)
    with torch_threads(2):
        assert torch.equal(chain(cpu_library, *tensors(cpu_library, 2)), wanted)
        child = os.fork()
        if child == 0:
            # Only ops of the library: torch's own threads do not survive a fork.
            os._exit(0 if torch.equal(chain(cpu_library, *tensors(cpu_library, 2)), wanted) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
