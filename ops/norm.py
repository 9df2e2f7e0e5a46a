"""RMS normalization: y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019), computed in fp32 and rounded once."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from modelworker.ops.custom_op import CustomOp
from modelworker.ops.library import register_op
from modelworker.ops.op_settings import OpSettings

# What the kernels have room for (norm.h, kernels/geometry.py).
_MAX_KERNEL_SIZE = 32768


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


@CustomOp.register("rms_norm", dynamic_arg_dims={"x": 0, "residual": 0})
class RMSNorm(CustomOp):
    """The RMS norm with its weight, alone and together with the addition before it."""

    __call__: Callable[..., Tensor]
    weight: Tensor

    def __init__(self, size: int, *, eps: float, dtype: torch.dtype, ops: OpSettings) -> None:
        unsupported = _unsupported_size(size)
        super().__init__(
            ops=ops, cpu_obstacle=ops.kernels_obstacle or unsupported, cuda_obstacle=ops.triton_obstacle or unsupported
        )
        self.eps = eps
        if ops.kernels is not None:
            self._kernel = ops.kernels.ops.rms_norm.default
            self._add_kernel = ops.kernels.ops.fused_add_rms_norm.default
        if ops.triton is not None:
            self._triton = ops.triton.ops.rms_norm.default
            self._add_triton = ops.triton.ops.fused_add_rms_norm.default
        self.register_parameter("weight", nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False))

    def add(self, x: Tensor, residual: Tensor) -> None:
        """Hot path: adds x [num_tokens, size] to residual in place, and overwrites x with the normalized sum."""
        self(x, residual)

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalizes x [..., size]; with a residual as `add` says, and returns x."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps)
        fused_add_rms_norm(x, residual, self.weight, self.eps)
        return x

    def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """As `forward_native`, by the C++ kernels."""
        if residual is not None:
            self._add_kernel(x, residual, self.weight, self.eps)
            return x
        # Heads that are views of a merged projection do not lie apart by one stride.
        rows: Tensor = self._kernel(x.flatten(0, -2), self.weight, self.eps)
        return rows.view(x.shape)

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """As `forward_native`, by the Triton kernels."""
        if residual is not None:
            self._add_triton(x, residual, self.weight, self.eps)
            return x
        rows: Tensor = self._triton(x, self.weight, self.eps)
        return rows


def _unsupported_size(size: int) -> str:
    if size > _MAX_KERNEL_SIZE:
        return f"the kernel takes a hidden size up to {_MAX_KERNEL_SIZE}, not {size}"
    return ""


register_op(rms_norm, fake=_rms_norm_fake)
register_op(fused_add_rms_norm, mutates_args=("x", "residual"))
