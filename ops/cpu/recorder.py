"""Recording of what a step really runs: the library's kernels as lists, any other op as a call that is made again.

Ops are seen where torch dispatches them, so the model's own code decides what is recorded. Code that computes without torch's
dispatcher, such as a compiled piece, isn't seen: what is recorded must be plain modules.
"""

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from modelworker.ops.cpu.bound_call import BoundCall, returned_tensors, shapes_of
from modelworker.ops.cpu.kernel_list import KernelList, RecordedCall, TimedRun
from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.cpu.memory_pool import MemoryPool
from modelworker.ops.cpu.op_kind import DEPENDS_ON_VALUES, OpKind, reads_a_mask

T = TypeVar("T")

# They read a tensor's values without an op.
_READS: Final = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})
# torch has no type of its own for this error of its allocator.
_OUT_OF_MEMORY: Final = "DefaultCPUAllocator: "
_TORCH_FOLDER: Final = str(Path(torch.__file__).parent)


class UnrecordableError(Exception):
    """A step does something that a replay can't do again. Its text names the op and the line of Python that called it."""


class RecordedStep(Generic[T]):
    """A recorded step, which runs again on the same memory with whatever its inputs hold by then.

    Whoever records keeps the inputs. What the step returned is kept here; what else it allocated, the pool's other steps overwrite.

    Attributes:
        outputs: what the recorded callable returned. A replay writes new values into the same tensors.
    """

    def __init__(self, outputs: T, segments: list[KernelList | BoundCall], kept: list[Tensor]) -> None:
        self.outputs = outputs
        self._segments = segments
        self._kept = kept

    @property
    def num_kernels(self) -> int:
        """Of the library."""
        return sum(len(segment) for segment in self._segments if isinstance(segment, KernelList))

    def replay(self) -> None:
        """Hot path: runs the step again."""
        for segment in self._segments:
            segment.replay()

    def replay_timed(self) -> list[TimedRun]:
        """Runs the step again, kernel by kernel, which takes longer than `replay`, and returns when each ran."""
        return [segment.replay_timed() for segment in self._segments]

    def close(self) -> None:
        """Lets go of the lists and of all tensors but the outputs, which are the caller's."""
        for segment in self._segments:
            segment.close()
        self._kept.clear()


class Recorder:
    """Records steps whose intermediate results share a pool. The largest should be recorded first: the others fit into its memory.

    Args:
        library: the kernels that are recorded as such.
    """

    def __init__(self, library: CpuLibrary) -> None:
        self._pool = MemoryPool(library)
        self._kinds: dict[OpOverload, OpKind] = {}

    @property
    def num_bytes(self) -> int:
        """Size of the pool."""
        return self._pool.num_bytes

    def close(self) -> None:
        """Frees the pool, as soon as no step and no output uses it."""
        self._pool.close()

    def record(self, run: Callable[[], T]) -> RecordedStep[T]:
        """Runs a step once, in inference mode, and records what it runs on this thread.

        Raises:
            UnrecordableError: the step depends on a tensor's values, computes on another device, or returns a tensor that no
                recorded op made.
            MemoryError: the system has no memory for what the step allocates.
        """
        mode = _Recording(self._pool, self._kinds)
        try:
            with torch.inference_mode(), mode.kernels, _ValueGuard(mode), mode:
                mode.resume()
                outputs = run()
            mode.check_returned(outputs)
        except BaseException as error:
            mode.abandon()
            if isinstance(error, RuntimeError) and _OUT_OF_MEMORY in str(error):
                raise MemoryError(str(error)) from error
            raise
        return RecordedStep(outputs, mode.finish(), list(mode.kept.values()))


class _Recording(TorchDispatchMode):
    """Sorts the ops of a step as torch dispatches them.

    Args:
        pool: where the results go.
        kinds: of the ops that were met before; grows.

    Attributes:
        kernels: of this thread are recorded while this is entered.
        kept: the tensors outside of the pool that kernels use, by their storages.
        is_inside: whether an op is being run.
    """

    def __init__(self, pool: MemoryPool, kinds: dict[OpOverload, OpKind]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = ExitStack()
        self.kept: dict[int, Tensor] = {}
        self.is_inside = False
        self._pool = pool
        self._library = pool.library
        self._kinds = kinds
        # By their storages: outside of the pool, what other ops read or write.
        self._seen: dict[int, Tensor] = {}
        self._list = KernelList(pool)
        self._segments: list[KernelList | BoundCall] = [self._list]

    def resume(self) -> None:
        """Appends kernels to the last list."""
        self.kernels.enter_context(self._list.recording())

    def finish(self) -> list[KernelList | BoundCall]:
        """Returns the recorded lists and calls, in order."""
        return [segment for segment in self._segments if isinstance(segment, BoundCall) or len(segment) > 0]

    def check_returned(self, outputs: object) -> None:
        """Refuses a tensor whose values a replay would leave as they are now: one that was made meanwhile, by no op that was seen.

        What is made in inference mode is an inference tensor. One that was made earlier and that no op reads or writes can't be
        told from it, and is refused, too.
        """
        for tensor in [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]:
            is_known = self._pool.holds(tensor) or _storage_of(tensor) in self.kept.keys() | self._seen.keys()
            if tensor.numel() > 0 and tensor.is_inference() and not is_known:
                raise UnrecordableError(
                    f"the step returns a tensor {list(tensor.shape)} that no recorded op made: a replay would not compute it again"
                    " (what runs without torch's dispatcher, such as a compiled piece, can't be recorded)"
                )

    def abandon(self) -> None:
        """Frees everything."""
        for segment in self._segments:
            segment.close()
        self.kept.clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tells torch not to wrap `__torch_dispatch__`: the wrapper loads Dynamo, seconds of a start that compiles nothing.

        It keeps Dynamo from compiling what a mode does. Nothing is compiled while a step is recorded.
        """
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an op, and records it."""
        kwargs = kwargs or {}
        kind = self._kinds.get(func)
        if kind is None:
            kind = self._kinds[func] = OpKind.of(func, self._library.level.namespace)
        if kind.is_made_of_others:
            with self:
                return func.decompose(*args, **kwargs)
        self.is_inside = True
        try:
            return self._run_kernel(func, args, kwargs) if kind.is_kernel else self._run_other(func, kind, args, kwargs)
        finally:
            self.is_inside = False

    def _run_kernel(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tensor in _tensors_of(args, kwargs):
            if not self._pool.holds(tensor):
                self.kept[_storage_of(tensor)] = tensor
        num_before = len(self._list)
        result = op(*args, **kwargs)
        self._list.calls.append(RecordedCall(op._schema.name, shapes_of(args), len(self._list) - num_before))
        return result

    def _run_other(self, op: OpOverload, kind: OpKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kind.obstacle or reads_a_mask(op, args):
            raise _unrecordable(f"{op} {kind.obstacle or DEPENDS_ON_VALUES}")
        tensors = _tensors_of(args, kwargs)
        result = op(*args, **kwargs) if kind.runs_nothing else self._run_paused(op, kind, args, kwargs, tensors)
        returned = returned_tensors(result)
        for tensor in returned:
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                raise _unrecordable(f"{op} returns a {tensor.layout} tensor on {tensor.device}")
        storages = {_storage_of(tensor) for tensor in tensors}
        new = [tensor for tensor in returned if _storage_of(tensor) not in storages]
        is_written = op._schema.is_mutable and not kind.only_changes_view
        if not new and not is_written:
            return result
        pool_empty = self._library.ops.pool_empty
        pooled = {id(tensor): pool_empty(tensor.shape, tensor.stride(), tensor.dtype) for tensor in new}
        if not kind.is_allocation:
            for tensor in new:
                pooled[id(tensor)].copy_(tensor)
            self._seen.update((_storage_of(tensor), tensor) for tensor in tensors if not self._pool.holds(tensor))
            self._bind(op, args, kwargs, [pooled.get(id(tensor)) for tensor in returned])
        return tree_map_only(Tensor, lambda tensor: pooled.get(id(tensor), tensor), result)

    def _run_paused(
        self, op: OpOverload, kind: OpKind, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
    ) -> Any:
        before = [_memory_of(tensor) for tensor in tensors]
        with self._paused():
            result = op(*args, **kwargs)
        if not kind.only_changes_view and before != [_memory_of(tensor) for tensor in tensors]:
            raise _unrecordable(f"{op} gives an argument other memory")
        return result

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Records no kernels: what an op runs is done again by the op."""
        self.kernels.close()
        try:
            yield
        finally:
            self.resume()

    def _bind(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor | None]) -> None:
        """Ends the list, keeps a call behind it, and begins another list."""
        aliases: dict[int, Tensor] = {}

        def alias(tensor: Tensor) -> Tensor:
            # One alias for each tensor: an op may ask whether two arguments are the same one.
            if id(tensor) not in aliases:
                aliases[id(tensor)] = self._alias(op, tensor)
            return aliases[id(tensor)]

        bound_args, bound_kwargs, bound_outputs = tree_map_only(Tensor, alias, (args, kwargs, outputs))
        self.kernels.close()
        self._list = KernelList(self._pool)
        self._segments += [BoundCall(op, bound_args, bound_kwargs, bound_outputs), self._list]
        self.resume()

    def _alias(self, op: OpOverload, tensor: Tensor) -> Tensor:
        """Returns a tensor for a call to keep, which doesn't keep memory of the pool from being used again behind the call."""
        if not self._pool.holds(tensor):
            return tensor
        if tensor.is_conj() or tensor.is_neg():
            raise _unrecordable(f"{op} takes a tensor whose elements are computed when they are read")
        result: Tensor = self._library.ops.pool_alias(tensor)
        return result


class _ValueGuard(TorchFunctionMode):
    """Refuses what reads a tensor's values without an op, but inside of ops."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _READS and not self._recording.is_inside:
            raise _unrecordable(f"Tensor.{func.__name__} depends on a tensor's values")
        return func(*args, **(kwargs or {}))


def _tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors among an op's arguments, lists of tensors included."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _storage_of(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _memory_of(tensor: Tensor) -> tuple[int, torch.Size, tuple[int, ...]]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _unrecordable(reason: str) -> UnrecordableError:
    frame = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(_TORCH_FOLDER)):
        frame = frame.f_back
    path, line = frame.f_code.co_filename, frame.f_lineno
    return UnrecordableError(f"{path}:{line}: {linecache.getline(path, line).strip()}: {reason}")
