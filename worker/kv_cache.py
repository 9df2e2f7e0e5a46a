"""The paged KV cache: how large it may be, and its memory.

Per layer there are two tensors [num_blocks, num_kv_heads, block_size, head_dim], head-major within a block, so that a KV head's
tokens lie together. Block 0 is the null block: it belongs to nobody and fills the tails of block tables.
"""

import contextlib
import hashlib
import math
import mmap
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelworker.worker.batch import Int32Array, Int64Array
from modelworker.worker.copy_rounds import plan_copies
from modelworker.worker.description import KvCacheDescription
from modelworker.worker.errors import SettingsError
from modelworker.worker.settings import KvCacheSettings

# 64 blocks of one layer's keys, for an 8B model with blocks of 32: 4 MiB.
_MAX_COPIES_AT_ONCE = 64


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
        more = (
            f"--num-blocks {needed}"
            if settings.num_blocks is not None
            else f"--kv-cache-memory {needed * geometry.bytes_per_block}"
        )
        raise SettingsError(
            f"{source} gives {num_blocks} KV cache blocks, but one sequence of max_model_len {max_model_len} needs {needed} "
            f"(block_size {geometry.block_size}, the null block included): lower --max-model-len, or allow at least {more}"
        )
    if num_blocks * geometry.bytes_per_block > free_bytes:
        raise SettingsError(
            f"{source} needs {num_blocks * geometry.bytes_per_block} bytes for the KV cache, but only {max(free_bytes, 0)} "
            "are free for it"
        )
    return num_blocks


class KvCache:
    """The memory of the cache, zeroed.

    On the CPU it is one anonymous mapping: pages cost nothing until they are written. They are small ones until `use_huge_pages`.
    """

    def __init__(self, geometry: KvCacheGeometry, num_blocks: int, device: torch.device) -> None:
        self.geometry = geometry
        self.num_blocks = num_blocks
        self._mapping: mmap.mmap | None = None
        shape = (num_blocks, geometry.num_kv_heads, geometry.block_size, geometry.head_dim)
        num_tensors, num_elements = 2 * geometry.num_layers, math.prod(shape)
        if device.type == "cpu":
            self._mapping = mmap.mmap(-1, num_blocks * geometry.bytes_per_block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._advise("MADV_NOHUGEPAGE")
            size = num_elements * geometry.dtype.itemsize
            tensors = [
                torch.frombuffer(self._mapping, dtype=geometry.dtype, count=num_elements, offset=index * size).view(shape)
                for index in range(num_tensors)
            ]
        else:
            tensors = [torch.zeros(shape, dtype=geometry.dtype, device=device) for _ in range(num_tensors)]
        # Each is a storage of its own: a compiler must see that a write to one leaves the others as they are.
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(zip(tensors[::2], tensors[1::2], strict=True))
        self._device = device
        self._copied = torch.empty((min(_MAX_COPIES_AT_ONCE, num_blocks), *shape[1:]), dtype=geometry.dtype, device=device)

    def use_huge_pages(self) -> None:
        """Has what is written for the first time from now on backed by huge pages, where the system has some.

        Steps read a few percent faster from them. Checks before that write to blocks all over the cache: of a cache of 15 GiB they
        would make 7 GiB resident, and take 8 s longer.
        """
        self._advise("MADV_HUGEPAGE")

    def zero(self) -> None:
        """Fills the whole cache with zeros, at the same addresses."""
        if self._mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            # Private anonymous pages come back as zeros, and until then cost neither memory nor time.
            self._mapping.madvise(mmap.MADV_DONTNEED)
        else:
            for layer in self.layers:
                for cache in layer:
                    cache.zero_()

    def zero_blocks(self, block_ids: Int32Array) -> None:
        """Hot path: fills blocks with zeros in all layers."""
        if not len(block_ids):
            return
        blocks = self._indices(block_ids)
        for layer in self.layers:
            for cache in layer:
                cache.index_fill_(0, blocks, 0)

    def copy_blocks(self, source_ids: Int32Array, destination_ids: Int32Array) -> None:
        """Hot path: copies blocks in all layers, as if all sources were read before any destination is written.

        Takes no memory but what was set aside, unless blocks change places in a ring of more than 64.

        Args:
            source_ids: [count].
            destination_ids: [count], without duplicates.
        """
        if not len(source_ids):
            return
        for sources, destinations in plan_copies(source_ids, destination_ids, len(self._copied)):
            source_blocks, destination_blocks = self._indices(sources), self._indices(destinations)
            copied = self._copied[: len(sources)] if len(sources) <= len(self._copied) else None
            for layer in self.layers:
                for cache in layer:
                    content = torch.index_select(cache, 0, source_blocks, out=copied)
                    cache.index_copy_(0, destination_blocks, content)

    def spoil_slots(self, slots: Int64Array) -> None:
        """Fills slots with NaN in all layers: whoever reads them gets no number.

        Args:
            slots: [count], block id * block_size + offset in the block.
        """
        blocks = self._indices(slots // self.geometry.block_size)
        offsets = self._indices(slots % self.geometry.block_size)
        for layer in self.layers:
            for cache in layer:
                cache[blocks, :, offsets] = torch.nan

    def warm_up(self) -> None:
        """Does once what steps may ask for: a device loads the code of an operation at its first use. Changes blocks 0 and 1."""
        self.spoil_slots(np.zeros(1, np.int64))
        self.zero_blocks(np.zeros(1, np.int32))
        self.copy_blocks(np.zeros(1, np.int32), np.ones(1, np.int32))

    def _advise(self, name: str) -> None:
        """Gives the system advice about the mapping, if it knows it; it may do without."""
        if self._mapping is not None and hasattr(mmap, name):
            with contextlib.suppress(OSError):
                self._mapping.madvise(getattr(mmap, name))

    def _indices(self, numbers: Int32Array | Int64Array) -> Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._device)

    def describe(self) -> KvCacheDescription:
        """Returns what WorkerInfo says of the cache."""
        return KvCacheDescription(
            dtype=str(self.geometry.dtype).removeprefix("torch."),
            layout_fingerprint=self.geometry.layout_fingerprint,
            block_size=self.geometry.block_size,
            num_blocks=self.num_blocks,
            bytes_per_block=self.geometry.bytes_per_block,
        )
