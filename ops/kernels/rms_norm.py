"""rms_norm: one program reads a row once, keeps it in registers, and writes it once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelworker.ops.kernels.arguments import rows_of
from modelworker.ops.kernels.geometry import row_warps


@triton.jit
def _rms_norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    num_inner: tl.tensor,
    size: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    start = (row // num_inner) * outer_stride + (row % num_inner) * inner_stride
    values = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    # By hand a float arrives as fp32, under Inductor as fp64.
    factor = tl.rsqrt(tl.sum(values * values, 0) / size + tl.cast(eps, tl.float32))
    scales = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * size + column, (values * factor * scales).to(output.dtype.element_ty), mask=inside)


def launch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Hot path: computes `rms_norm`, of x [num_rows, size] or [num_rows, num_heads, size]."""
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = rows_of(x)
    if rows.num_rows:
        block = triton.next_power_of_2(rows.size)
        _rms_norm_kernel[(rows.num_rows,)](
            *(x, weight, output, rows.outer_stride, rows.inner_stride, rows.num_inner, rows.size, eps),
            BLOCK=block,
            num_warps=row_warps(block),
        )
    return output
