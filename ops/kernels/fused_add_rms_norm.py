"""fused_add_rms_norm: one program reads a row of both tensors once, keeps the fp32 sum in registers, and writes both rows once."""

import triton
import triton.language as tl
from torch import Tensor

from modelworker.ops.kernels.arguments import check_dense
from modelworker.ops.kernels.geometry import row_warps


@triton.jit
def _fused_add_rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    x_row, residual_row = x + row * x_stride + column, residual + row * residual_stride + column
    total = tl.load(x_row, mask=inside, other=0.0).to(tl.float32) + tl.load(residual_row, mask=inside, other=0.0).to(tl.float32)
    tl.store(residual_row, total.to(residual.dtype.element_ty), mask=inside)
    factor = tl.rsqrt(tl.sum(total * total, 0) / size + tl.cast(eps, tl.float32))
    scales = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_row, (total * factor * scales).to(x.dtype.element_ty), mask=inside)


def launch_fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Hot path: computes `fused_add_rms_norm`."""
    check_dense("x", x)
    check_dense("residual", residual)
    num_rows, size = x.shape
    if num_rows:
        block = triton.next_power_of_2(size)
        _fused_add_rms_norm_kernel[(num_rows,)](
            *(x, residual, weight, x.stride(0), residual.stride(0), size, eps), BLOCK=block, num_warps=row_warps(block)
        )
