"""The recorder that is served, with a pool whose content can be made useless."""

import ctypes
from collections.abc import Callable
from typing import TypeVar

import torch

from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.cpu.recorder import RecordedStep, Recorder

T = TypeVar("T")

_HUGE_PAGE = 2**21


class PoisonableRecorder(Recorder):
    """Remembers an address in its pool, from which it finds all of it."""

    def __init__(self, library: CpuLibrary) -> None:
        super().__init__(library)
        self._pool_empty = library.ops.pool_empty
        self._address = 0

    def record(self, run: Callable[[], T]) -> RecordedStep[T]:
        """Records, see `Recorder.record`."""

        def remembering() -> T:
            self._address = self._pool_empty([1], [1], torch.uint8).data_ptr()
            return run()

        return super().record(remembering)

    def poison(self) -> None:
        """Fills the whole pool with 0xff, NaN or -1: no replay needs what was there before it."""
        library, handle = self._pool.library, self._pool.handle
        start = self._address // _HUGE_PAGE * _HUGE_PAGE
        while library.functions.modelworker_pool_holds(handle, start - 1):
            start -= _HUGE_PAGE
        ctypes.memset(start, 0xFF, self.num_bytes)
