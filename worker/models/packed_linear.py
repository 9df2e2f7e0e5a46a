"""Linear layers, heads and embeddings on weights packed once for the C++ kernels: one copy in memory, tied heads included."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.cpu.packing import WeightArena, argmax_scratch_bytes, pack_weight
from modelworker.worker.models.layer import CheckpointSlot, empty_parameter
from modelworker.worker.models.weight_part import WeightPart

_PACKED = "packed_weight"


class PackedProducts:
    """What the packed layers of a model share.

    Attributes:
        library: the kernels.
        arena: where the packed weights are.
        max_rows: how many rows a product may have at most.
        scratch: memory that products use while they run, one after the other. It is final once all layers are loaded.
    """

    def __init__(self, library: CpuLibrary, *, max_rows: int) -> None:
        self.library = library
        self.arena = WeightArena()
        self.max_rows = max_rows
        self.scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def reserve(self, num_bytes: int) -> None:
        """Makes the scratch at least so large."""
        if num_bytes > self.scratch.numel():
            self.scratch = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


class PackedLinearMethod:
    """Stores `packed_weight`, which takes the place of `weight` [out_features, in_features] after loading. One per layer.

    Args:
        products: what all layers of the model share.
    """

    def __init__(self, products: PackedProducts) -> None:
        self.products = products
        self.out_features = 0
        self.in_features = 0

    def create_weights(self, layer: nn.Module, *, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        """Registers `weight`, as the checkpoint has it."""
        self.in_features, self.out_features = in_features, out_features
        layer.register_parameter("weight", empty_parameter(out_features, in_features, dtype=dtype))

    def checkpoint_slots(self, layer: nn.Module, prefix: str, parts: tuple[WeightPart, ...]) -> Iterator[CheckpointSlot]:
        """Yields one slot per part of `weight`."""
        for part in parts:
            yield part.weight_slot(f"{prefix}.weight")

    def process_after_loading(self, layer: nn.Module) -> None:
        """Packs `weight` and frees it."""
        weight = layer.get_parameter("weight")
        # More rows never need less, so this serves every step.
        self.products.reserve(
            argmax_scratch_bytes(self.products.library, self.products.max_rows, self.in_features, self.out_features, weight.dtype)
        )
        packed = pack_weight(self.products.library, weight.detach(), self.products.arena)
        del layer.weight
        layer.register_parameter(_PACKED, nn.Parameter(packed, requires_grad=False))

    def share(self, layer: nn.Module, other: nn.Module, *, in_features: int, out_features: int) -> None:
        """Lets a layer use the packed weight of another one, such as a tied head its embedding's."""
        self.in_features, self.out_features = in_features, out_features
        if "weight" in layer._parameters:
            del layer.weight
        layer.register_parameter(_PACKED, other.get_parameter(_PACKED))

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        """Hot path: x @ weight.T + bias, summed in float32 and rounded once."""
        products = self.products
        result: Tensor = products.library.ops.linear(x, layer.get_parameter(_PACKED), bias, self.out_features, products.scratch)
        return result

    def apply_float32(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Hot path: x @ weight.T in float32."""
        products = self.products
        result: Tensor = products.library.ops.linear_float32(x, layer.get_parameter(_PACKED), self.out_features, products.scratch)
        return result

    def apply_argmax(self, layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hot path: finds the largest element of each row of x @ weight.T, without storing them all.

        Returns:
            [num_tokens] each: the ids, int64, the lowest of equal ones; the largest elements, float32; whether all elements of the
            row are finite, bool.
        """
        products = self.products
        ids, largest, is_finite = products.library.ops.linear_argmax(
            x, layer.get_parameter(_PACKED), self.out_features, products.scratch
        )
        return ids, largest, is_finite

    def embed(self, layer: nn.Module, token_ids: Tensor) -> Tensor:
        """Hot path: looks token_ids [num_tokens] up and returns [num_tokens, in_features]; NaN for an id that there isn't."""
        result: Tensor = self.products.library.ops.packed_embedding(
            token_ids, layer.get_parameter(_PACKED), self.out_features, self.in_features
        )
        return result
