"""Calls of other ops than the library's, between a recorded list and the next."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch._ops import OpOverload

from modelworker.ops.cpu.kernel_list import RecordedCall, TimedRun

_COPIES: Final = frozenset({torch.ops.aten.clone.default, torch.ops.aten._to_copy.default})


class BoundCall:
    """A call of an op that can be run again, on the same arguments and into the same memory.

    Args:
        op: what was called.
        args: its arguments, with aliases for tensors in the pool.
        kwargs: likewise.
        outputs: for each tensor that the op returns, where it goes; None if it is an argument.
    """

    def __init__(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Tensor | None]) -> None:
        self.name = str(op)
        self._recorded = RecordedCall(op._schema.name, shapes_of(args), 1)
        self._run = _call_again(op, args, kwargs, outputs)

    def replay(self) -> None:
        """Hot path: runs the op again."""
        with torch.inference_mode():
            self._run()

    def replay_timed(self) -> TimedRun:
        """Runs the op again, and returns when."""
        begin_ns = time.monotonic_ns()
        self.replay()
        return TimedRun((self._recorded,), (begin_ns, time.monotonic_ns()))

    def close(self) -> None:
        """Lets the arguments and outputs go."""
        self._run = _closed


def shapes_of(args: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of arguments, in order; empty for what is no tensor."""
    return tuple(tuple(arg.shape) if isinstance(arg, Tensor) else () for arg in args)


def returned_tensors(result: object) -> list[Tensor]:
    """Returns the tensors that an op returned, in order."""
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in returned_tensors(item)]
    return []


def _call_again(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Tensor | None]
) -> Callable[[], object]:
    if all(output is None for output in outputs):
        return partial(op, *args, **kwargs)
    if op in _COPIES and outputs[0] is not None:
        return partial(outputs[0].copy_, args[0])
    if (out_variant := _out_variant(op)) is not None:
        return partial(out_variant, *args, **kwargs, out=outputs[0])
    return partial(_run_and_copy, op, args, kwargs, outputs)


def _out_variant(op: OpOverload) -> OpOverload | None:
    """Returns the overload that takes the same arguments and writes its one result into `out`, where torch has a kernel for it."""
    expected = [(argument.name, str(argument.type)) for argument in op._schema.arguments]
    for name in op.overloadpacket.overloads():
        overload: OpOverload = getattr(op.overloadpacket, name)
        arguments = overload._schema.arguments
        if (
            len(overload._schema.returns) == 1
            and [argument.name for argument in arguments if argument.is_out] == ["out"]
            and [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out] == expected
            and torch.Tag.generated not in overload.tags
        ):
            return overload
    return None


def _run_and_copy(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Tensor | None]) -> None:
    for output, result in zip(outputs, returned_tensors(op(*args, **kwargs)), strict=True):
        if output is None:
            continue
        # A smaller result would be expanded.
        if result.shape != output.shape:
            raise RuntimeError(f"{op} returned {list(output.shape)} when it was recorded, and now {list(result.shape)}")
        output.copy_(result)


def _closed() -> None:
    raise RuntimeError("the call is closed")
