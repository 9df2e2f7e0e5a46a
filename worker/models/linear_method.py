"""How a linear layer stores and applies its weight. One class per quantization; this one is for none."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from modelworker.ops.cpu.packing import WeightArena
from modelworker.ops.linear import Linear
from modelworker.ops.op_settings import OpSettings
from modelworker.worker.models.layer import CheckpointSlot, empty_parameter, replace_parameter
from modelworker.worker.models.weight_part import WeightPart


class LinearMethod(Protocol):
    """Owns the weight of a linear layer, in whatever form it is stored."""

    def create_weights(self, layer: nn.Module, *, in_features: int, out_features: int, dtype: torch.dtype, ops: OpSettings) -> None:
        """Registers the layer's ops, and its parameters, unfilled. The sizes are those of this rank."""

    def checkpoint_slots(self, layer: nn.Module, prefix: str, parts: tuple[WeightPart, ...]) -> Iterator[CheckpointSlot]:
        """Yields what fills these parameters."""

    def process_after_loading(self, layer: nn.Module, arena: WeightArena) -> None:
        """Packs, transposes or requantizes the filled parameters; what is packed goes into the arena."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Hot path: multiplies x [num_tokens, in_features] and returns [num_tokens, out_features] in x's dtype."""


class UnquantizedLinearMethod:
    """Stores `weight` [out_features, in_features] in the model's dtype, packed where `Linear` takes it so."""

    def create_weights(self, layer: nn.Module, *, in_features: int, out_features: int, dtype: torch.dtype, ops: OpSettings) -> None:
        """Registers `product` and `weight`."""
        layer.product = Linear(out_features, ops=ops)
        layer.register_parameter("weight", empty_parameter(out_features, in_features, dtype=dtype))

    def checkpoint_slots(self, layer: nn.Module, prefix: str, parts: tuple[WeightPart, ...]) -> Iterator[CheckpointSlot]:
        """Yields one slot per part of `weight`."""
        for part in parts:
            yield part.weight_slot(f"{prefix}.weight")

    def process_after_loading(self, layer: nn.Module, arena: WeightArena) -> None:
        """Packs the weight where the product takes it packed."""
        product = layer.product
        assert isinstance(product, Linear)
        replace_parameter(layer, "weight", product.pack(layer.get_parameter("weight"), arena))

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Hot path: x @ weight.T + bias."""
        result: Tensor = layer.product(x, layer.weight, bias)  # type: ignore[operator]
        return result
