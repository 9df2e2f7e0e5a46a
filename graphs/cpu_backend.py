"""Graphs on the CPU: lists of kernels, recorded once and run again in one call."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from modelworker.graphs.backend import Tensors, span_bytes


class Recorded(Protocol):
    """A recorded list of kernels, bound to the memory of the tensors that it was recorded with."""

    def replay(self) -> None:
        """Hot path: runs the list."""
        ...

    def close(self) -> None:
        """Frees the list."""
        ...


class Recorder(Protocol):
    """Records the kernels that a callable runs. What it allocates meanwhile comes from a pool that the recorder owns."""

    def record(self, run: Callable[[], None]) -> Recorded:
        """Runs a callable and records it.

        Raises:
            Exception: what the callable raised, or why it can't be recorded.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Size of the pool."""
        ...

    def close(self) -> None:
        """Frees the pool. Every recorded list has been closed."""
        ...


class CpuReplay:
    """A recorded list as a replay.

    Attributes:
        recorded: the list.
    """

    def __init__(self, recorded: Recorded, recorder: Recorder) -> None:
        self.recorded = recorded
        # Its pool is where the list reads and writes.
        self._recorder = recorder
        self._run = recorded.replay

    def __call__(self) -> None:
        """Hot path: runs the list."""
        self._run()

    @contextmanager
    def replaced(self, run: Callable[[], None]) -> Iterator[None]:
        """Has something else called in the place of the list, for measurements."""
        self._run = run
        try:
            yield
        finally:
            self._run = self.recorded.replay

    def close(self) -> None:
        """Frees the list."""
        self.recorded.close()


class CpuGraphBackend:
    """Captures on the CPU.

    A launch there costs a call from Python and a fork and join of threads. A recorded list pays for both once.

    Args:
        recorder: of the kernels that the model runs; owned by the backend from now on.

    Attributes:
        runs_what_it_captures: yes: kernels run as they are recorded.
    """

    runs_what_it_captures: ClassVar[bool] = True

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @contextmanager
    def session(self) -> Iterator[None]:
        """Opens the period of capture, for which nothing has to be prepared on the CPU."""
        yield

    def capture(self, run: Callable[[], Tensors]) -> tuple[CpuReplay, Tensors]:
        """Records what a callable runs."""
        outputs: Tensors = ()

        def run_and_keep() -> None:
            nonlocal outputs
            outputs = run()

        return CpuReplay(self._recorder.record(run_and_keep), self._recorder), outputs

    def borrowed(self, tensor: Tensor) -> Tensor:
        """Returns a tensor in the same memory that doesn't own it."""
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        memory = (ctypes.c_byte * span_bytes(tensor)).from_address(tensor.data_ptr())
        return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())

    @property
    def num_bytes(self) -> int:
        """Size of the recorder's pool."""
        return self._recorder.num_bytes

    def close(self) -> None:
        """Frees the recorder's pool."""
        self._recorder.close()
