"""Reference and samples of paged_attention."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor

from modelworker.ops.op_spec import SampleShape, generator, padded, random

_SCALE = 0.25


def attention_variant(
    rows: Literal["decode", "prefill", "mixed"],
    *,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int = 16,
    context_len: int = 0,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Mapping[str, Any]:
    """Names a variant of the samples: which rows the step has, and the layer that attends."""
    return {
        "rows": rows,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "block_size": block_size,
        "head_dim": head_dim,
        "context_len": context_len,
        "window": window,
        "soft_cap": soft_cap,
    }


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    order: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
) -> Mapping[str, Tensor]:
    """softmax(q k^T * scale) v, one token after the other, each over the slots of the tokens that it sees."""
    expected = torch.zeros(output.shape, dtype=torch.float64)
    block_size = key_cache.shape[2]
    starts = query_starts.tolist()
    for sequence, seq_len in enumerate(seq_lens.tolist()):
        for row in range(starts[sequence], starts[sequence + 1]):
            position = seq_len - (starts[sequence + 1] - row)
            seen = torch.arange(max(position - window + 1, 0) if window else 0, position + 1)
            blocks, offsets = block_tables[sequence, seen // block_size].long(), seen % block_size
            group = query.shape[1] // key_cache.shape[1]
            # [tokens seen, num_heads, head_dim]: head h reads KV head h // group.
            keys, values = (
                cache[blocks, :, offsets].double().repeat_interleave(group, dim=1) for cache in (key_cache, value_cache)
            )
            scores = (keys * query[row].double()).sum(-1) * scale
            if soft_cap:
                scores = soft_cap * (scores / soft_cap).tanh()
            weights = (scores - scores.amax(0)).exp()
            expected[row] = (weights.unsqueeze(-1) * values).sum(0) / weights.sum(0).unsqueeze(-1)
    return {"output": expected}


def paged_attention_sample(shape: SampleShape) -> tuple[Any, ...]:
    """Makes sequences over random blocks. Slots that no sequence owns, the output and padded rows hold NaN."""
    variant = shape.variant
    num_heads, num_kv_heads, block_size = variant["num_heads"], variant["num_kv_heads"], variant["block_size"]
    head_dim: int = variant["head_dim"]
    query_lens, seq_lens = _lengths(shape.num_tokens, variant["rows"], variant["context_len"])
    needed = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(needed) + 3
    free = (torch.randperm(num_blocks - 1, generator=generator(shape, 1)) + 1).tolist()
    block_tables = torch.zeros(len(seq_lens), max(needed, default=0) + shape.padding, dtype=torch.int32)
    sizes = (num_blocks, num_kv_heads, block_size, head_dim)
    caches = [torch.full(sizes, float("nan"), dtype=shape.dtype) for _ in range(2)]
    for sequence, (length, count) in enumerate(zip(seq_lens, needed, strict=True)):
        block_tables[sequence, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        tokens = torch.arange(length)
        for seed, cache in enumerate(caches):
            stored = random(shape, length, num_kv_heads, head_dim, seed=10 * sequence + seed)
            cache[block_tables[sequence, tokens // block_size].long(), :, tokens % block_size] = stored
    # Rows behind the last sequence, as a padded batch has them.
    rows = torch.cat(
        (
            random(shape, shape.num_tokens, num_heads, head_dim, seed=2),
            torch.full((shape.padding, num_heads, head_dim), float("nan"), dtype=shape.dtype),
        )
    )
    return (
        padded(rows, shape.padding),
        *caches,
        torch.full_like(rows, float("nan")),
        torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
        block_tables,
        torch.empty(0, dtype=shape.dtype),
        *(_SCALE, variant["window"], variant["soft_cap"]),
    )


def _lengths(num_tokens: int, rows: str, context_len: int) -> tuple[list[int], list[int]]:
    """Divides tokens among sequences: one each, a prompt's chunks, or both; returns their new and all their tokens."""
    query_lens: list[int] = []
    while (left := num_tokens - sum(query_lens)) > 0:
        chunk = 1 if rows == "decode" or (rows == "mixed" and len(query_lens) % 2) else min(left, 100)
        query_lens.append(chunk)
    return query_lens, [length + context_len + 13 * index % 41 for index, length in enumerate(query_lens)]
