"""Weights of products as the C++ kernels read them: packed once, in one copy, on huge pages where the system gives them."""

import ctypes
import mmap
from typing import Final

import torch
from torch import Tensor

from modelworker.ops.cpu.library import CpuLibrary

_BLOCK_OUTPUTS: Final = 32
_TILE_INPUTS: Final = 32
_STEP_BYTES: Final = 4
_HUGE_PAGE: Final = 2 << 20
_PAGE: Final = 4096
_CHUNK: Final = 64 << 20


class WeightArena:
    """Memory for packed weights that lie one behind the other, so that small matrices share huge pages, too.

    It is taken from the system 64 MiB at a time; what is never used of a piece costs no memory. A tensor keeps its piece alive.

    Attributes:
        has_huge_pages: whether the system agreed to use them for all memory so far.
    """

    def __init__(self) -> None:
        self.has_huge_pages = True
        self._rest = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns an unfilled tensor that starts on a page."""
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        if num_bytes > self._rest.numel():
            self._rest = self._new_piece(max(num_bytes, _CHUNK))
        used = min(-(-num_bytes // _PAGE) * _PAGE, self._rest.numel())
        tensor = self._rest[:num_bytes].view(dtype).view(shape)
        self._rest = self._rest[used:]
        return tensor

    def _new_piece(self, num_bytes: int) -> Tensor:
        piece = torch.empty(num_bytes + _HUGE_PAGE, dtype=torch.uint8)
        piece = piece[-piece.data_ptr() % _HUGE_PAGE :]
        self.has_huge_pages &= advise_huge_pages(piece)
        return piece


def advise_huge_pages(tensor: Tensor) -> bool:
    """Asks the system to back a tensor's whole pages with huge ones, before it is written; returns whether it agreed."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    start = -(-tensor.data_ptr() // _PAGE) * _PAGE
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // _PAGE * _PAGE
    if end <= start:
        return False
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_HUGEPAGE) == 0)


def packed_shape(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Returns the shape of a packed weight; packed.h describes it."""
    width = _STEP_BYTES // dtype.itemsize
    inputs = in_features if width == 1 else -(-in_features // _TILE_INPUTS) * _TILE_INPUTS
    return -(-out_features // _BLOCK_OUTPUTS), inputs // width, _BLOCK_OUTPUTS, width


def pack_weight(library: CpuLibrary, weight: Tensor, arena: WeightArena) -> Tensor:
    """Packs a weight.

    Args:
        library: the kernels.
        weight: [out_features, in_features], bf16 or fp32.
        arena: where the packed weight goes.

    Returns:
        [out_features / 32, in_features / inputs per step, 32, inputs per step], in weight's dtype.
    """
    out_features, in_features = weight.shape
    packed = arena.empty(packed_shape(out_features, in_features, weight.dtype), weight.dtype)
    library.ops.linear_pack(weight, packed)
    return packed
