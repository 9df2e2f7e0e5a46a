"""What every graph backend does, and the check that a graph reads the memory that it is given."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

Tensors = Sequence[Tensor]


class UnknownKeyError(LookupError):
    """There is no graph of this key."""


class StaleInputError(RuntimeError):
    """A graph was given a tensor that lies elsewhere, or is laid out differently, than the one it was captured with."""


class Replay(Protocol):
    """Captured work."""

    def __call__(self) -> None:
        """Hot path: does the work again, with what the captured addresses hold now."""
        ...

    def close(self) -> None:
        """Frees what the capture took. The replay can't be called any more."""
        ...


class GraphBackend(Protocol):
    """Captures work on one kind of device. All captures share one pool of memory, so no two of them ever run at the same time."""

    @property
    def runs_what_it_captures(self) -> bool:
        """Whether a capture does the work as well, so that a run before it would do the same twice.

        Elsewhere the work must have run before: what libraries set up in their first call can't be captured.
        """
        ...

    def session(self) -> AbstractContextManager[None]:
        """Opens the one period in which work is warmed up and captured."""
        ...

    def capture(self, run: Callable[[], Tensors]) -> tuple[Replay, Tensors]:
        """Captures what a callable does on the device.

        The memory that it allocates is the pool's. It returns to the pool with the last reference to it, for later captures to use;
        this replay goes on writing there.

        Args:
            run: reads and writes only memory that outlives the replay, and what it allocates itself. Can be called again.

        Returns:
            the replay, and what `run` returned.

        Raises:
            Exception: what `run` raised, or why its work can't be captured. Nothing of the capture is left.
        """
        ...

    def borrowed(self, tensor: Tensor) -> Tensor:
        """Returns a tensor in the same memory that doesn't keep it from returning to the pool."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory that all captures together take."""
        ...

    def close(self) -> None:
        """Frees the pool. Every replay has been closed."""
        ...


class StaticInputs:
    """The inputs that a graph was captured with. They are kept: their memory stays theirs as long as the graph lives."""

    def __init__(self, name: str, inputs: Sequence[Tensor], positions: Sequence[int]) -> None:
        """Keeps inputs.

        Args:
            name: of the graph, for the error.
            inputs: all inputs of the graph.
            positions: those that it reads at the addresses of the capture.
        """
        self._name = name
        self._num_inputs = len(inputs)
        self._kept = tuple((position, inputs[position], inputs[position].data_ptr()) for position in positions)

    def check(self, inputs: Sequence[Tensor]) -> None:
        """Hot path: checks that each input lies where the graph reads it.

        Raises:
            StaleInputError: one does not.
        """
        if len(inputs) != self._num_inputs:
            raise StaleInputError(f"{self._name}: captured with {self._num_inputs} inputs, and given {len(inputs)}")
        for position, kept, address in self._kept:
            given = inputs[position]
            if given.data_ptr() != address or (
                given is not kept and (given.shape != kept.shape or given.stride() != kept.stride() or given.dtype != kept.dtype)
            ):
                raise StaleInputError(
                    f"{self._name}: input {position} is {_describe(given)}, but was captured as {_describe(kept)} at {address:#x}"
                )


def span_bytes(tensor: Tensor) -> int:
    """Returns how many bytes lie between a tensor's address and the end of its last element."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} at {tensor.data_ptr():#x}"
