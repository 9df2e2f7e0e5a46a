"""Reference and samples of rotary_store_kv: those of the norm, the rotation and the cache update, one behind the other."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from modelworker.ops.kv_cache_spec import store_kv_reference, store_kv_sample
from modelworker.ops.norm_spec import rms_norm_reference
from modelworker.ops.op_spec import RETURNED, SampleShape, padded, random
from modelworker.ops.rotary_spec import rotary_embedding_reference, rotary_embedding_sample, rotary_variant

_EPS = 1e-5


def rotary_store_kv_variant(*, block_size: int, head_dim: int, norms: bool, **rotary: Any) -> Mapping[str, Any]:
    """Names a variant of the samples: of the rotation, the cache's block size, and whether heads are normalized."""
    return {**rotary_variant(head_dim=head_dim, **rotary), "block_size": block_size, "norms": norms}


def rotary_store_kv_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
) -> Mapping[str, Tensor]:
    """Normalizes, rotates, stores."""
    if query_norm is not None:
        query = rms_norm_reference(query, query_norm, eps)[RETURNED]
    if key_norm is not None:
        key = rms_norm_reference(key, key_norm, eps)[RETURNED]
    rotated = rotary_embedding_reference(query, key, positions, cos_sin, interleaved)
    return {**rotated, **store_kv_reference(rotated["key"], value, key_cache, value_cache, slots)}


def rotary_store_kv_sample(shape: SampleShape) -> tuple[Any, ...]:
    """Makes query, key and value, neighbours in one tensor as a merged projection leaves them, and what the parts are given."""
    num_heads, num_kv_heads, head_dim = (shape.variant[name] for name in ("num_heads", "num_kv_heads", "head_dim"))
    _, _, positions, cos_sin, interleaved = rotary_embedding_sample(shape)
    _, _, key_cache, value_cache, slots = store_kv_sample(shape)
    merged = padded(random(shape, shape.num_tokens, num_heads + 2 * num_kv_heads, head_dim, seed=1), shape.padding)
    query, key, value = merged.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    norms = [random(shape, head_dim, seed=seed) if shape.variant["norms"] else None for seed in (4, 5)]
    return query, key, value, *norms, _EPS, positions, cos_sin, interleaved, key_cache, value_cache, slots
