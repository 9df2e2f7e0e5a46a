"""Attention over the paged KV cache: plain decode, prefill chunks and any mix of them in one call."""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from modelworker.ops.custom_op import TRITON, CustomOp
from modelworker.ops.library import register_op
from modelworker.ops.op_settings import OpSettings

# Bounds the working memory of a call, whatever the context: fp32 scores of a tile are num_heads x 256 x 2048 elements (64 MiB at 32
# heads), gathered keys and values 2 x 16384 tokens.
_QUERY_TILE = 256
_KEY_TILE = 2048
_GROUP_TOKENS = 16384
# What the kernels have room for (attention.h, kernels/geometry.py).
_MAX_KERNEL_HEAD_DIM = 256
_MAX_KERNEL_GROUP = 64
_MAX_TRITON_GROUP = 128
# Below every score, and finite: the difference of two infinities would be NaN.
_LOWEST = -1e30


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
    parts = _Parts(key_cache, value_cache, scale, window, soft_cap)
    for group in _decode_groups(query_lens, lens):
        rows = [starts[sequence] for sequence in group]
        positions = [[lens[sequence] - 1] for sequence in group]
        output[rows] = parts.attend(query[rows].unsqueeze(1), block_tables[group], positions).squeeze(1)
    for sequence, query_len in enumerate(query_lens):
        if query_len > 1:
            end = starts[sequence + 1]
            for tile in range(starts[sequence], end, _QUERY_TILE):
                tile_end = min(tile + _QUERY_TILE, end)
                positions = [list(range(lens[sequence] - (end - tile), lens[sequence] - (end - tile_end)))]
                tables = block_tables[sequence : sequence + 1]
                output[tile:tile_end] = parts.attend(query[tile:tile_end].unsqueeze(0), tables, positions).squeeze(0)
    output[starts[-1] :] = 0


def _decode_groups(query_lens: list[int], seq_lens: list[int]) -> Iterator[list[int]]:
    """Yields sequences with one new token, shortest first, in groups that lose little when padded to their longest."""
    group: list[int] = []
    for sequence in sorted((s for s, query_len in enumerate(query_lens) if query_len == 1), key=seq_lens.__getitem__):
        if group and (len(group) + 1) * seq_lens[sequence] > _GROUP_TOKENS:
            yield group
            group = []
        group.append(sequence)
    if group:
        yield group


class _Parts(NamedTuple):
    """What all parts of a call have in common."""

    key_cache: Tensor
    value_cache: Tensor
    scale: float
    window: int
    soft_cap: float

    def attend(self, query: Tensor, block_tables: Tensor, positions: list[list[int]]) -> Tensor:
        """Attends from the same number of tokens of several sequences, going over the context in tiles.

        The softmax is kept as a running maximum, sum and weighted sum (Milakov and Gimelshein, 2018).

        Args:
            query: [num_sequences, query_len, num_heads, head_dim].
            block_tables: [num_sequences, width].
            positions: [num_sequences][query_len], ascending within a sequence.

        Returns:
            Like `query`.
        """
        num_sequences, query_len, num_heads, head_dim = query.shape
        num_kv_heads, block_size = self.key_cache.shape[1:3]
        group = num_heads // num_kv_heads
        grouped = query.float().view(num_sequences, query_len, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        at = torch.tensor(positions, device=query.device)
        highest = grouped.new_full((*grouped.shape[:3], 1), _LOWEST)
        total, weighted = torch.zeros_like(highest), torch.zeros_like(grouped)
        first = min(row[0] for row in positions) - self.window + 1 if self.window else 0
        end = max(row[-1] for row in positions) // block_size + 1
        step = max(min(_KEY_TILE, _GROUP_TOKENS // num_sequences) // block_size, 1)
        for block in range(max(first, 0) // block_size, end, step):
            blocks = block_tables[:, block : min(block + step, end)]
            keys, values = (cache[blocks].transpose(1, 2).flatten(2, 3).float() for cache in (self.key_cache, self.value_cache))
            masked = self._masked(at, torch.arange(block * block_size, block * block_size + keys.shape[2], device=query.device))
            # A weight of 0 does not silence a NaN in a slot that no query of the tile may see.
            values.masked_fill_(masked.all(1)[:, None, :, None], 0)
            scores = grouped @ keys.transpose(2, 3) * self.scale
            if self.soft_cap > 0:
                scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            scores.masked_fill_(masked.repeat(1, group, 1).unsqueeze(1), float("-inf"))
            new_highest = torch.maximum(highest, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - new_highest).exp_(), (highest - new_highest).exp_()
            total = total * shrink + weights.sum(-1, keepdim=True)
            weighted = weighted * shrink + weights @ values
            highest = new_highest
        result: Tensor = (weighted / total).view(num_sequences, num_kv_heads, group, query_len, head_dim).permute(0, 3, 1, 2, 4)
        return result.reshape(query.shape).to(query.dtype)

    def _masked(self, at: Tensor, tokens: Tensor) -> Tensor:
        """Returns which tokens a query must not see: [num_sequences, query_len, num_tokens]."""
        masked = tokens > at.unsqueeze(-1)
        if self.window > 0:
            masked |= tokens <= at.unsqueeze(-1) - self.window
        return masked


@CustomOp.register("paged_attention")
class PagedAttention(CustomOp):
    """Attention of a layer, as an op that a compiler doesn't look into: it depends on the lengths of the step's sequences.

    Args:
        scale: factor of the scores.
        window: how many tokens a query sees, itself included; 0 = all.
        soft_cap: of the scores; 0 = off.
        head_dim: of queries, keys and values.
        queries_per_kv_head: how many query heads read one KV head.
        ops: the settings of the model's ops.
    """

    __call__: Callable[..., None]

    def __init__(
        self, *, scale: float, window: int, soft_cap: float, head_dim: int, queries_per_kv_head: int, ops: OpSettings
    ) -> None:
        super().__init__(
            ops=ops,
            cpu_obstacle=ops.kernels_obstacle or _unsupported_by_cpp(head_dim, queries_per_kv_head),
            cuda_obstacle=ops.triton_obstacle or _unsupported_by_triton(head_dim, queries_per_kv_head),
        )
        self.scale = scale
        self.window = window
        self.soft_cap = soft_cap
        self._op = torch.ops.modelworker.paged_attention.default if ops.opaque_ops else paged_attention
        if ops.kernels is not None:
            self._kernel = ops.kernels.ops.paged_attention.default
        if ops.triton is not None:
            self._triton = ops.triton.ops.paged_attention.default
        self._triton_library = ops.triton
        self._queries_per_kv_head = queries_per_kv_head

    def prepare(self, key_cache: Tensor, value_cache: Tensor) -> None:
        """Makes every form of the kernel that steps over a layer's cache may need, so that none is compiled during one.

        Only Triton has forms that depend on the numbers of tokens and sequences.
        """
        if self.choice.implementation == TRITON and self._triton_library is not None:
            num_heads = key_cache.shape[1] * self._queries_per_kv_head
            self._triton_library.prepare_attention(
                *(key_cache, value_cache), num_heads=num_heads, scale=self.scale, window=self.window, soft_cap=self.soft_cap
            )

    def forward_native(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        output: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        order: Tensor,
    ) -> None:
        """Takes the tensor arguments of `paged_attention`."""
        self._op(
            *(query, key_cache, value_cache, output, query_starts, seq_lens, block_tables, order),
            *(self.scale, self.window, self.soft_cap),
        )

    def forward_cpu(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        output: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        order: Tensor,
    ) -> None:
        """As `forward_native`, by the C++ kernel."""
        self._kernel(
            *(query, key_cache, value_cache, output, query_starts, seq_lens, block_tables, order),
            *(self.scale, self.window, self.soft_cap),
        )

    def forward_cuda(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        output: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        order: Tensor,
    ) -> None:
        """As `forward_native`, by the Triton kernels."""
        self._triton(
            *(query, key_cache, value_cache, output, query_starts, seq_lens, block_tables, order),
            *(self.scale, self.window, self.soft_cap),
        )


def _unsupported_by_cpp(head_dim: int, queries_per_kv_head: int) -> str:
    """Says why the C++ kernel can't serve heads of this shape; "" if it can (attention.h)."""
    if head_dim % 2 or head_dim > _MAX_KERNEL_HEAD_DIM:
        return f"the C++ kernel takes an even head_dim up to {_MAX_KERNEL_HEAD_DIM}, not {head_dim}"
    if queries_per_kv_head > _MAX_KERNEL_GROUP:
        return f"the C++ kernel takes up to {_MAX_KERNEL_GROUP} query heads per KV head, not {queries_per_kv_head}"
    return ""


def _unsupported_by_triton(head_dim: int, queries_per_kv_head: int) -> str:
    """Says why the Triton kernels can't serve heads of this shape; "" if they can."""
    if head_dim > _MAX_KERNEL_HEAD_DIM:
        return f"the Triton kernel takes a head_dim up to {_MAX_KERNEL_HEAD_DIM}, not {head_dim}"
    if queries_per_kv_head > _MAX_TRITON_GROUP:
        return f"the Triton kernel takes up to {_MAX_TRITON_GROUP} query heads per KV head, not {queries_per_kv_head}"
    return ""


register_op(paged_attention, mutates_args=("output",))
