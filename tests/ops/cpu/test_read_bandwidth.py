"""The C function that measures how fast memory is read."""

import ctypes
import mmap
import resource

import pytest

from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.cpu.threads import torch_threads


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_page_is_read_within_the_seconds_that_it_says(cpu_library: CpuLibrary, num_threads: int) -> None:
    num_pages = 5000
    pages = mmap.mmap(-1, num_pages * mmap.PAGESIZE)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    with torch_threads(num_threads):
        before = page_faults()
        seconds = cpu_library.functions.modelworker_read_seconds(address, len(pages))
        # A page of new memory faults when it is first read, and never otherwise.
        assert page_faults() - before >= num_pages
        again = cpu_library.functions.modelworker_read_seconds(address, len(pages))
    assert 0 < again < 10
    assert 0 < seconds < 10
