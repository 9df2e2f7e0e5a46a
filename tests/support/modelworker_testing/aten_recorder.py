"""A recorder of aten calls: what a graph on the CPU is, in the simplest form that is right.

Every call is noted with its arguments and done again at a replay, into the memory that its result had at the recording. That memory
comes from an arena which takes it back as soon as nothing refers to it, so that whoever lets go of a tensor too early is found out.
"""

import ctypes
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_ALIGNMENT = 64


class UnrecordableError(RuntimeError):
    """The value of a tensor would have to be known when the list is made."""


class Arena:
    """Memory in chunks, each of which is used again once no tensor lies in it any more."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._blocks: list[Tensor] = []
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._starts: set[int] = set()

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Allocates a tensor of the same shape, strides and type, filled with 0xff: NaN, or -1."""
        elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        size = max(-(-elements * tensor.element_size() // _ALIGNMENT), 1) * _ALIGNMENT
        if not self._free[size]:
            self._blocks.append(torch.empty(size, dtype=torch.uint8))
            self._free[size].append(self._blocks[-1].data_ptr())
            self._starts.add(self._blocks[-1].data_ptr())
            self.num_bytes += size
        address = self._free[size].pop()
        ctypes.memset(address, 0xFF, size)
        chunk = (ctypes.c_byte * size).from_address(address)
        weakref.finalize(chunk, self._free[size].append, address).atexit = False
        return torch.frombuffer(chunk, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def poison(self) -> None:
        """Fills everything with 0xff: no replay needs what was there before it."""
        for block in self._blocks:
            block.fill_(0xFF)

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in one of the chunks."""
        return tensor.untyped_storage().data_ptr() in self._starts

    def without_owning(self, tensor: Tensor) -> Tensor:
        """Returns a tensor in the same memory that doesn't keep its chunk; one that lies elsewhere is kept as it is."""
        if not self.owns(tensor):
            return tensor
        storage = tensor.untyped_storage()
        memory = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
        return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@dataclass(frozen=True)
class _Call:
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: list[Tensor | None]

    def run(self) -> None:
        for kept, result in zip(self.results, tree_leaves(self.function(*self.args, **self.kwargs)), strict=True):
            if kept is not None:
                kept.copy_(result)


class AtenRecording:
    """A list of calls."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.is_closed = False

    def replay(self) -> None:
        """Does the calls again."""
        assert not self.is_closed
        with torch.inference_mode():
            for call in self.calls:
                call.run()

    def close(self) -> None:
        """Forgets the calls."""
        self.calls.clear()
        self.is_closed = True


class AtenRecorder:
    """Records the aten calls of a callable."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.recordings: list[AtenRecording] = []
        self.is_closed = False

    def record(self, run: Callable[[], None]) -> AtenRecording:
        """Runs a callable and records it."""
        recording = AtenRecording()
        with torch.inference_mode(), _Mode(self.arena, recording.calls):
            run()
        self.recordings.append(recording)
        return recording

    @property
    def num_bytes(self) -> int:
        """Size of the arena."""
        return self.arena.num_bytes

    def close(self) -> None:
        """Forgets everything."""
        assert all(recording.is_closed for recording in self.recordings)
        self.is_closed = True


class _Mode(TorchDispatchMode):
    def __init__(self, arena: Arena, calls: list[_Call]) -> None:
        super().__init__()
        self._arena = arena
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not all(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            raise UnrecordableError(f"{func} returns no tensor")
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        kept: list[Tensor | None] = []

        def keep(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() in known:
                kept.append(None)
                return tensor
            mine = self._arena.empty_like(tensor).copy_(tensor)
            kept.append(self._arena.without_owning(mine))
            return mine

        result = tree_map_only(Tensor, keep, result)
        if any(tensor is not None for tensor in kept) or func._schema.is_mutable:
            without_owning = functools.partial(tree_map_only, Tensor, self._arena.without_owning)
            self._calls.append(_Call(func, without_owning(args), without_owning(kwargs), kept))
        return result
