"""The gated activation of Llama's MLP: silu(gate) * up (Shazeer, 2020), computed in fp32 and rounded once."""

from collections.abc import Callable

import torch
from torch import Tensor

from modelworker.ops.custom_op import CustomOp
from modelworker.ops.kernel_op import KernelOp
from modelworker.ops.library import register_op


def silu_and_mul(x: Tensor) -> Tensor:
    """Returns silu of the first half of each row times its second half.

    Args:
        x: [..., 2 * intermediate_size], bf16 or fp32.

    Returns:
        [..., intermediate_size], like `x`.
    """
    gate, up = x.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(x.dtype)


def _silu_and_mul_fake(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@CustomOp.register("silu_and_mul", dynamic_arg_dims={"x": 0})
class SiluAndMul(KernelOp):
    """silu of the first half of each row times its second half."""

    __call__: Callable[..., Tensor]
    kernel = "silu_and_mul"

    def forward_native(self, x: Tensor) -> Tensor:
        """Takes x [..., 2 * intermediate_size] and returns [..., intermediate_size]."""
        return silu_and_mul(x)


register_op(silu_and_mul, fake=_silu_and_mul_fake)
