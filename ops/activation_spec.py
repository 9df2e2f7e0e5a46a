"""Reference and samples of silu_and_mul."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from modelworker.ops.op_spec import RETURNED, SampleShape, random_rows


def silu_and_mul_reference(x: Tensor) -> Mapping[str, Tensor]:
    """Computes gate / (1 + exp(-gate)) * up, where x = gate | up."""
    half = x.shape[-1] // 2
    gate, up = x[..., :half].double(), x[..., half:].double()
    return {RETURNED: gate / (1 + (-gate).exp()) * up}


def silu_and_mul_sample(shape: SampleShape) -> tuple[Any, ...]:
    """Makes x."""
    return (random_rows(shape, 2 * shape.variant["intermediate_size"], seed=1, scale=4.0),)
