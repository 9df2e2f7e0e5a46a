"""The memory of recorded lists."""

import ctypes
import weakref

from torch import Tensor

from modelworker.ops.cpu.library import CpuLibrary


class MemoryPool:
    """Memory that recorded lists share, which never run at the same time; memory_pool.h describes it.

    It is on huge pages where the system gives them, and goes back to the system when the pool and its lists are closed and its last
    tensor is gone.

    Args:
        library: the library whose lists use it.

    Raises:
        MemoryError: the system doesn't give the addresses.
    """

    def __init__(self, library: CpuLibrary) -> None:
        self.library = library
        handle = library.functions.modelworker_pool_new()
        if handle is None:
            raise MemoryError("the system reserves no addresses for a memory pool")
        self._handle = ctypes.c_void_p(handle)
        self._holds = library.functions.modelworker_pool_holds
        self._free = weakref.finalize(self, library.functions.modelworker_pool_free, self._handle)

    @property
    def handle(self) -> ctypes.c_void_p:
        """What the library's C functions take.

        Raises:
            RuntimeError: the pool is closed.
        """
        if not self._free.alive:
            raise RuntimeError("the memory pool is closed")
        return self._handle

    @property
    def num_bytes(self) -> int:
        """How much the pool has taken from the system so far."""
        return int(self.library.functions.modelworker_pool_num_bytes(self.handle))

    def holds(self, tensor: Tensor) -> bool:
        """Returns whether a tensor's elements lie in the pool."""
        return bool(self._holds(self.handle, tensor.data_ptr()))

    def close(self) -> None:
        """Gives the memory back, as soon as no list and no tensor uses it."""
        self._free()
