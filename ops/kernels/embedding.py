"""embedding: a program copies a part of a row."""

import triton
import triton.language as tl
from torch import Tensor

from modelworker.ops.kernels.arguments import check_dense
from modelworker.ops.kernels.geometry import COLUMNS


# Ids are a slice of a buffer that a step shares with its other integers: it may start anywhere.
@triton.jit(do_not_specialize_on_alignment=["ids"])
def _embedding_kernel(
    weight: tl.tensor, ids: tl.tensor, output: tl.tensor, weight_stride: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    source = tl.load(ids + row).to(tl.int64)
    tl.store(output + row * size + column, tl.load(weight + source * weight_stride + column, mask=inside), mask=inside)


def launch_embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """Hot path: computes `embedding`. An id outside of the table reads outside of its memory: whoever takes ids in checks them."""
    check_dense("weight", weight)
    size = weight.shape[1]
    output = weight.new_empty(ids.shape[0], size)
    if ids.shape[0]:
        _embedding_kernel[ids.shape[0], triton.cdiv(size, COLUMNS)](
            weight, ids.contiguous(), output, weight.stride(0), size, BLOCK=COLUMNS, num_warps=4
        )
    return output
