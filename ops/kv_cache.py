"""Writing new keys and values into the paged KV cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from modelworker.ops.custom_op import CustomOp
from modelworker.ops.kernel_op import KernelOp
from modelworker.ops.library import register_op
from modelworker.ops.op_settings import OpSettings


def store_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> Tensor:
    """Writes each token's keys and values to its slot of one layer's cache.

    Args:
        key: [num_tokens, num_kv_heads, head_dim].
        value: [num_tokens, num_kv_heads, head_dim].
        key_cache: [num_blocks, num_kv_heads, block_size, head_dim]; written.
        value_cache: like `key_cache`; written.
        slots: [num_tokens], int64: block id * block_size + offset in the block. -1: the token is dropped (it is never an index).

    Returns:
        An empty tensor. Attention takes it as an argument, so that the compiler keeps the order of the two.
    """
    kept = slots >= 0
    block_size = key_cache.shape[2]
    blocks, offsets = slots[kept] // block_size, slots[kept] % block_size
    key_cache[blocks, :, offsets] = key[kept]
    value_cache[blocks, :, offsets] = value[kept]
    return key.new_empty(0)


def _store_kv_fake(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> Tensor:
    return key.new_empty(0)


@CustomOp.register("store_kv", dynamic_arg_dims={"key": 0, "value": 0, "slots": 0})
class StoreKv(KernelOp):
    """Writes keys and values into the cache, as an op that a compiler doesn't look into: it would copy the cache."""

    __call__: Callable[..., Tensor]
    kernel = "store_kv"

    def __init__(self, *, ops: OpSettings) -> None:
        super().__init__(ops=ops)
        self._op = torch.ops.modelworker.store_kv.default if ops.opaque_ops else store_kv

    def forward_native(self, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> Tensor:
        """Takes the arguments of `store_kv` and returns its empty tensor."""
        order: Tensor = self._op(key, value, key_cache, value_cache, slots)
        return order


register_op(store_kv, mutates_args=("key_cache", "value_cache"), fake=_store_kv_fake)
