"""paged_attention: one kernel for decode, chunks of prompts and any mix, and a reduction where a context is divided among programs.

A program takes a few consecutive tokens of one sequence, with all query heads that read one KV head: they are the rows of its
tile, so that each key and value is read once for them. It finds its sequence by the number of its block, for the host doesn't know
lengths. Tokens behind the last sequence are a sequence without a context. The softmax is a running maximum, sum and weighted sum
(Milakov and Gimelshein, 2018); programs that share a context leave theirs to be joined (flash decoding, Dao et al., 2023).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelworker.ops.kernels.arguments import check_dense, check_same_layout
from modelworker.ops.kernels.geometry import MAX_SPLITS, AttentionGeometry, architecture, attention_geometry, attention_tiles

# Starts of sequences that a program compares with its own number at once: one load for most batches.
_SEARCH = 256
# Programs whose partial results the reduction adds at once: 16 x 128 elements are 16 of each of 128 threads.
_JOINED = 16
_INDICES = ["query_starts", "seq_lens", "block_tables"]
# These change from step to step: none may make another form of the kernel.
_COUNTS = ["num_tokens", "num_sequences", "num_splits", "table_stride", "window"]


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_INDICES)
def _paged_attention_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    output: tl.tensor,
    partial_output: tl.tensor,
    partial_highest: tl.tensor,
    partial_total: tl.tensor,
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    block_tables: tl.tensor,
    num_tokens: tl.tensor,
    num_sequences: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    table_stride: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    output_stride: tl.tensor,
    output_head_stride: tl.tensor,
    block_stride: tl.tensor,
    cache_head_stride: tl.tensor,
    slot_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    UPCASTS: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    SEARCH: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)

    # Sequence s has the blocks from query_starts[s] // QUERIES + s on; the last that doesn't start behind this one has it.
    sequence = -1
    for first in range(0, num_sequences + 1, SEARCH):
        index = first + tl.arange(0, SEARCH)
        starts = tl.load(query_starts + index, mask=index <= num_sequences, other=0)
        sequence += tl.sum(((index <= num_sequences) & (starts // QUERIES + index <= block)).to(tl.int32), 0)
    is_real = sequence < num_sequences
    start = tl.load(query_starts + sequence)
    end = tl.load(query_starts + sequence + 1, mask=is_real, other=num_tokens)
    seq_len = tl.load(seq_lens + sequence, mask=is_real, other=0)
    first_query = (block - start // QUERIES - sequence) * QUERIES
    if start + first_query >= end:
        return

    row = tl.arange(0, ROWS)
    token = start + first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = (row < QUERIES * GROUP) & (token < end)
    context = seq_len - (end - start)
    position = context + first_query + row // GROUP
    dim = tl.arange(0, DIM)
    is_dim = dim < HEAD_DIM
    rows = tl.load(
        query + (token.to(tl.int64) * query_stride + head * query_head_stride)[:, None] + dim[None, :],
        mask=is_row[:, None] & is_dim[None, :],
        other=0.0,
    )
    if UPCASTS:
        rows = rows.to(tl.float32)

    # Of the context, [begin, until) is what any of these rows sees.
    until = tl.maximum(context + tl.minimum(first_query + QUERIES, end - start), 0)
    begin = tl.maximum(context + first_query - window + 1, 0) if HAS_WINDOW else 0
    first_tile, end_tile = begin // TOKENS, tl.cdiv(until, TOKENS)
    if IS_SPLIT:
        share = tl.cdiv(end_tile - first_tile, num_splits)
        first_tile += split * share
        end_tile = tl.minimum(first_tile + share, end_tile)

    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, DIM], tl.float32)
    table = block_tables + tl.cast(sequence, tl.int64) * table_stride
    # Powers of two are faster: 2^(x log2 e) = e^x.
    factor = tl.cast(scale, tl.float32) * 1.4426950408889634
    for tile in range(first_tile, end_tile):
        seen = tile * TOKENS + tl.arange(0, TOKENS)
        # What lies in other slots may be NaN, which a weight of 0 does not silence: it is not read.
        is_seen = (seen >= begin) & (seen < until)
        # A place in the cache may be beyond 2^31.
        blocks = tl.load(table + seen // BLOCK_SIZE, mask=is_seen, other=0).to(tl.int64)
        places = blocks * block_stride + (seen % BLOCK_SIZE) * slot_stride + kv_head * cache_head_stride
        keys = tl.load(key_cache + places[None, :] + dim[:, None], mask=is_seen[None, :] & is_dim[:, None], other=0.0)
        values = tl.load(value_cache + places[:, None] + dim[None, :], mask=is_seen[:, None] & is_dim[None, :], other=0.0)
        if UPCASTS:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        scores = tl.dot(rows, keys, input_precision="ieee") * factor
        if HAS_SOFT_CAP:
            cap = tl.cast(soft_cap, tl.float32) * 1.4426950408889634
            # tanh x = 2 sigmoid(2 x) - 1
            scores = cap * (2 * tl.sigmoid(2 * scores / cap) - 1)
        may_see = is_seen[None, :] & (seen[None, :] <= position[:, None])
        if HAS_WINDOW:
            may_see = may_see & (seen[None, :] > position[:, None] - window)
        scores = tl.where(may_see, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        # A row that has seen nothing yet: the difference of two infinities would be NaN.
        reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - reference[:, None])
        shrink = tl.exp2(highest - reference)
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        highest = new_highest

    if IS_SPLIT:
        place = (token.to(tl.int64) * NUM_HEADS + head) * num_splits + split
        tl.store(partial_highest + place, highest, mask=is_row)
        tl.store(partial_total + place, total, mask=is_row)
        if first_tile < end_tile:
            tl.store(partial_output + place[:, None] * HEAD_DIM + dim[None, :], weighted, mask=is_row[:, None] & is_dim[None, :])
    else:
        result = weighted / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            output + (token.to(tl.int64) * output_stride + head * output_head_stride)[:, None] + dim[None, :],
            result.to(output.dtype.element_ty),
            mask=is_row[:, None] & is_dim[None, :],
        )


@triton.jit(do_not_specialize=["num_splits"])
def _join_kernel(
    partial_output: tl.tensor,
    partial_highest: tl.tensor,
    partial_total: tl.tensor,
    output: tl.tensor,
    num_splits: tl.tensor,
    output_stride: tl.tensor,
    output_head_stride: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    JOINED: tl.constexpr,
) -> None:
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = (token * tl.num_programs(1) + head) * num_splits
    split = tl.arange(0, SPLITS)
    highs = tl.load(partial_highest + first + split, mask=split < num_splits, other=float("-inf"))
    totals = tl.load(partial_total + first + split, mask=split < num_splits, other=0.0)
    highest = tl.max(highs, 0)
    # Of a row that sees nothing, nothing is added.
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(totals * tl.exp2(highs - highest), 0)
    dim = tl.arange(0, DIM)
    weighted = tl.zeros([DIM], tl.float32)
    for begin in range(0, num_splits, JOINED):
        index = begin + tl.arange(0, JOINED)
        counts = tl.load(partial_total + first + index, mask=index < num_splits, other=0.0) > 0
        shares = tl.exp2(tl.load(partial_highest + first + index, mask=counts, other=float("-inf")) - highest)
        # Programs without work have written no sums.
        sums = tl.load(
            partial_output + (first + index)[:, None] * HEAD_DIM + dim[None, :],
            mask=counts[:, None] & (dim < HEAD_DIM)[None, :],
            other=0.0,
        )
        weighted += tl.sum(sums * shares[:, None], 0)
    result = weighted / tl.where(total > 0, total, 1.0)
    place = output + token * output_stride + head * output_head_stride + dim
    tl.store(place, result.to(output.dtype.element_ty), mask=dim < HEAD_DIM)


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
                geometry = AttentionGeometry(
                    tile=tile, block_queries=tile.rows // (num_heads // num_kv_heads), num_blocks=1, num_splits=num_splits
                )
                launch_attention_form(
                    *(query, key_cache, value_cache, output, starts, none, none.view(0, 1), scale, window, soft_cap, geometry)
                )


def launch_paged_attention(
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
    """Hot path: computes `paged_attention`. The grid follows from the shapes of the arguments alone."""
    num_tokens, num_heads, head_dim = query.shape
    if num_tokens == 0:
        return
    geometry = attention_geometry(
        architecture(),
        num_tokens=num_tokens,
        num_sequences=seq_lens.shape[0],
        num_heads=num_heads,
        num_kv_heads=key_cache.shape[1],
        head_dim=head_dim,
        max_context=block_tables.shape[1] * key_cache.shape[2],
        dtype=query.dtype,
    )
    launch_attention_form(
        *(query, key_cache, value_cache, output, query_starts, seq_lens, block_tables, scale, window, soft_cap, geometry)
    )


def launch_attention_form(
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
    geometry: AttentionGeometry,
) -> None:
    """Hot path: launches attention in one form. Whoever prepares all forms before the first step calls it by itself.

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
        geometry: which form, and its grid.

    Raises:
        ValueError: a tensor is laid out in a way that the kernels don't read.
    """
    for name, tensor in (("query", query), ("output", output), ("key_cache", key_cache), ("block_tables", block_tables)):
        check_dense(name, tensor)
    check_same_layout(key_cache, value_cache)
    num_tokens, num_heads, head_dim = query.shape
    tile, num_splits = geometry.tile, geometry.num_splits
    is_split = num_splits > 1
    partial: tuple[Tensor | None, ...] = (None, None, None)
    if is_split:
        sizes = (num_tokens, num_heads, num_splits)
        partial = tuple(
            torch.empty(shape, dtype=torch.float32, device=query.device) for shape in ((*sizes, head_dim), sizes, sizes)
        )
    _paged_attention_kernel[geometry.num_blocks, key_cache.shape[1], num_splits](
        *(query, key_cache, value_cache, output, *partial, query_starts, seq_lens, block_tables),
        *(num_tokens, seq_lens.shape[0], num_splits, window, scale, soft_cap, block_tables.stride(0)),
        *(*query.stride()[:2], *output.stride()[:2], *key_cache.stride()[:3]),
        NUM_HEADS=num_heads,
        GROUP=num_heads // key_cache.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[2],
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
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if is_split:
        _join_kernel[num_tokens, num_heads](
            *(*partial, output, num_splits, *output.stride()[:2]),
            HEAD_DIM=head_dim,
            DIM=max(triton.next_power_of_2(head_dim), 16),
            SPLITS=MAX_SPLITS,
            JOINED=_JOINED,
            num_warps=4,
        )
