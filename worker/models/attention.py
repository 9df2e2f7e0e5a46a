"""Attention over the paged KV cache."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from modelworker.worker.models.causal_lm import AttentionMetadata


class Attention(nn.Module):
    """Causal attention of a step's tokens over their sequences' cached keys and values.

    Args:
        scale: factor on query-key products.
        window: how many tokens a query may see, itself included; 0 = all.
        prefix: qualified name.
    """

    __call__: Callable[..., Tensor]

    def __init__(self, *, scale: float, window: int, prefix: str) -> None:
        super().__init__()
        self.scale = scale
        self.window = window
        self.prefix = prefix

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention: AttentionMetadata, kv_cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Hot path: stores the step's keys and values, then attends.

        Args:
            query: [num_tokens, num_heads, head_dim], rotated.
            key: [num_tokens, num_kv_heads, head_dim], rotated.
            value: [num_tokens, num_kv_heads, head_dim].
            attention: the step's sequences.
            kv_cache: key_cache and value_cache of this layer, each [num_blocks, num_kv_heads, block_size, head_dim].

        Returns:
            [num_tokens, num_heads, head_dim]
        """
        key_cache, value_cache = kv_cache
        order = torch.ops.modelworker.store_kv(key, value, key_cache, value_cache, attention.slots)
        output = query.new_empty(query.shape)
        torch.ops.modelworker.paged_attention(
            query,
            key_cache,
            value_cache,
            output,
            attention.query_starts,
            attention.seq_lens,
            attention.block_tables,
            order,
            self.scale,
            self.window,
            0.0,
        )
        return output
