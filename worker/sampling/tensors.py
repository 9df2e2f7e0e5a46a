"""Rows of tensors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from modelworker.worker.arrays import BoolArray, Float32Array, IndexArray, Int32Array, UInt8Array

Array = BoolArray | Float32Array | IndexArray | Int32Array | UInt8Array


def rows_of(values: Tensor, rows: Tensor) -> Tensor:
    """Returns some rows, ascending; without a copy if they are all."""
    return values if len(rows) == len(values) else values.index_select(0, rows)


def to_device(values: Array, device: torch.device) -> Tensor:
    """Returns an array as a tensor."""
    return torch.from_numpy(values).to(device)


def to_device_together(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Returns arrays as tensors, in one transfer. The widest elements come first in it, so that all are aligned."""
    order = sorted(range(len(arrays)), key=lambda index: -arrays[index].itemsize)
    memory = to_device(np.concatenate([arrays[index].view(np.uint8) for index in order]), device)
    parts = memory.split([arrays[index].nbytes for index in order])
    found = {index: part.view(torch.from_numpy(arrays[index]).dtype) for index, part in zip(order, parts, strict=True)}
    return [found[index] for index in range(len(arrays))]


def column(values: Array, device: torch.device) -> Tensor:
    """Returns an array [n] as a tensor [n, 1]."""
    return to_device(values, device).unsqueeze(1)
