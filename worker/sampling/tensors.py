"""Rows of tensors."""

import torch
from torch import Tensor

from modelworker.worker.batch import BoolArray, Float32Array, IndexArray, Int32Array, UInt8Array

Array = BoolArray | Float32Array | IndexArray | Int32Array | UInt8Array


def rows_of(values: Tensor, rows: Tensor) -> Tensor:
    """Returns some rows, ascending; without a copy if they are all."""
    return values if len(rows) == len(values) else values.index_select(0, rows)


def to_device(values: Array, device: torch.device) -> Tensor:
    """Returns an array as a tensor."""
    return torch.from_numpy(values).to(device)


def column(values: Array, device: torch.device) -> Tensor:
    """Returns an array [n] as a tensor [n, 1]."""
    return to_device(values, device).unsqueeze(1)
