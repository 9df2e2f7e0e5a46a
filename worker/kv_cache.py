"""The paged KV cache: how large it may be, and its memory.

Per layer there are two tensors [num_blocks, num_kv_heads, block_size, head_dim], head-major within a block, so that a KV head's
tokens lie together. Block 0 is the null block: it belongs to nobody and fills the tails of block tables.
"""

import contextlib
import hashlib
import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from modelworker.worker.description import KvCacheDescription
from modelworker.worker.errors import SettingsError
from modelworker.worker.settings import KvCacheSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class KvCacheGeometry:
    """What the size of a block follows from. `num_kv_heads` are those of this rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    @property
    def layout_fingerprint(self) -> str:
        """Equal exactly when the blocks of two caches have one layout."""
        text = f"heads-first/{self.num_layers}/{self.num_kv_heads}/{self.block_size}/{self.head_dim}/{self.dtype}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def choose_num_blocks(settings: KvCacheSettings, geometry: KvCacheGeometry, *, max_model_len: int, free_bytes: int) -> int:
    """Returns the number of blocks, the null block included.

    Args:
        settings: the first that is given of num_blocks, memory and fraction decides.
        geometry: of the cache.
        max_model_len: a sequence of this length must fit.
        free_bytes: memory that is free on the device once the model is loaded, without what graphs will take.

    Raises:
        SettingsError: the cache would be larger than the free memory, or hold less than one sequence.
    """
    if settings.num_blocks is not None:
        num_blocks, source = settings.num_blocks, f"--num-blocks {settings.num_blocks}"
    elif settings.kv_cache_memory is not None:
        num_blocks, source = settings.kv_cache_memory // geometry.bytes_per_block, f"--kv-cache-memory {settings.kv_cache_memory}"
    else:
        num_blocks = int(max(free_bytes, 0) * settings.kv_cache_fraction) // geometry.bytes_per_block
        source = f"--kv-cache-fraction {settings.kv_cache_fraction:g} of {max(free_bytes, 0)} free bytes"
    needed = -(-max_model_len // geometry.block_size) + 1
    if num_blocks < needed:
        raise SettingsError(
            f"{source} gives {num_blocks} KV cache blocks, but one sequence of max_model_len {max_model_len} needs {needed} "
            f"(block_size {geometry.block_size}, the null block included): lower --max-model-len, or allow at least "
            f"--kv-cache-memory {needed * geometry.bytes_per_block}"
        )
    if num_blocks * geometry.bytes_per_block > free_bytes:
        raise SettingsError(
            f"{source} needs {num_blocks * geometry.bytes_per_block} bytes for the KV cache, but only {max(free_bytes, 0)} "
            "are free for it"
        )
    return num_blocks


class KvCache:
    """The memory of the cache, zeroed. On the CPU it is one anonymous mapping: pages cost nothing until they are written."""

    def __init__(self, geometry: KvCacheGeometry, num_blocks: int, device: torch.device) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self._mapping: mmap.mmap | None = None
        shape = (num_blocks, geometry.num_kv_heads, geometry.block_size, geometry.head_dim)
        num_tensors, num_elements = 2 * geometry.num_layers, math.prod(shape)
        if device.type == "cpu":
            self._mapping = mmap.mmap(-1, num_blocks * geometry.bytes_per_block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                # A system without huge pages does without.
                with contextlib.suppress(OSError):
                    self._mapping.madvise(mmap.MADV_HUGEPAGE)
            size = num_elements * geometry.dtype.itemsize
            tensors = [
                torch.frombuffer(self._mapping, dtype=geometry.dtype, count=num_elements, offset=index * size).view(shape)
                for index in range(num_tensors)
            ]
        else:
            tensors = [torch.zeros(shape, dtype=geometry.dtype, device=device) for _ in range(num_tensors)]
        # Each is a storage of its own: a compiler must see that a write to one leaves the others as they are.
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(zip(tensors[::2], tensors[1::2], strict=True))

    def zero(self) -> None:
        """Fills the whole cache with zeros, at the same addresses."""
        if self._mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            # Private anonymous pages come back as zeros, and until then cost neither memory nor time.
            self._mapping.madvise(mmap.MADV_DONTNEED)
        else:
            for layer in self.layers:
                for cache in layer:
                    cache.zero_()

    def describe(self) -> KvCacheDescription:
        """Returns what WorkerInfo says of the cache."""
        return KvCacheDescription(
            dtype=str(self.geometry.dtype).removeprefix("torch."),
            layout_fingerprint=self.geometry.layout_fingerprint,
            block_size=self.geometry.block_size,
            num_blocks=self.num_blocks,
            bytes_per_block=self.geometry.bytes_per_block,
        )
