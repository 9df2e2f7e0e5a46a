"""Norm of the heads, rotation and cache update in one pass over a step's queries, keys and values."""

from collections.abc import Callable

from torch import Tensor

from modelworker.ops.custom_op import CustomOp
from modelworker.ops.kv_cache import StoreKv, store_kv
from modelworker.ops.library import register_op
from modelworker.ops.norm import RMSNorm, rms_norm
from modelworker.ops.op_settings import OpSettings
from modelworker.ops.rotary import ApplyRotaryEmbedding, rotary_embedding

# What the kernels have room for (kv_cache.h).
_MAX_KERNEL_HEAD_DIM = 512


def rotary_store_kv(
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
    """Normalizes heads where there is a weight for it, rotates queries and keys in place, and stores keys and values.

    Args:
        query: [num_tokens, num_heads, head_dim], bf16 or fp32; becomes the rotated queries.
        key: [num_tokens, num_kv_heads, head_dim], like `query`; becomes the rotated keys.
        value: like `key`.
        query_norm: [head_dim], the weight of the RMS norm of each query head; None: they are not normalized.
        key_norm: the same of keys.
        eps: of the norms.
        positions: [num_tokens], int32 or int64.
        cos_sin: see `rotary_embedding`.
        interleaved: see `rotary_embedding`.
        key_cache: [num_blocks, num_kv_heads, block_size, head_dim]; written.
        value_cache: like `key_cache`; written.
        slots: see `store_kv`.

    Returns:
        An empty tensor, see `store_kv`.
    """
    if query_norm is not None:
        query.copy_(rms_norm(query, query_norm, eps))
    if key_norm is not None:
        key.copy_(rms_norm(key, key_norm, eps))
    rotary_embedding(query, key, positions, cos_sin, interleaved)
    return store_kv(key, value, key_cache, value_cache, slots)


def _rotary_store_kv_fake(
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
    return key.new_empty(0)


@CustomOp.register("rotary_store_kv", dynamic_arg_dims={"query": 0, "key": 0, "value": 0, "positions": 0, "slots": 0})
class RotaryStoreKv(CustomOp):
    """Everything between the projection to query, key and value and attention.

    Its native form consists of ops of its own, so that a compiler sees the norms and the rotation, and only the cache update is
    hidden from it.

    Args:
        head_dim: of queries, keys and values.
        eps: of the norms of the heads.
        interleaved: see `rotary_embedding`.
        ops: the settings of the model's ops.
    """

    __call__: Callable[..., tuple[Tensor, Tensor]]

    def __init__(self, *, head_dim: int, eps: float, interleaved: bool, ops: OpSettings) -> None:
        unsupported = _unsupported_head_dim(head_dim)
        super().__init__(
            ops=ops, cpu_obstacle=ops.kernels_obstacle or unsupported, cuda_obstacle=ops.triton_obstacle or unsupported
        )
        self.eps = eps
        self.interleaved = interleaved
        self.rotary = ApplyRotaryEmbedding(interleaved=interleaved, ops=ops)
        self.store_kv = StoreKv(ops=ops)
        if ops.kernels is not None:
            self._kernel = ops.kernels.ops.rotary_store_kv.default
        if ops.triton is not None:
            self._triton = ops.triton.ops.rotary_store_kv.default

    def forward_native(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        positions: Tensor,
        cos_sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Takes the arguments of `rotary_store_kv`, the norms of queries and keys as ops.

        Returns:
            The queries to attend with, and the empty tensor of `store_kv`.
        """
        if norms is not None:
            query, key = norms[0](query), norms[1](key)
        self.rotary(query, key, positions, cos_sin)
        return query, self.store_kv(key, value, key_cache, value_cache, slots)

    def forward_cpu(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        positions: Tensor,
        cos_sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As `forward_native`, by one C++ kernel."""
        return self._in_one(self._kernel, query, key, value, norms, positions, cos_sin, key_cache, value_cache, slots)

    def forward_cuda(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        positions: Tensor,
        cos_sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As `forward_native`, by one Triton kernel."""
        return self._in_one(self._triton, query, key, value, norms, positions, cos_sin, key_cache, value_cache, slots)

    def _in_one(
        self,
        kernel: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        norms: tuple[RMSNorm, RMSNorm] | None,
        positions: Tensor,
        cos_sin: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, Tensor]:
        query_norm, key_norm = (None, None) if norms is None else (norms[0].weight, norms[1].weight)
        order = kernel(
            *(query, key, value, query_norm, key_norm, self.eps),
            *(positions, cos_sin, self.interleaved, key_cache, value_cache, slots),
        )
        return query, order


def _unsupported_head_dim(head_dim: int) -> str:
    if head_dim > _MAX_KERNEL_HEAD_DIM:
        return f"the kernel takes a head_dim up to {_MAX_KERNEL_HEAD_DIM}, not {head_dim}"
    return ""


register_op(rotary_store_kv, mutates_args=("query", "key", "key_cache", "value_cache"), fake=_rotary_store_kv_fake)
