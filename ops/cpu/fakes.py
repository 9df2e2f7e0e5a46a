"""What a compiler is told of the C++ ops that models call: the shapes, dtypes and strides of their results.

Sizes may be symbolic, so nothing here branches on one.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register_fakes(namespace: str) -> None:
    """Registers the fakes of a loaded library's ops, for as long as the process lives: its ops live as long."""
    fakes: dict[str, Callable[..., Any]] = {
        "linear_pack": _nothing,
        "linear_unpack": _linear_unpack,
        "packed_embedding": _packed_embedding,
        "linear": _linear,
        "linear_float32": _linear_float32,
        "linear_argmax": _linear_argmax,
        "rms_norm": _rms_norm,
        "fused_add_rms_norm": _nothing,
        "silu_and_mul": _silu_and_mul,
        "embedding": _embedding,
        "rotary_embedding": _nothing,
        "store_kv": _order,
        "rotary_store_kv": _rotary_store_kv,
        "paged_attention": _nothing,
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"{namespace}::{name}", fake)


def _nothing(*_args: object) -> None:
    """Of an op that only writes to its arguments."""


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


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _silu_and_mul(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _embedding(weight: Tensor, ids: Tensor) -> Tensor:
    return weight.new_empty(ids.shape[0], weight.shape[1])


def _order(key: Tensor, *_args: object) -> Tensor:
    return key.new_empty(0)


def _rotary_store_kv(query: Tensor, key: Tensor, *_args: object) -> Tensor:
    return key.new_empty(0)
