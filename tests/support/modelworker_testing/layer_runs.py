"""Runs the classes that layers run, on the arguments of the ops that they stand for."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from torch import Tensor

from modelworker.ops.attention import PagedAttention
from modelworker.ops.cpu.packing import WeightArena
from modelworker.ops.custom_op import CustomOp
from modelworker.ops.embedding import Embedding
from modelworker.ops.linear import Linear, LinearArgmax, LinearFloat32
from modelworker.ops.norm import RMSNorm
from modelworker.ops.op_settings import OpSettings
from modelworker.ops.op_spec import OpSpec
from modelworker.ops.registry import OPS
from modelworker.ops.rotary import ApplyRotaryEmbedding
from modelworker.ops.rotary_store_kv import RotaryStoreKv

Ran = tuple[CustomOp, Any]


def run_embedding(ops: OpSettings, weight: Tensor, ids: Tensor) -> Ran:
    layer = Embedding(*weight.shape, product=None, ops=ops)
    return layer, layer(weight, ids)


def run_linear(ops: OpSettings, x: Tensor, weight: Tensor, bias: Tensor | None) -> Ran:
    layer = Linear(weight.shape[0], ops=ops)
    return layer, layer(x, layer.pack(weight, WeightArena()), bias)


def run_linear_float32(ops: OpSettings, x: Tensor, weight: Tensor) -> Ran:
    layer = LinearFloat32(weight.shape[0], ops=ops)
    return layer, layer(x, layer.pack(weight, WeightArena()))


def run_linear_argmax(ops: OpSettings, x: Tensor, weight: Tensor) -> Ran:
    layer = LinearArgmax(LinearFloat32(weight.shape[0], ops=ops), ops=ops)
    return layer, layer(x, layer.pack(weight, WeightArena()))


def norm_with(weight: Tensor, eps: float, ops: OpSettings) -> RMSNorm:
    layer = RMSNorm(weight.numel(), eps=eps, dtype=weight.dtype, ops=ops)
    layer.weight.copy_(weight)
    return layer


def run_rms_norm(ops: OpSettings, x: Tensor, weight: Tensor, eps: float) -> Ran:
    layer = norm_with(weight, eps, ops)
    return layer, layer(x)


def run_fused_add_rms_norm(ops: OpSettings, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Ran:
    layer = norm_with(weight, eps, ops)
    return layer, layer.add(x, residual)


def run_rotary_embedding(ops: OpSettings, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> Ran:
    layer = ApplyRotaryEmbedding(interleaved=interleaved, ops=ops)
    return layer, layer(query, key, positions, cos_sin)


def run_rotary_store_kv(
    ops: OpSettings,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    *cache: Tensor,
) -> Ran:
    layer = RotaryStoreKv(head_dim=query.shape[-1], eps=eps, interleaved=interleaved, ops=ops)
    norms = None if query_norm is None or key_norm is None else (norm_with(query_norm, eps, ops), norm_with(key_norm, eps, ops))
    rotated, order = layer(query, key, value, norms, positions, cos_sin, *cache)
    query.copy_(rotated)
    return layer, order


def run_paged_attention(ops: OpSettings, query: Tensor, key_cache: Tensor, *others: Any) -> Ran:
    *tensors, scale, window, soft_cap = others
    group = query.shape[1] // key_cache.shape[1]
    layer = PagedAttention(
        scale=scale, window=window, soft_cap=soft_cap, head_dim=query.shape[2], queries_per_kv_head=group, ops=ops
    )
    return layer, layer(query, key_cache, *tensors)


# By the op's name: runs the layer on the op's arguments. An op that is not here is run by a class of its name, made of the settings
# alone, which takes the op's arguments.
RUNS: Mapping[str, Callable[..., Ran]] = {
    "embedding": run_embedding,
    "linear": run_linear,
    "linear_float32": run_linear_float32,
    "linear_argmax": run_linear_argmax,
    "rms_norm": run_rms_norm,
    "fused_add_rms_norm": run_fused_add_rms_norm,
    "rotary_embedding": run_rotary_embedding,
    "rotary_store_kv": run_rotary_store_kv,
    "paged_attention": run_paged_attention,
}
# What a layer leaves as it was, although the op writes to it: native norms put keys into other memory, on their way to the cache.
UNUSED = {"rotary_store_kv": {"key"}}


def run_layer(spec: OpSpec, ops: OpSettings, arguments: Mapping[str, Any]) -> Ran:
    if spec.name in RUNS:
        return RUNS[spec.name](ops, *arguments.values())
    if spec.name not in OPS.entries:
        line = f'@CustomOp.register("{spec.name}")'
        pytest.fail(
            f"no layer runs {spec.name}: add `{line}` to a class in {spec.native.__module__}, or an entry to RUNS", pytrace=False
        )
    layer = OPS.entries[spec.name](ops=ops)
    return layer, layer(*arguments.values())
