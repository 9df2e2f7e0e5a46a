"""Compiling the native form of an op that is hidden from the compiler of the model."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from modelworker.ops.op_settings import OpSettings

DynamicDims = Mapping[str, int | Sequence[int]]


def maybe_compile(function: Callable[..., Any], settings: OpSettings, dynamic_arg_dims: DynamicDims | None) -> Callable[..., Any]:
    """Compiles a native forward, unless compilation is off or its backend generates no code.

    It is for an op inside of an opaque op. It can't fuse across ops: where the model's compiler can see the op, leave it to that.

    Args:
        function: a native forward.
        settings: of the ops.
        dynamic_arg_dims: the dimensions, by the argument's name, that change from call to call; negative ones count from the end.
            None: whatever changes.

    Raises:
        TypeError: an argument is named that the function doesn't have.
    """
    if not settings.compiles or settings.backend == "eager":
        return function
    # Inductor's own partition would split what is meant to be one piece.
    options: dict[str, Any] | None = {"graph_partition": False} if settings.backend == "inductor" else None
    if dynamic_arg_dims is None:
        return torch.compile(function, dynamic=True, backend=settings.backend, options=options)
    signature = inspect.signature(function)
    if unknown := sorted(set(dynamic_arg_dims) - set(signature.parameters)):
        raise TypeError(f"dynamic_arg_dims: {', '.join(unknown)}: expected arguments among {', '.join(signature.parameters)}")
    compiled = torch.compile(function, dynamic=False, backend=settings.backend, options=options)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name, dims in dynamic_arg_dims.items():
            argument = bound.arguments[name]
            if isinstance(argument, Tensor):
                for dim in [dims] if isinstance(dims, int) else dims:
                    # Unlike a dynamic dimension, an unbacked one does not get code of its own for the sizes 0 and 1.
                    # By way of torch, which loads Dynamo when it is needed: that takes more than a second.
                    torch._dynamo.decorators.mark_unbacked(argument, dim % argument.ndim)
        return compiled(*args, **kwargs)

    return call
