"""Attention over the paged KV cache."""

from collections.abc import Callable

from torch import Tensor

from modelworker.ops.attention import PagedAttention
from modelworker.ops.norm import RMSNorm
from modelworker.ops.op_settings import OpSettings
from modelworker.ops.replaceable import PluggableLayer
from modelworker.ops.rotary_store_kv import RotaryStoreKv
from modelworker.worker.models.causal_lm import AttentionMetadata
from modelworker.worker.models.rope import RotaryAngles


@PluggableLayer.register("attention")
class Attention(PluggableLayer):
    """Causal attention of a step's tokens over their sequences' cached keys and values.

    Args:
        head_dim: of queries, keys and values.
        num_heads: of the queries.
        num_kv_heads: of keys and values.
        window: how many tokens a query may see, itself included; 0 = all.
        eps: of the norms of queries and keys.
        ops: the settings of the model's ops.
    """

    __call__: Callable[..., Tensor]

    def __init__(self, *, head_dim: int, num_heads: int, num_kv_heads: int, window: int, eps: float, ops: OpSettings) -> None:
        super().__init__()
        self.rotary_store_kv = RotaryStoreKv(head_dim=head_dim, eps=eps, interleaved=False, ops=ops)
        self.paged_attention = PagedAttention(
            scale=head_dim**-0.5,
            window=window,
            soft_cap=0.0,
            head_dim=head_dim,
            queries_per_kv_head=num_heads // num_kv_heads,
            ops=ops,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        angles: RotaryAngles,
        attention: AttentionMetadata,
        kv_cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Hot path: normalizes and rotates queries and keys, stores keys and values, then attends.

        Args:
            query: [num_tokens, num_heads, head_dim], used up.
            key: [num_tokens, num_kv_heads, head_dim], used up.
            value: [num_tokens, num_kv_heads, head_dim].
            norms: of the heads of queries and of keys, where the model has them.
            angles: RoPE's, of the step's tokens.
            attention: the step's sequences.
            kv_cache: key_cache and value_cache of this layer, each [num_blocks, num_kv_heads, block_size, head_dim].

        Returns:
            [num_tokens, num_heads, head_dim]
        """
        key_cache, value_cache = kv_cache
        query, order = self.rotary_store_kv(
            *(query, key, value, norms, angles.rows, angles.cos_sin, key_cache, value_cache, attention.slots)
        )
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
