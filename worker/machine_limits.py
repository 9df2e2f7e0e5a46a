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
# Far beyond a GPU's caches, and long enough for the launch not to matter.
_CUDA_BUFFER_BYTES = 1 << 30
_ROUNDS = 5
# [rows, inputs, outputs] of the products among which the best rate is found: those of models of 135M to 8B parameters.
_PRODUCTS = ((256, 2048, 8192), (512, 576, 3072), (512, 1536, 576), (512, 2048, 8192), (1024, 2048, 2048))
# On a GPU those would be over before they are measured.
_CUDA_PRODUCTS = ((4096, 2048, 8192), (4096, 4096, 14336), (8192, 4096, 4096), (8192, 8192, 8192))


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineLimits:
    """What a step can't beat.

    Attributes:
        read_bytes_per_second: from memory, by all threads; on a GPU, bytes read and written by a copy.
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
        self._is_cuda = device.type == "cuda"
        self._buffer = _filled_buffer(device)
        self._copy = torch.empty_like(self._buffer) if self._is_cuda else None
        self._products = [
            (torch.randn(rows, inputs, dtype=dtype, device=device), torch.randn(outputs, inputs, dtype=dtype, device=device))
            for rows, inputs, outputs in (_CUDA_PRODUCTS if self._is_cuda else _PRODUCTS)
        ]

    def measure(self) -> MachineLimits:
        """Measures for about half a second."""
        reads = [self._bytes_per_second() for _ in range(_ROUNDS)]
        rates = [max(self._rate(x, weight) for x, weight in self._products) for _ in range(2)]
        return MachineLimits(read_bytes_per_second=statistics.median(reads), operations_per_second=max(rates))

    def _bytes_per_second(self) -> float:
        buffer, copy = self._buffer, self._copy
        if copy is not None:
            return 2 * buffer.nbytes / self._seconds(lambda: copy.copy_(buffer))
        if self._kernels is not None:
            address, size = ctypes.c_void_p(buffer.data_ptr()), ctypes.c_int64(buffer.nbytes)
            return buffer.nbytes / float(self._kernels.functions.modelworker_read_seconds(address, size))
        return buffer.nbytes / self._seconds(lambda: buffer.view(torch.int64).sum())

    def _rate(self, x: Tensor, weight: Tensor) -> float:
        return 2 * x.shape[0] * weight.numel() / self._seconds(lambda: torch.mm(x, weight.t()))

    def _seconds(self, run: Callable[[], object]) -> float:
        if self._is_cuda:
            return _device_seconds(run)
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun


def _device_seconds(run: Callable[[], object]) -> float:
    """Returns how long the GPU works on what is launched: its own clock, as launching takes the host longer than a short kernel."""
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    run()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended)) / 1000


def _filled_buffer(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.empty(_CUDA_BUFFER_BYTES, dtype=torch.uint8, device=device).random_()
    buffer = WeightArena().empty((_BUFFER_BYTES,), torch.uint8)
    # Pages that nobody has written are one page of zeros.
    return buffer.random_()
