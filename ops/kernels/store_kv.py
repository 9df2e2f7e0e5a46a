"""store_kv: a program writes a few heads of one token to its slot."""

import triton
import triton.language as tl
from torch import Tensor

from modelworker.ops.kernels.arguments import check_dense, check_same_layout
from modelworker.ops.kernels.geometry import HEADS


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store_kv_kernel(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slots: tl.tensor,
    key_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_stride: tl.tensor,
    value_head_stride: tl.tensor,
    block_stride: tl.tensor,
    cache_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, DIM)[None, :]
    inside = (head < NUM_HEADS) & (dim < HEAD_DIM)
    place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride + head * cache_head_stride + dim
    tl.store(key_cache + place, tl.load(key + token * key_stride + head * key_head_stride + dim, mask=inside), mask=inside)
    tl.store(value_cache + place, tl.load(value + token * value_stride + head * value_head_stride + dim, mask=inside), mask=inside)


def launch_store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> Tensor:
    """Hot path: computes `store_kv`."""
    for name, tensor in (("key", key), ("value", value), ("key_cache", key_cache), ("slots", slots)):
        check_dense(name, tensor)
    check_same_layout(key_cache, value_cache)
    num_tokens, num_heads, head_dim = key.shape
    if num_tokens:
        _store_kv_kernel[num_tokens, triton.cdiv(num_heads, HEADS)](
            *(key, value, key_cache, value_cache, slots, *key.stride()[:2], *value.stride()[:2]),
            *key_cache.stride()[:3],
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=key_cache.shape[2],
            HEADS=HEADS,
            DIM=triton.next_power_of_2(head_dim),
            num_warps=4,
        )
    return key.new_empty(0)
