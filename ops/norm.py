"""RMS normalization: y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019), computed in fp32 and rounded once."""

import torch
from torch import Tensor

from modelworker.ops.library import register_op


def _normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalizes fp32 rows; the result stays in fp32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the RMS norm of each row.

    Args:
        x: [..., hidden_size], bf16 or fp32.
        weight: [hidden_size].
        eps: added to the mean square.
    """
    return _normalized(x.float(), weight, eps).to(x.dtype)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Adds `x` to `residual` and puts the RMS norm of the sum into `x`, both in place.

    The norm is taken of the fp32 sum, before it is rounded into `residual`.

    Args:
        x: [num_tokens, hidden_size], bf16 or fp32; becomes the normalized sum.
        residual: [num_tokens, hidden_size], like `x`; becomes the sum.
        weight: [hidden_size].
        eps: added to the mean square.
    """
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(_normalized(total, weight, eps))


def _rms_norm_fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


register_op(rms_norm, fake=_rms_norm_fake)
register_op(fused_add_rms_norm, mutates_args=("x", "residual"))
