"""Recorded lists of C++ kernels, which run in one parallel region."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

from modelworker.ops.cpu.library import CpuLibrary


class KernelList:
    """A list of the library's kernels.

    They are bound to the memory of the tensors that they were recorded with: whoever records keeps these tensors.
    """

    def __init__(self, library: CpuLibrary) -> None:
        self._functions = library.functions
        self._functions.modelworker_list_new.restype = ctypes.c_void_p
        self._functions.modelworker_list_size.restype = ctypes.c_int64
        self._list = ctypes.c_void_p(self._functions.modelworker_list_new())

    def __len__(self) -> int:
        return int(self._functions.modelworker_list_size(self._list))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Appends the kernels that this thread runs meanwhile."""
        self._functions.modelworker_record_begin(self._list)
        try:
            yield
        finally:
            self._functions.modelworker_record_end()

    def replay(self) -> None:
        """Runs the list in one parallel region."""
        self._functions.modelworker_list_replay(self._list)

    def close(self) -> None:
        """Frees the list."""
        self._functions.modelworker_list_free(self._list)
