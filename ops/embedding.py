"""Rows of a table by their ids."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from modelworker.ops.custom_op import CustomOp
from modelworker.ops.library import register_op
from modelworker.ops.linear import LinearFloat32
from modelworker.ops.op_settings import OpSettings


def embedding(weight: Tensor, ids: Tensor) -> Tensor:
    """Returns the rows of `weight` that `ids` name.

    Args:
        weight: [num_rows, size].
        ids: [num_ids], int32 or int64, each in 0 .. num_rows - 1.

    Returns:
        [num_ids, size], like `weight`.
    """
    return F.embedding(ids, weight)


def _embedding_fake(weight: Tensor, ids: Tensor) -> Tensor:
    return weight.new_empty(ids.shape[0], weight.shape[1])


@CustomOp.register("embedding", dynamic_arg_dims={"ids": 0})
class Embedding(CustomOp):
    """Looks ids up in a table, which may be the packed weight of a head.

    Args:
        num_rows: of the table.
        size: of a row.
        product: the head that has the same weight; None: the table is this op's alone.
        ops: the settings of the model's ops.
    """

    __call__: Callable[..., Tensor]
    has_one_form = True

    def __init__(self, num_rows: int, size: int, *, product: LinearFloat32 | None, ops: OpSettings) -> None:
        is_packed = product is not None and product.is_packed
        super().__init__(
            ops=ops,
            enforce_enable=is_packed,
            cpu_obstacle=ops.kernels_obstacle,
            cuda_obstacle=ops.triton_obstacle,
            replacement_obstacle="" if product is None else product.packing_obstacle,
        )
        self.num_rows = num_rows
        self.size = size
        self._is_packed = is_packed
        if ops.kernels is not None:
            self._kernel = ops.kernels.ops.embedding.default
            self._packed_kernel = ops.kernels.ops.packed_embedding.default
        if ops.triton is not None:
            self._triton = ops.triton.ops.embedding.default

    def forward_native(self, weight: Tensor, ids: Tensor) -> Tensor:
        """Takes the arguments of `embedding`."""
        return embedding(weight, ids)

    def forward_cpu(self, weight: Tensor, ids: Tensor) -> Tensor:
        """As `forward_native`, by the C++ kernels, also of a packed weight."""
        rows: Tensor = self._packed_kernel(ids, weight, self.num_rows, self.size) if self._is_packed else self._kernel(weight, ids)
        return rows

    def forward_cuda(self, weight: Tensor, ids: Tensor) -> Tensor:
        """As `forward_native`, by the Triton kernel."""
        rows: Tensor = self._triton(weight, ids)
        return rows


register_op(embedding, fake=_embedding_fake)
