"""References, samples and C++ forms of linear, linear_float32 and linear_argmax."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.cpu.packing import WeightArena, pack_weight
from modelworker.ops.op_spec import RETURNED, SampleShape, random, random_rows, returned_at


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Mapping[str, Tensor]:
    """Computes sum_j x_j weight_ij + bias_i."""
    product = x.double() @ weight.double().T
    return {RETURNED: product if bias is None else product + bias.double()}


def linear_sample(shape: SampleShape) -> tuple[Any, ...]:
    """Makes x, a weight that keeps the size of its rows, and a bias where the variant has one."""
    x, weight = linear_float32_sample(shape)
    return x, weight, random(shape, weight.shape[0], seed=3) if shape.variant["bias"] else None


def linear_float32_reference(x: Tensor, weight: Tensor) -> Mapping[str, Tensor]:
    """Computes sum_j x_j weight_ij."""
    return linear_reference(x, weight, None)


def linear_float32_sample(shape: SampleShape) -> tuple[Tensor, Tensor]:
    """Makes x and weight."""
    in_features, out_features = shape.variant["in_features"], shape.variant["out_features"]
    weight = random(shape, out_features, in_features, seed=2, scale=in_features**-0.5)
    return random_rows(shape, in_features, seed=1), weight


def linear_argmax_reference(x: Tensor, weight: Tensor) -> Mapping[str, Tensor]:
    """Finds the first of the largest elements, and whether no sum is infinite or NaN."""
    product = x.double() @ weight.double().T
    largest = product.amax(1)
    ids = (product == largest.unsqueeze(1)).double().argmax(1)
    return {returned_at(0): ids.double(), returned_at(1): largest, returned_at(2): product.isfinite().all(1).double()}


def packed(name: str, *, with_bias: bool) -> Callable[[CpuLibrary], Callable[..., Any]]:
    """Returns what makes the C++ form of a product, which packs the weight that the op is given."""

    def of(library: CpuLibrary) -> Callable[..., Any]:
        op = getattr(library.ops, name)

        def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
            packed_weight = pack_weight(library, weight, WeightArena())
            return op(x, packed_weight, bias, weight.shape[0]) if with_bias else op(x, packed_weight, weight.shape[0])

        return run

    return of
