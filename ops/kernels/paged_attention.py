"""Launches of paged_attention: which forms a step needs, with room for partial results."""

import math

import torch
import triton
from torch import Tensor

from modelworker.ops.kernels.arguments import check_dense, check_same_layout
from modelworker.ops.kernels.attention_kernels import join_kernel, paged_attention_kernel
from modelworker.ops.kernels.geometry import (
    ARCHITECTURES,
    LEAST_TILES,
    LONG_CONTEXT,
    MAX_SPLITS,
    Architecture,
    AttentionGeometry,
    attention_geometry,
    attention_tiles,
)

_LOG2_E = math.log2(math.e)
# Blocks of a tile whose ids are loaded one by one.
_FEW_BLOCKS = 8
# Sequences whose work a program counts at once: one load for most batches.
_SEARCH = 512
# What a program of the reduction adds at once, 16 parts of 4 heads: at head_dim 128, 8,192 elements are 32 of each of 256 threads.
_JOINED = 16
_JOINED_HEADS = 4


def architecture() -> Architecture:
    """Returns the entry of the GPU that kernels are compiled for; the interpreter has that of 9.0."""
    if triton.knobs.runtime.interpret:
        return ARCHITECTURES[90]
    capability: int = triton.runtime.driver.active.get_current_target().arch
    return ARCHITECTURES.get(capability // 10 * 10, ARCHITECTURES[80])


def prepare_paged_attention(
    key_cache: Tensor, value_cache: Tensor, *, num_heads: int, scale: float, window: int, soft_cap: float
) -> None:
    """Compiles and runs every form that steps over a layer's cache may need. It leaves the cache as it is.

    Args:
        key_cache: of the layer, in the dtype of its queries.
        value_cache: likewise.
        num_heads: of the queries.
        scale: see `paged_attention`, as are the others.
        window: of the layer.
        soft_cap: of the layer.
    """
    num_kv_heads, _, head_dim = key_cache.shape[1:]
    gpu = architecture()
    starts = key_cache.new_zeros(1, dtype=torch.int32)
    none = starts[:0]
    # Queries lie in a merged projection, or, where they have been normalized, by themselves. One row, which belongs to no sequence.
    for row_heads in (num_heads + 2 * num_kv_heads, num_heads):
        query = key_cache.new_zeros(1, row_heads, head_dim)[:, :num_heads]
        output = torch.empty(1, num_heads, head_dim, dtype=query.dtype, device=query.device)
        for tile in attention_tiles(gpu, group=num_heads // num_kv_heads, head_dim=head_dim, dtype=query.dtype):
            for num_splits in (1, 2):
                form = AttentionGeometry.of_all(
                    tile, group=num_heads // num_kv_heads, num_tokens=1, num_sequences=0, num_splits=num_splits
                )
                launch_attention_forms(
                    *(query, key_cache, value_cache, output, starts, none, none.view(0, 1), scale, window, soft_cap, (form,))
                )


class PagedAttentionLauncher:
    """Launches `paged_attention` as the shapes of its arguments ask for.

    All layers of a step have the same shapes but for the window: of each window, what was chosen last is kept.
    """

    def __init__(self) -> None:
        self._chosen: dict[int, tuple[object, tuple[AttentionGeometry, ...]]] = {}

    def launch(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        output: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        order: Tensor,
        scale: float,
        window: int,
        soft_cap: float,
    ) -> None:
        """Hot path: computes `paged_attention`. The grids follow from the shapes of the arguments alone."""
        if query.shape[0] == 0:
            return
        shapes = (query.shape, query.dtype, key_cache.shape[1:3], seq_lens.shape[0], block_tables.shape[1], query.device, _driver())
        found = self._chosen.get(window)
        if found is None or found[0] != shapes:
            found = self._chosen[window] = shapes, _choose(query, key_cache, seq_lens, block_tables, window)
        launch_attention_forms(
            *(query, key_cache, value_cache, output, query_starts, seq_lens, block_tables, scale, window, soft_cap, found[1])
        )


def _driver() -> object:
    """Returns what tells kinds of devices apart without asking one: Triton's driver, of which the interpreter has none."""
    return None if triton.knobs.runtime.interpret else triton.runtime.driver.active


def _choose(query: Tensor, key_cache: Tensor, seq_lens: Tensor, block_tables: Tensor, window: int) -> tuple[AttentionGeometry, ...]:
    num_tokens, num_heads, head_dim = query.shape
    return attention_geometry(
        architecture(),
        num_tokens=num_tokens,
        num_sequences=seq_lens.shape[0],
        num_heads=num_heads,
        num_kv_heads=key_cache.shape[1],
        head_dim=head_dim,
        max_context=block_tables.shape[1] * key_cache.shape[2],
        window=window,
        dtype=query.dtype,
    )


def launch_attention_forms(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    geometries: tuple[AttentionGeometry, ...],
) -> None:
    """Hot path: launches attention in given forms. Whoever prepares all forms before the first step calls it by itself.

    Args:
        query: see `paged_attention`, as are the others.
        key_cache: of the layer.
        value_cache: of the layer.
        output: written.
        query_starts: of the sequences.
        seq_lens: of the sequences.
        block_tables: of the sequences.
        scale: factor of the scores.
        window: 0 = all.
        soft_cap: 0 = off.
        geometries: which forms, and their grids; each sequence is served by one of them.

    Raises:
        ValueError: a tensor is laid out in a way that the kernels don't read.
    """
    for name, tensor in (("query", query), ("output", output), ("key_cache", key_cache), ("block_tables", block_tables)):
        check_dense(name, tensor)
    check_same_layout(key_cache, value_cache)
    num_tokens, num_heads, head_dim = query.shape
    block_size = key_cache.shape[2]
    is_split = any(geometry.num_splits > 1 for geometry in geometries)
    partial: tuple[Tensor | None, ...] = (None, None, None, None)
    if is_split:
        num_rows = sum(geometry.num_partial_rows(num_heads) for geometry in geometries)
        partial = (
            *(torch.empty(shape, dtype=torch.float32, device=query.device) for shape in ((num_rows, head_dim), num_rows, num_rows)),
            torch.empty(num_tokens, 2, dtype=torch.int32, device=query.device),
        )
    # Powers of two are faster: 2^(x log2 e) = e^x.
    scales = scale * _LOG2_E, soft_cap * _LOG2_E
    first_partial = 0
    for geometry in geometries:
        tile = geometry.tile
        paged_attention_kernel[geometry.num_programs, key_cache.shape[1]](
            *(query, key_cache, value_cache, output, *partial, query_starts, seq_lens, block_tables),
            *(num_tokens, seq_lens.shape[0], geometry.shortest, geometry.longest, geometry.slots_per_sequence, first_partial),
            *(geometry.wanted_splits, geometry.num_splits, window, *scales, block_tables.stride(0)),
            *(*query.stride()[:2], *output.stride()[:2], key_cache.stride(1)),
            NUM_HEADS=num_heads,
            GROUP=num_heads // key_cache.shape[1],
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            HAS_FEW_BLOCKS=tile.tokens % block_size == 0 and tile.tokens // block_size <= _FEW_BLOCKS,
            BLOCK_STRIDE=key_cache.stride(0),
            SLOT_STRIDE=key_cache.stride(2),
            HAS_WINDOW=window > 0,
            HAS_SOFT_CAP=soft_cap > 0,
            IS_SPLIT=is_split,
            # The interpreter multiplies the bit patterns of bf16.
            UPCASTS=triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
            ROWS=tile.rows,
            QUERIES=geometry.block_queries,
            TOKENS=tile.tokens,
            DIM=max(triton.next_power_of_2(head_dim), 16),
            SEARCH=_SEARCH,
            LEAST=LEAST_TILES,
            LONG=LONG_CONTEXT // tile.tokens,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            maxnreg=tile.max_registers,
        )
        first_partial += geometry.num_partial_rows(num_heads)
    if is_split:
        join_kernel[num_tokens, triton.cdiv(num_heads, _JOINED_HEADS)](
            *(*partial, output, *output.stride()[:2]),
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            HEADS=_JOINED_HEADS,
            DIM=max(triton.next_power_of_2(head_dim), 16),
            SPLITS=MAX_SPLITS,
            JOINED=_JOINED,
            num_warps=8,
        )
