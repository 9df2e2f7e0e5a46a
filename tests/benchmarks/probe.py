"""The machine's limits, measured in the process and the rounds that they are compared with.

Read bandwidth: a C loop of all threads over 512 MiB on huge pages, beyond every cache that is this process's alone. Matrix rate:
the best product of a list of shapes, through `torch.mm` and through oneDNN with a packed weight.
"""

import time

import torch
from torch import Tensor

from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.cpu.packing import advise_huge_pages

_BUFFER_BYTES = 512 << 20
_MATRIX_SHAPES = ((256, 2048, 8192), (512, 2048, 8192), (512, 2048, 3072), (1024, 2048, 2048))


class Probe:
    """Measures the limits; every call is one round.

    Args:
        library: whose threads read.
        dtype: of the products.
    """

    def __init__(self, library: CpuLibrary, dtype: torch.dtype = torch.bfloat16) -> None:
        self._read_seconds = library.functions.modelworker_read_seconds
        buffer = torch.empty(_BUFFER_BYTES + (2 << 20), dtype=torch.uint8)
        self._buffer = buffer[-buffer.data_ptr() % (2 << 20) :][:_BUFFER_BYTES]
        self.has_huge_pages = advise_huge_pages(self._buffer)
        self._buffer.random_()
        self._products = [(torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)) for m, k, n in _MATRIX_SHAPES]
        self._packed = [pack_onednn(weight, x.shape[0]) for x, weight in self._products]

    def read_bandwidth(self) -> float:
        """Reads the buffer once and returns bytes per second."""
        return float(_BUFFER_BYTES / self._read_seconds(self._buffer.data_ptr(), _BUFFER_BYTES))

    def matrix_rate(self) -> float:
        """Multiplies each shape once per way and returns the best rate, in operations per second."""
        best = 0.0
        for (x, weight), packed in zip(self._products, self._packed, strict=True):
            operations = 2 * x.shape[0] * weight.numel()
            for product in (
                lambda x=x, weight=weight: torch.mm(x, weight.t()),
                lambda x=x, packed=packed: linear_onednn(x, packed),
            ):
                begun = time.perf_counter()
                product()
                best = max(best, operations / (time.perf_counter() - begun))
        return best


def pack_onednn(weight: Tensor, num_rows: int) -> Tensor | None:
    """Packs a weight for oneDNN; None where it has no such path for the dtype."""
    if weight.dtype != torch.bfloat16 or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)


def linear_onednn(x: Tensor, packed: Tensor | None) -> Tensor | None:
    """Multiplies by a weight that was packed for oneDNN."""
    return None if packed is None else torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
