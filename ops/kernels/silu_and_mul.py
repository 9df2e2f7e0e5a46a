"""silu_and_mul: a program computes a part of a row, so that a single row keeps several multiprocessors busy."""

import triton
import triton.language as tl
from torch import Tensor

from modelworker.ops.kernels.arguments import rows_of
from modelworker.ops.kernels.geometry import COLUMNS


@triton.jit
def _silu_and_mul_kernel(
    x: tl.tensor,
    output: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    num_inner: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    start = x + (row // num_inner) * outer_stride + (row % num_inner) * inner_stride
    gate = tl.load(start + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(start + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * size + column, (gate * tl.sigmoid(gate) * up).to(output.dtype.element_ty), mask=inside)


def launch_silu_and_mul(x: Tensor) -> Tensor:
    """Hot path: computes `silu_and_mul`, of x with two or three dimensions."""
    rows = rows_of(x)
    size = rows.size // 2
    output = x.new_empty((*x.shape[:-1], size))
    if rows.num_rows:
        _silu_and_mul_kernel[rows.num_rows, triton.cdiv(size, COLUMNS)](
            *(x, output, rows.outer_stride, rows.inner_stride, rows.num_inner, size), BLOCK=COLUMNS, num_warps=4
        )
    return output
