"""Recorded lists of C++ kernels, which run in one call."""

import ctypes
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from modelworker.ops.cpu.memory_pool import MemoryPool


class RecordedCall(NamedTuple):
    """A call of an op, as it was recorded.

    Attributes:
        name: of the op, e.g. `modelworker_avx2::linear`.
        shapes: of its arguments, in order; empty for what is no tensor.
        num_kernels: that it ran.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    num_kernels: int


class TimedCall(NamedTuple):
    """When a recorded call ran again: `time.monotonic_ns()`."""

    call: RecordedCall
    begin_ns: int
    end_ns: int


class TimedRun(NamedTuple):
    """When the kernels of recorded calls ran again.

    Attributes:
        calls: in order.
        times_ns: `time.monotonic_ns()` of the beginning, and of the end of each kernel.
    """

    calls: Sequence[RecordedCall]
    times_ns: Sequence[int]

    def timed_calls(self) -> Iterator[TimedCall]:
        """Yields the calls, in order."""
        kernel = 0
        for call in self.calls:
            yield TimedCall(call, self.times_ns[kernel], self.times_ns[kernel + call.num_kernels])
            kernel += call.num_kernels


class KernelList:
    """A list of a library's kernels.

    They are bound to the memory of the tensors that they were recorded with: whoever records keeps the inputs. What ops allocate
    meanwhile lies in the pool, whose other lists overwrite it unless a tensor still holds it.

    Args:
        pool: where the kernels' results go. Lists of one pool never run at the same time.

    Attributes:
        calls: of ops, whose kernels are in the list, in order.

    Raises:
        MemoryError: the system has no memory for a list.
    """

    def __init__(self, pool: MemoryPool) -> None:
        self.calls: list[RecordedCall] = []
        self._functions = pool.library.functions
        handle = self._functions.modelworker_list_new(pool.handle)
        if handle is None:
            raise MemoryError("the system has no memory for a list of kernels")
        self._list = ctypes.c_void_p(handle)
        self._free = weakref.finalize(self, self._functions.modelworker_list_free, self._list)

    def __len__(self) -> int:
        return int(self._functions.modelworker_list_size(self._open_list()))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Appends the kernels that this thread runs meanwhile. They do run, too; where memory runs out, with a MemoryError.

        Raises:
            RuntimeError: this thread records another list.
        """
        if not self._functions.modelworker_record_begin(self._open_list()):
            raise RuntimeError("this thread records another list")
        try:
            yield
        finally:
            self._functions.modelworker_record_end()

    def replay(self) -> None:
        """Hot path: runs the list."""
        self._functions.modelworker_list_replay(self._open_list())

    def replay_timed(self) -> TimedRun:
        """Runs the list kernel by kernel, which takes longer than `replay`, and returns when each ran."""
        times = (ctypes.c_int64 * (len(self) + 1))()
        self._functions.modelworker_list_replay_timed(self._open_list(), times)
        return TimedRun(self.calls, list(times))

    def close(self) -> None:
        """Frees the list."""
        self._free()

    def _open_list(self) -> ctypes.c_void_p:
        if not self._free.alive:
            raise RuntimeError("the list is closed")
        return self._list
