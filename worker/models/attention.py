"""Attention over the paged KV cache."""

from collections.abc import Callable

from torch import Tensor

from modelworker.ops.attention import PagedAttention
from modelworker.ops.kv_cache import StoreKv
from modelworker.ops.op_settings import OpSettings
from modelworker.ops.replaceable import PluggableLayer
from modelworker.worker.models.causal_lm import AttentionMetadata


@PluggableLayer.register("attention")
class Attention(PluggableLayer):
    """Causal attention of a step's tokens over their sequences' cached keys and values.

    Args:
        scale: factor on query-key products.
        window: how many tokens a query may see, itself included; 0 = all.
        ops: the settings of the model's ops.
    """

    __call__: Callable[..., Tensor]

    def __init__(self, *, scale: float, window: int, ops: OpSettings) -> None:
        super().__init__()
        self.store_kv = StoreKv(ops=ops)
        self.paged_attention = PagedAttention(scale=scale, window=window, soft_cap=0.0, ops=ops)

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
        order = self.store_kv(key, value, key_cache, value_cache, attention.slots)
        output = query.new_empty(query.shape)
        self.paged_attention(
            query,
            key_cache,
            value_cache,
            output,
            attention.query_starts,
            attention.seq_lens,
            attention.block_tables,
            order,
        )
        return output
