"""What every layer has in common: it is made empty, says what it needs from a checkpoint, and is finished after loading."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelworker.ops.cpu.packing import WeightArena


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSlot:
    """Where one tensor of a checkpoint goes: a range of it, along one dimension, fills a range of a parameter.

    Attributes:
        name: of the tensor in the checkpoint.
        shape: that the tensor must have.
        parameter: qualified name in the model; None: the tensor belongs to the model, but this rank needs nothing of it.
        dim: along which both are cut.
        source_start: where the range starts in the tensor.
        target_start: where it starts in the parameter.
        length: of the range.
    """

    name: str
    shape: tuple[int, ...]
    parameter: str | None
    dim: int = 0
    source_start: int = 0
    target_start: int = 0
    length: int = 0


class Layer(nn.Module):
    """A module with parameters that a checkpoint fills.

    Constructors allocate nothing when run under `torch.device("meta")`.
    """

    def checkpoint_slots(self) -> Iterator[CheckpointSlot]:
        """Yields the tensors that fill this layer's own parameters, each part of a stacked one separately."""
        yield from ()

    def process_after_loading(self, device: torch.device, arena: WeightArena) -> None:
        """Finishes the layer once its parameters are filled: computes tables on the device, packs weights into the arena."""


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Makes an unfilled parameter that needs no gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def replace_parameter(layer: nn.Module, name: str, tensor: Tensor) -> None:
    """Puts a tensor in a parameter's place, unless it is that parameter."""
    if tensor is not layer.get_parameter(name):
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def whole_tensor(parameter: str, tensor: Tensor) -> CheckpointSlot:
    """The slot of a parameter that is filled by the checkpoint's tensor of the same name and shape."""
    return CheckpointSlot(name=parameter, shape=tuple(tensor.shape), parameter=parameter, length=tensor.shape[0])
