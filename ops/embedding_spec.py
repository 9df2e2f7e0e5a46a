"""Reference and samples of embedding."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modelworker.ops.op_spec import RETURNED, SampleShape, padded, random


def embedding_reference(weight: Tensor, ids: Tensor) -> Mapping[str, Tensor]:
    """Copies row after row."""
    rows = [weight[row].double() for row in ids.tolist()]
    return {RETURNED: torch.stack(rows) if rows else torch.empty(0, weight.shape[1], dtype=torch.float64)}


def embedding_sample(shape: SampleShape) -> tuple[Any, ...]:
    """Makes a table, and ids in no order, the first and the last row among them."""
    num_rows, size = shape.variant["num_rows"], shape.variant["size"]
    ids = (torch.arange(shape.num_tokens, dtype=torch.int32) * (num_rows - 1) + shape.draw) % num_rows
    return padded(random(shape, num_rows, size, seed=1), shape.padding), ids
