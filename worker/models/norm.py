"""RMSNorm (https://arxiv.org/abs/1910.07467), alone and together with the addition before it."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from modelworker.worker.models.layer import CheckpointSlot, Layer, empty_parameter, whole_tensor


class RMSNorm(Layer):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32."""

    __call__: Callable[..., Tensor]
    weight: Tensor

    def __init__(self, size: int, *, eps: float, prefix: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.prefix = prefix
        self.register_parameter("weight", empty_parameter(size, dtype=dtype))

    def checkpoint_slots(self) -> Iterator[CheckpointSlot]:
        """Yields the slot of the weight."""
        yield whole_tensor(f"{self.prefix}.weight", self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Hot path: returns x [..., size], normalised."""
        output: Tensor = torch.ops.modelworker.rms_norm(x, self.weight, self.eps)
        return output

    def add(self, x: Tensor, residual: Tensor) -> None:
        """Hot path: adds x [num_tokens, size] to residual in place, and overwrites x with the normalised sum."""
        torch.ops.modelworker.fused_add_rms_norm(x, residual, self.weight, self.eps)
