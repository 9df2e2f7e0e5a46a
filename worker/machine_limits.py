"""The limits of a machine, measured: how fast it reads memory, and how fast it multiplies matrices."""

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.cpu.packing import WeightArena

_BUFFER_BYTES = 256 << 20
_ROUNDS = 5
# [rows, inputs, outputs] of the products among which the best rate is found: those of models of 135M to 8B parameters.
_PRODUCTS = ((256, 2048, 8192), (512, 576, 3072), (512, 1536, 576), (512, 2048, 8192), (1024, 2048, 2048))


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineLimits:
    """What a step can't beat.

    Attributes:
        read_bytes_per_second: from memory, by all threads.
        operations_per_second: of matrix products in the model's dtype.
    """

    read_bytes_per_second: float
    operations_per_second: float


class LimitProbe:
    """Measures the limits, in rounds between the rounds of what is held against them.

    Args:
        device: where the model computes.
        dtype: of the model.
        kernels: of the CPU; without them reading is measured by torch's sum, which is slower.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, kernels: CpuLibrary | None) -> None:
        self._device = device
        self._kernels = kernels
        self._buffer = _filled_buffer(device)
        self._products = [
            (torch.randn(rows, inputs, dtype=dtype, device=device), torch.randn(outputs, inputs, dtype=dtype, device=device))
            for rows, inputs, outputs in _PRODUCTS
        ]

    def measure(self) -> MachineLimits:
        """Measures for about half a second."""
        reads = [self._read_seconds() for _ in range(_ROUNDS)]
        rates = [max(self._rate(x, weight) for x, weight in self._products) for _ in range(2)]
        return MachineLimits(read_bytes_per_second=_BUFFER_BYTES / statistics.median(reads), operations_per_second=max(rates))

    def _read_seconds(self) -> float:
        if self._kernels is not None:
            address = ctypes.c_void_p(self._buffer.data_ptr())
            return float(self._kernels.functions.modelworker_read_seconds(address, ctypes.c_int64(_BUFFER_BYTES)))
        return self._timed(lambda: self._buffer.view(torch.int64).sum())

    def _rate(self, x: Tensor, weight: Tensor) -> float:
        return 2 * x.shape[0] * weight.numel() / self._timed(lambda: torch.mm(x, weight.t()))

    def _timed(self, run: Callable[[], object]) -> float:
        begun = time.perf_counter()
        run()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - begun


def _filled_buffer(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.randint(0, 255, (_BUFFER_BYTES,), dtype=torch.uint8, device=device)
    buffer = WeightArena().empty((_BUFFER_BYTES,), torch.uint8)
    # Pages that nobody has written are one page of zeros.
    return buffer.random_()
