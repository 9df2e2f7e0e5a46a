"""rotary_store_kv: a program normalizes and rotates a few heads of one token; that of keys fills the cache, too.

Everything between two roundings is fp32, in registers: a head is read once and written once, keys twice.
"""

import triton
import triton.language as tl
from torch import Tensor

from modelworker.ops.kernels.arguments import check_dense, check_same_layout
from modelworker.ops.kernels.geometry import HEADS


@triton.jit
def _rotate(
    start: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    head: tl.tensor,
    head_stride: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
) -> tl.tensor:
    """Rotates heads in place and returns what it wrote: the first and second elements of the pairs, and the rest."""
    pair = tl.arange(0, PAIRS)[None, :]
    is_pair = (head < NUM_HEADS) & (pair < ROTARY_DIM // 2)
    first_at = 2 * pair if INTERLEAVED else pair
    second_at = 2 * pair + 1 if INTERLEAVED else pair + ROTARY_DIM // 2
    heads = start + head * head_stride
    first = tl.load(heads + first_at, mask=is_pair, other=0.0).to(tl.float32)
    second = tl.load(heads + second_at, mask=is_pair, other=0.0).to(tl.float32)
    rest_at = ROTARY_DIM + tl.arange(0, REST)[None, :]
    is_rest = (head < NUM_HEADS) & (rest_at < HEAD_DIM)
    rest = tl.load(heads + rest_at, mask=is_rest, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + tl.cast(eps, tl.float32))[:, None]
        first *= factor * tl.load(norm + first_at, mask=pair < ROTARY_DIM // 2, other=0.0).to(tl.float32)
        second *= factor * tl.load(norm + second_at, mask=pair < ROTARY_DIM // 2, other=0.0).to(tl.float32)
        rest *= factor * tl.load(norm + rest_at, mask=rest_at < HEAD_DIM, other=0.0).to(tl.float32)
    dtype = start.dtype.element_ty
    rotated_first = (first * cos - second * sin).to(dtype)
    rotated_second = (second * cos + first * sin).to(dtype)
    kept = rest.to(dtype)
    tl.store(heads + first_at, rotated_first, mask=is_pair)
    tl.store(heads + second_at, rotated_second, mask=is_pair)
    if HAS_NORM:
        tl.store(heads + rest_at, kept, mask=is_rest)
    return rotated_first, rotated_second, kept


# Positions and slots are slices of a buffer that a step shares with its other integers: they may start anywhere.
@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _rotary_store_kv_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    eps: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slots: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    table_stride: tl.tensor,
    block_stride: tl.tensor,
    cache_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_QUERY_NORM: tl.constexpr,
    HAS_KEY_NORM: tl.constexpr,
    STORES: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    pair = tl.arange(0, PAIRS)[None, :]
    angles = cos_sin + tl.load(positions + token).to(tl.int64) * table_stride + pair
    cos = tl.load(angles, mask=pair < ROTARY_DIM // 2, other=0.0)
    sin = tl.load(angles + ROTARY_DIM // 2, mask=pair < ROTARY_DIM // 2, other=0.0)
    if part < tl.cdiv(NUM_HEADS, HEADS):
        head = part * HEADS + tl.arange(0, HEADS)[:, None]
        _rotate(
            query + token * query_stride, query_norm, eps, head, query_head_stride, cos, sin,
            NUM_HEADS, HEAD_DIM, ROTARY_DIM, INTERLEAVED, HAS_QUERY_NORM, PAIRS, REST,
        )  # fmt: skip
    else:
        head = (part - tl.cdiv(NUM_HEADS, HEADS)) * HEADS + tl.arange(0, HEADS)[:, None]
        first, second, rest = _rotate(
            key + token * key_stride, key_norm, eps, head, key_head_stride, cos, sin,
            NUM_KV_HEADS, HEAD_DIM, ROTARY_DIM, INTERLEAVED, HAS_KEY_NORM, PAIRS, REST,
        )  # fmt: skip
        if STORES:
            slot = tl.load(slots + token).to(tl.int64)
            if slot >= 0:
                place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride + head * cache_head_stride
                is_pair = (head < NUM_KV_HEADS) & (pair < ROTARY_DIM // 2)
                first_at = 2 * pair if INTERLEAVED else pair
                second_at = 2 * pair + 1 if INTERLEAVED else pair + ROTARY_DIM // 2
                tl.store(key_cache + place + first_at, first, mask=is_pair)
                tl.store(key_cache + place + second_at, second, mask=is_pair)
                rest_at = ROTARY_DIM + tl.arange(0, REST)[None, :]
                tl.store(key_cache + place + rest_at, rest, mask=(head < NUM_KV_HEADS) & (rest_at < HEAD_DIM))
                dim = tl.arange(0, DIM)[None, :]
                inside = (head < NUM_KV_HEADS) & (dim < HEAD_DIM)
                values = tl.load(value + token * value_stride + head * value_head_stride + dim, mask=inside)
                tl.store(value_cache + place + dim, values, mask=inside)


def launch_rotary_embedding(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
    """Hot path: computes `rotary_embedding`."""
    _launch(query, key, None, None, None, 0.0, positions, cos_sin, interleaved, None, None, None)


def launch_rotary_store_kv(
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
) -> Tensor:
    """Hot path: computes `rotary_store_kv`."""
    for name, tensor in (("value", value), ("key_cache", key_cache), ("slots", slots)):
        check_dense(name, tensor)
    check_same_layout(key_cache, value_cache)
    _launch(query, key, value, query_norm, key_norm, eps, positions, cos_sin, interleaved, key_cache, value_cache, slots)
    return key.new_empty(0)


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
    positions: Tensor,
    cos_sin: Tensor,
    interleaved: bool,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    slots: Tensor | None,
) -> None:
    for name, tensor in (("query", query), ("key", key), ("cos_sin", cos_sin), ("positions", positions)):
        check_dense(name, tensor)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, rotary_dim = key.shape[1], cos_sin.shape[1]
    if num_tokens == 0:
        return
    _rotary_store_kv_kernel[num_tokens, triton.cdiv(num_heads, HEADS) + triton.cdiv(num_kv_heads, HEADS)](
        *(query, key, value, query_norm, key_norm, eps, positions, cos_sin, key_cache, value_cache, slots),
        *(*query.stride()[:2], *key.stride()[:2], *((0, 0) if value is None else value.stride()[:2]), cos_sin.stride(0)),
        *((0, 0, 0) if key_cache is None else key_cache.stride()[:3]),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        BLOCK_SIZE=1 if key_cache is None else key_cache.shape[2],
        INTERLEAVED=interleaved,
        HAS_QUERY_NORM=query_norm is not None,
        HAS_KEY_NORM=key_norm is not None,
        STORES=key_cache is not None,
        HEADS=HEADS,
        PAIRS=triton.next_power_of_2(rotary_dim // 2),
        # At least one, whose mask is empty: a range of none does not exist.
        REST=triton.next_power_of_2(max(head_dim - rotary_dim, 1)),
        DIM=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
