"""Reference and samples of rms_norm and fused_add_rms_norm."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from modelworker.ops.op_spec import RETURNED, SampleShape, random, random_rows

_EPS = 1e-5


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Mapping[str, Tensor]:
    """Computes x_i / sqrt(sum_j x_j^2 / n + eps) * weight_i."""
    return {RETURNED: _norm(x.double(), weight, eps)}


def rms_norm_sample(shape: SampleShape) -> tuple[Any, ...]:
    """Makes x, weight and eps."""
    size = shape.variant["hidden_size"]
    return random_rows(shape, size, seed=1), random(shape, size, seed=2), _EPS


def fused_add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Mapping[str, Tensor]:
    """Computes residual + x, and its norm."""
    total = residual.double() + x.double()
    return {"x": _norm(total, weight, eps), "residual": total}


def fused_add_rms_norm_sample(shape: SampleShape) -> tuple[Any, ...]:
    """Makes x, residual, weight and eps."""
    x, weight, eps = rms_norm_sample(shape)
    return x, random_rows(shape, shape.variant["hidden_size"], seed=3), weight, eps


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    mean_square = (x * x).sum(-1, keepdim=True) / x.shape[-1]
    return x / (mean_square + eps) ** 0.5 * weight.double()
