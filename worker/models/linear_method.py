"""How a linear layer stores and applies its weight. One class per quantization; this one is for none."""

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelworker.worker.models.layer import CheckpointSlot, empty_parameter
from modelworker.worker.models.weight_part import WeightPart

# float32 bytes of the head's weight converted at a time: small enough to stay in a core's L2 cache until it is multiplied.
_CONVERTED_BYTES = 1 << 20


class LinearMethod(Protocol):
    """Owns the weight of a linear layer, in whatever form it is stored."""

    def create_weights(self, layer: nn.Module, *, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        """Registers the layer's parameters, unfilled. The sizes are those of this rank."""

    def checkpoint_slots(self, layer: nn.Module, prefix: str, parts: tuple[WeightPart, ...]) -> Iterator[CheckpointSlot]:
        """Yields what fills these parameters."""

    def process_after_loading(self, layer: nn.Module) -> None:
        """Packs, transposes or requantizes the filled parameters."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Hot path: multiplies x [num_tokens, in_features] and returns [num_tokens, out_features] in x's dtype."""

    def apply_float32(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Hot path: the same without a bias, returned as the float32 sums, never rounded to x's dtype."""


class UnquantizedLinearMethod:
    """Stores `weight` [out_features, in_features] in the model's dtype."""

    def create_weights(self, layer: nn.Module, *, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        """Registers `weight`."""
        layer.register_parameter("weight", empty_parameter(out_features, in_features, dtype=dtype))

    def checkpoint_slots(self, layer: nn.Module, prefix: str, parts: tuple[WeightPart, ...]) -> Iterator[CheckpointSlot]:
        """Yields one slot per part of `weight`."""
        for part in parts:
            yield part.weight_slot(f"{prefix}.weight")

    def process_after_loading(self, layer: nn.Module) -> None:
        """Does nothing: the weight is used as it is loaded."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Hot path: x @ weight.T + bias."""
        return F.linear(x, layer.get_parameter("weight"), bias)

    def apply_float32(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Hot path: x @ weight.T in float32."""
        weight = layer.get_parameter("weight")
        if weight.dtype == torch.float32:
            return F.linear(x, weight)
        if weight.is_cuda:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return _matmul_by_rows(x, weight)


def _matmul_by_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Computes x @ weight.T in float32, converting a few rows of the weight at a time rather than keeping a second copy of it."""
    x = x.to(torch.float32)
    out_features, in_features = weight.shape
    result = x.new_empty(x.shape[0], out_features)
    rows = max(_CONVERTED_BYTES // (4 * in_features), 1)
    for start in range(0, out_features, rows):
        part = weight[start : start + rows]
        torch.mm(x, part.to(torch.float32).t(), out=result[:, start : start + part.shape[0]])
    return result
