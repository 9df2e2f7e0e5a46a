"""Attention over the paged KV cache: plain decode, prefill chunks and any mix of them in one call."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from modelworker.ops.library import register_op

# Rows of queries that are scored at once: bounds the scores to this many times the sequence's length per head.
_QUERY_TILE = 256
# Tokens of context, padding included, that are gathered at once for a group of decoding sequences.
_GROUP_TOKENS = 16384


def paged_attention(
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
) -> None:
    """Computes softmax(q k^T * scale) v for every new token, over the cached tokens of its sequence up to itself, into `output`.

    The new tokens' keys and values are already in the cache. Only the slots of a sequence's own `seq_lens` tokens are read: what
    lies in other slots, NaN included, has no influence. Scores, softmax and sums are fp32.

    Args:
        query: [num_tokens, num_heads, head_dim]; head h reads KV head h // (num_heads / num_kv_heads).
        key_cache: [num_blocks, num_kv_heads, block_size, head_dim].
        value_cache: like `key_cache`.
        output: [num_tokens, num_heads, head_dim]; written. Rows that belong to no sequence become 0.
        query_starts: [num_sequences + 1], int32, non-decreasing: where each sequence's new tokens start.
        seq_lens: [num_sequences], int32: tokens in the cache, the new ones included.
        block_tables: [num_sequences, width], int32: each sequence's blocks, in order.
        order: the empty tensor that `store_kv` returned.
        scale: factor of the scores.
        window: how many tokens a query sees, itself included; 0 = all.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 = off.
    """
    starts, lens = query_starts.tolist(), seq_lens.tolist()
    query_lens = [end - start for start, end in itertools.pairwise(starts)]
    for group in _decode_groups(query_lens, lens):
        rows = [starts[sequence] for sequence in group]
        output[rows] = _attend_decodes(
            query[rows], key_cache, value_cache, block_tables[group], seq_lens[group], lens[group[-1]], scale, window, soft_cap
        )
    for sequence, query_len in enumerate(query_lens):
        if query_len > 1:
            keys = _cached_tokens(key_cache, block_tables[sequence], lens[sequence])
            values = _cached_tokens(value_cache, block_tables[sequence], lens[sequence])
            for tile in range(starts[sequence], starts[sequence + 1], _QUERY_TILE):
                tile_end = min(tile + _QUERY_TILE, starts[sequence + 1])
                first_position = lens[sequence] - (starts[sequence + 1] - tile)
                output[tile:tile_end] = _attend(query[tile:tile_end], keys, values, first_position, scale, window, soft_cap)
    output[starts[-1] :] = 0


def _decode_groups(query_lens: list[int], seq_lens: list[int]) -> Iterator[list[int]]:
    """Yields sequences with one new token, shortest first, in groups whose contexts are gathered together."""
    group: list[int] = []
    for sequence in sorted((s for s, query_len in enumerate(query_lens) if query_len == 1), key=seq_lens.__getitem__):
        if group and (len(group) + 1) * seq_lens[sequence] > _GROUP_TOKENS:
            yield group
            group = []
        group.append(sequence)
    if group:
        yield group


def _attend_decodes(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    longest: int,
    scale: float,
    window: int,
    soft_cap: float,
) -> Tensor:
    """Attends from the last token of each sequence, all padded to the longest: [num_sequences, num_heads, head_dim]."""
    num_sequences, num_heads, head_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    tables = block_tables[:, : -(-longest // block_size)]
    keys, values = (cache[tables].transpose(1, 2).flatten(2, 3).float() for cache in (key_cache, value_cache))
    tokens = torch.arange(keys.shape[2], device=query.device)
    hidden = tokens >= seq_lens.unsqueeze(1)
    if window > 0:
        hidden |= tokens < (seq_lens - window).unsqueeze(1)
    grouped = query.float().view(num_sequences, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = grouped @ keys.transpose(2, 3) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    probabilities = scores.masked_fill_(hidden[:, None, None], float("-inf")).softmax(-1)
    # A probability of 0 does not silence a NaN.
    values.masked_fill_(hidden[:, None, :, None], 0)
    return (probabilities @ values).view(num_sequences, num_heads, head_dim).to(query.dtype)


def _cached_tokens(cache: Tensor, table: Tensor, seq_len: int) -> Tensor:
    """Gathers a sequence's keys or values: [num_kv_heads, seq_len, head_dim], fp32."""
    block_size = cache.shape[2]
    blocks = cache[table[: -(-seq_len // block_size)]]
    return blocks.transpose(0, 1).flatten(1, 2)[:, :seq_len].float()


def _attend(query: Tensor, keys: Tensor, values: Tensor, first_position: int, scale: float, window: int, soft_cap: float) -> Tensor:
    """Attends from consecutive tokens, the first of them at `first_position`: [num_queries, num_heads, head_dim]."""
    num_queries, num_heads, head_dim = query.shape
    num_kv_heads, seq_len, _ = keys.shape
    grouped = query.float().view(num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("qkgd,ktd->kgqt", grouped, keys) * scale
    if soft_cap > 0:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    positions = torch.arange(first_position, first_position + num_queries, device=query.device).unsqueeze(1)
    tokens = torch.arange(seq_len, device=query.device)
    hidden = tokens > positions
    if window > 0:
        hidden |= tokens <= positions - window
    probabilities = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    return torch.einsum("kgqt,ktd->qkgd", probabilities, values).reshape(num_queries, num_heads, head_dim).to(query.dtype)


register_op(paged_attention, mutates_args=("output",))
