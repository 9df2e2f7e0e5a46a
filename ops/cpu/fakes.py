"""What a compiler is told of the C++ ops that models call: the shapes, dtypes and strides of their results.

An op whose arguments are those of the registered op of its name has that one's fake. Those that take a packed weight have their own
here. Sizes may be symbolic, so nothing here branches on one.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor


def register_fakes(namespace: str) -> None:
    """Registers the fakes of a loaded library's ops, for as long as the process lives: its ops live as long."""
    for qualified in torch._C._dispatch_get_all_op_names():
        of, _, name = qualified.partition("::")
        # A compiler never sees the ops that record.
        if of == namespace and not name.startswith("pool_"):
            torch.library.register_fake(qualified, OWN_FAKES.get(name) or _fake_of_registered(name))


def _fake_of_registered(name: str) -> Callable[..., Any]:
    """Returns a fake that asks the registered op; whoever calls the C++ op has imported that one's module."""

    def fake(*args: Any) -> Any:
        return getattr(torch.ops.modelworker, name).default(*args)

    return fake


def _linear_pack(weight: Tensor, packed: Tensor) -> None:
    pass


def _linear_unpack(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    return packed.new_empty(out_features, in_features)


def _packed_embedding(ids: Tensor, packed: Tensor, out_features: int, in_features: int) -> Tensor:
    return packed.new_empty(ids.shape[0], in_features)


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _linear_float32(x: Tensor, packed: Tensor, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features, dtype=torch.float32)


def _linear_argmax(x: Tensor, packed: Tensor, out_features: int) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = math.prod(x.shape[:-1])
    return (
        x.new_empty(num_rows, dtype=torch.int64),
        x.new_empty(num_rows, dtype=torch.float32),
        x.new_empty(num_rows, dtype=torch.bool),
    )


OWN_FAKES: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "linear_pack": _linear_pack,
        "linear_unpack": _linear_unpack,
        "packed_embedding": _packed_embedding,
        "linear": _linear,
        "linear_float32": _linear_float32,
        "linear_argmax": _linear_argmax,
    }
)
"""Of the ops whose arguments are others than the registered op's, or that have none."""
