"""Rotary position embedding (Su et al., 2021), in place, computed in fp32 and rounded once."""

from collections.abc import Callable

import torch
from torch import Tensor

from modelworker.ops.custom_op import CustomOp
from modelworker.ops.library import register_op
from modelworker.ops.op_settings import OpSettings


def rotary_embedding(query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
    """Rotates the first `rotary_dim` elements of every head by its token's position.

    A pair (a, b) becomes (a cos - b sin, b cos + a sin). Pairs are (i, i + rotary_dim / 2) in the half-rotated form of Hugging
    Face checkpoints, and (2i, 2i + 1) in the interleaved form.

    Args:
        query: [num_tokens, num_heads, head_dim], bf16 or fp32; rotated in place.
        key: [num_tokens, num_kv_heads, head_dim], like `query`; rotated in place.
        positions: [num_tokens], int32 or int64.
        cos_sin: [num_positions, rotary_dim], fp32: the cosines of each position, then its sines.
        interleaved: which elements form a pair.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    rotary_dim = cos_sin.shape[1]
    for heads in (query, key):
        rotated = heads[..., :rotary_dim]
        if interleaved:
            first, second = rotated[..., 0::2].float(), rotated[..., 1::2].float()
            pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        else:
            first, second = rotated.float().chunk(2, dim=-1)
            pairs = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        rotated.copy_(pairs)


@CustomOp.register("rotary_embedding", dynamic_arg_dims={"query": 0, "key": 0, "positions": 0})
class ApplyRotaryEmbedding(CustomOp):
    """Rotates queries and keys in place; `interleaved` says which elements form a pair."""

    __call__: Callable[..., None]

    def __init__(self, *, interleaved: bool, ops: OpSettings) -> None:
        super().__init__(ops=ops, cpu_obstacle=ops.kernels_obstacle, cuda_obstacle=ops.triton_obstacle)
        self.interleaved = interleaved
        if ops.kernels is not None:
            self._kernel = ops.kernels.ops.rotary_embedding.default
        if ops.triton is not None:
            self._triton = ops.triton.ops.rotary_embedding.default

    def forward_native(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Takes the arguments of `rotary_embedding`."""
        rotary_embedding(query, key, positions, cos_sin, self.interleaved)

    def forward_cpu(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """As `forward_native`, by the C++ kernel."""
        self._kernel(query, key, positions, cos_sin, self.interleaved)

    def forward_cuda(self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """As `forward_native`, by the Triton kernel."""
        self._triton(query, key, positions, cos_sin, self.interleaved)


register_op(rotary_embedding, mutates_args=("query", "key"))
