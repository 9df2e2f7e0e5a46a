"""Products with a weight, and the greedy token of a head, in the storage that the implementation reads."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from modelworker.ops.cpu.packing import WeightArena, pack_weight
from modelworker.ops.custom_op import CPP, CustomOp
from modelworker.ops.library import register_op
from modelworker.ops.op_settings import OpSettings

# float32 bytes of a bf16 weight converted at a time: small enough to stay in a core's L2 cache until it is multiplied.
_CONVERTED_BYTES = 1 << 20
# Elements of bf16 that an AMX tile has in a row.
_ONEDNN_STEP = 32


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x @ weight.T + bias, summed in fp32 and rounded once.

    Args:
        x: [num_tokens, in_features], bf16 or fp32.
        weight: [out_features, in_features], like `x`.
        bias: [out_features], like `x`.

    Returns:
        [num_tokens, out_features], like `x`.
    """
    return F.linear(_before_zeros(x), weight, bias)


def linear_float32(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x @ weight.T as the fp32 sums, never rounded to x's dtype.

    Args:
        x: [num_tokens, in_features], bf16 or fp32.
        weight: [out_features, in_features], like `x`.

    Returns:
        [num_tokens, out_features], fp32.
    """
    if weight.dtype == torch.float32:
        return F.linear(x, weight)
    if weight.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return _matmul_by_rows(x, weight)


def linear_argmax(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the largest element of each row of `linear_float32`.

    Args:
        x: [num_tokens, in_features], bf16 or fp32.
        weight: [out_features, in_features], like `x`.

    Returns:
        [num_tokens] each: the index, int64, the lowest of equal ones; the largest element, fp32; whether all elements of the row
        are finite, bool. Where they are not, the first two mean nothing.
    """
    return best_of(linear_float32(x, weight))


def best_of(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the largest element of each row [n, size], fp32, as `linear_argmax` does."""
    largest, ids = rows.max(-1)
    # Instead of a test of every element: infinity is the largest or the smallest one, and NaN is both.
    return ids, largest, torch.isfinite(largest) & torch.isfinite(rows.amin(-1))


def _before_zeros(x: Tensor) -> Tensor:
    """Puts zeros behind each row [n, in_features] of bf16 where oneDNN would read what stands there.

    On a CPU with AMX it reads rows in steps of 32 elements, and a neighbour's NaN times 0 is NaN.
    """
    in_features = x.shape[1]
    if x.is_cuda or x.dtype != torch.bfloat16 or in_features % _ONEDNN_STEP == 0:
        return x
    return F.pad(x, (0, -in_features % _ONEDNN_STEP))[:, :in_features]


def _matmul_by_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Computes x @ weight.T in fp32, converting a few rows of the weight at a time rather than keeping a second copy of it."""
    x = x.to(torch.float32)
    out_features, in_features = weight.shape
    result = x.new_empty(x.shape[0], out_features)
    rows = max(_CONVERTED_BYTES // (4 * in_features), 1)
    for start in range(0, out_features, rows):
        part = weight[start : start + rows]
        torch.mm(x, part.to(torch.float32).t(), out=result[:, start : start + part.shape[0]])
    return result


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _linear_float32_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)


def _linear_argmax_fake(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtypes = (torch.int64, torch.float32, torch.bool)
    ids, largest, is_finite = (x.new_empty(x.shape[0], dtype=dtype) for dtype in dtypes)
    return ids, largest, is_finite


class _Product(CustomOp):
    """What the products have in common: the weight is packed for the C++ kernels, or stays as it is.

    Args:
        out_features: of the weight [out_features, in_features].
        ops: the settings of the model's ops.
    """

    # Its weight is stored for one of them.
    has_one_form = True

    def __init__(
        self,
        out_features: int,
        *,
        ops: OpSettings,
        enforce_enable: bool = False,
        cpu_obstacle: str = "",
        replacement_obstacle: str = "",
    ) -> None:
        super().__init__(
            ops=ops,
            enforce_enable=enforce_enable,
            cpu_obstacle=cpu_obstacle or ops.kernels_obstacle,
            replacement_obstacle=replacement_obstacle,
        )
        self.out_features = out_features
        self._library = ops.kernels

    @property
    def is_packed(self) -> bool:
        """Whether what runs reads a weight that `pack` made: the kernel does. Replacements read it as it was loaded."""
        return self.choice.implementation == CPP

    @property
    def packing_obstacle(self) -> str:
        """Why a replacement of an op on the same weight can't read it: it is packed; "" where it isn't."""
        if not self.is_packed:
            return ""
        return f"the weight is packed for {self.op_name}, and only kernels read it (custom_ops: -{self.op_name} leaves it unpacked)"

    def pack(self, weight: Tensor, arena: WeightArena) -> Tensor:
        """Packs a weight [out_features, in_features] where the op takes it packed; otherwise it is returned as it is."""
        if self._library is None or not self.is_packed:
            return weight
        return pack_weight(self._library, weight, arena)


@CustomOp.register("linear", dynamic_arg_dims={"x": 0})
class Linear(_Product):
    """Computes x @ weight.T + bias."""

    __call__: Callable[..., Tensor]

    def __init__(self, out_features: int, *, ops: OpSettings) -> None:
        super().__init__(out_features, ops=ops)
        if ops.kernels is not None:
            self._kernel = ops.kernels.ops.linear.default

    def forward_native(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Takes the arguments of `linear`."""
        return linear(x, weight, bias)

    def forward_cpu(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As `forward_native`, with a packed weight, by the C++ kernel."""
        result: Tensor = self._kernel(x, weight, bias, self.out_features)
        return result


@CustomOp.register("linear_float32", dynamic_arg_dims={"x": 0})
class LinearFloat32(_Product):
    """Computes x @ weight.T in fp32, as a head does."""

    __call__: Callable[..., Tensor]

    def __init__(self, out_features: int, *, ops: OpSettings) -> None:
        super().__init__(out_features, ops=ops)
        if ops.kernels is not None:
            self._kernel = ops.kernels.ops.linear_float32.default

    def forward_native(self, x: Tensor, weight: Tensor) -> Tensor:
        """Takes the arguments of `linear_float32`."""
        return linear_float32(x, weight)

    def forward_cpu(self, x: Tensor, weight: Tensor) -> Tensor:
        """As `forward_native`, with a packed weight, by the C++ kernel."""
        result: Tensor = self._kernel(x, weight, self.out_features)
        return result


@CustomOp.register("linear_argmax", dynamic_arg_dims={"x": 0})
class LinearArgmax(_Product):
    """Finds the largest element of each row of a product, without storing them all.

    Args:
        product: the product with the same weight: this op follows it, for there is one copy of the weight.
        ops: the settings of the model's ops.
    """

    __call__: Callable[..., tuple[Tensor, Tensor, Tensor]]

    def __init__(self, product: LinearFloat32, *, ops: OpSettings) -> None:
        obstacle = (
            "" if product.is_packed else f"the weight is not packed, because {product.op_name} is {product.choice.implementation}"
        )
        super().__init__(
            product.out_features,
            ops=ops,
            enforce_enable=product.is_packed,
            cpu_obstacle=obstacle,
            replacement_obstacle=product.packing_obstacle,
        )
        if ops.kernels is not None:
            self._kernel = ops.kernels.ops.linear_argmax.default

    def forward_native(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Takes the arguments of `linear_argmax`."""
        return linear_argmax(x, weight)

    def forward_cpu(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As `forward_native`, with a packed weight, by the C++ kernel."""
        ids, largest, is_finite = self._kernel(x, weight, self.out_features)
        return ids, largest, is_finite


register_op(linear, fake=_linear_fake)
register_op(linear_float32, fake=_linear_float32_fake)
register_op(linear_argmax, fake=_linear_argmax_fake)
