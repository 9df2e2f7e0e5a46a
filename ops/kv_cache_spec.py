"""Reference and samples of store_kv."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modelworker.ops.op_spec import RETURNED, SampleShape, generator, random_rows


def store_kv_reference(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> Mapping[str, Tensor]:
    """Puts each row with a slot into cache[slot // block_size, :, slot % block_size]."""
    block_size = key_cache.shape[2]
    caches = {"key_cache": key_cache.double().clone(), "value_cache": value_cache.double().clone()}
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            caches["key_cache"][slot // block_size, :, slot % block_size] = key[row].double()
            caches["value_cache"][slot // block_size, :, slot % block_size] = value[row].double()
    return {**caches, RETURNED: key.new_empty(0).double()}


def store_kv_sample(shape: SampleShape) -> tuple[Any, ...]:
    """Makes keys and values, caches that hold NaN, and slots in no order, every fifth of them -1 with a row of NaN."""
    block_size, num_kv_heads, head_dim = (shape.variant[name] for name in ("block_size", "num_kv_heads", "head_dim"))
    key, value = (random_rows(shape, num_kv_heads, head_dim, seed=seed) for seed in (1, 2))
    num_blocks = shape.num_tokens // block_size + 3
    slots = torch.randperm(num_blocks * block_size, generator=generator(shape, 3))[: shape.num_tokens]
    slots[::5] = -1
    key[::5] = value[::5] = float("nan")
    key_cache, value_cache = (
        torch.full((num_blocks, num_kv_heads, block_size, head_dim), float("nan"), dtype=shape.dtype) for _ in range(2)
    )
    return key, value, key_cache, value_cache, slots
