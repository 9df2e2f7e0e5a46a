"""paged_attention: one kernel for decode, chunks of prompts and any mix, and a reduction where a context is divided among programs.

A program takes a few consecutive tokens of one sequence, with all query heads that read one KV head: they are the rows of its
tile, so that each key and value is read once for them. The softmax is a running maximum, sum and weighted sum (Milakov and
Gimelshein, 2018); programs that share a context leave theirs to be joined (flash decoding, Dao et al., 2023).

The host doesn't know lengths, so a program finds its work by itself: it counts what each sequence has to be done, blocks of queries
times parts of its context, and takes every so-many-th piece. Into how many parts a context is divided depends on its own length and
on the shapes of the step. Tokens behind the last sequence are a sequence without a context.
"""

import triton
import triton.language as tl

_INDICES = ["query_starts", "seq_lens", "block_tables"]
# These change from step to step: none may make another form of the kernel.
_COUNTS = [
    *("num_tokens", "num_sequences", "shortest", "longest", "slots_per_sequence", "first_partial", "wanted_splits", "num_splits"),
    *("window", "table_stride"),
]


@triton.jit
def _work_of(
    sequence: tl.tensor,
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    num_tokens: tl.tensor,
    num_sequences: tl.tensor,
    shortest: tl.tensor,
    longest: tl.tensor,
    wanted_splits: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,
    HAS_WINDOW: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    LEAST: tl.constexpr,
    LONG: tl.constexpr,
) -> tl.tensor:
    """Returns where a sequence's tokens start, their number, its length, blocks of queries, and parts of its context.

    Behind the last sequence is one of the tokens that belong to none, and then some without any.
    """
    is_real = sequence < num_sequences
    start = tl.load(query_starts + sequence, mask=sequence <= num_sequences, other=num_tokens)
    end = tl.load(query_starts + sequence + 1, mask=is_real, other=num_tokens)
    seq_len = tl.load(seq_lens + sequence, mask=is_real, other=0)
    query_len = end - start
    is_served = (query_len >= shortest) & (query_len <= longest)
    num_blocks = tl.where(is_served, tl.cdiv(query_len, QUERIES), 0)
    num_parts = tl.where(is_served, 1, 0)
    if IS_SPLIT:
        seen = tl.minimum(seq_len, window + (QUERIES - 1)) if HAS_WINDOW else seq_len
        tiles = tl.cdiv(seen, TOKENS)
        wanted = tl.minimum(tl.cdiv(tiles, LEAST), wanted_splits)
        for_length = tl.minimum(tl.cdiv(tiles, LONG), num_splits)
        num_parts = tl.maximum(tl.maximum(wanted, for_length), num_parts)
    return start, query_len, seq_len, num_blocks, num_parts


@triton.jit
def _passed(piece: tl.tensor, num_sequences: tl.tensor, work: tl.tuple, SEARCH: tl.constexpr) -> tl.tensor:
    """Returns how many sequences have all their pieces before this one, how many these are, and how many there are in all."""
    sequence, num_passed, num_pieces = 0, 0, 0
    for first in range(0, num_sequences + 1, SEARCH):
        _, _, _, num_blocks, num_parts = _work_of(first + tl.arange(0, SEARCH), *work)
        pieces = num_blocks * num_parts
        is_passed = num_pieces + tl.cumsum(pieces, 0) <= piece
        sequence += tl.sum(is_passed.to(tl.int32), 0)
        num_passed += tl.sum(tl.where(is_passed, pieces, 0), 0)
        num_pieces += tl.sum(pieces, 0)
    return sequence, num_passed, num_pieces


@triton.jit
def _slots_of(
    table: tl.tensor,
    first: tl.tensor,
    left: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    HAS_FEW_BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
) -> tl.tensor:
    """Returns the blocks of a tile of a context, the slots in them, and where the next tile finds its blocks.

    Where a tile is made of a few blocks, their ids are scalars: a thread keeps an address of each block instead of one of each of
    its tokens, which takes about 20 registers less. The table is advanced, for an index into it would be of 64 bits, and so would
    be all else that the loop counts.
    """
    lane = tl.arange(0, TOKENS)
    if HAS_FEW_BLOCKS:
        slots = lane % BLOCK_SIZE
        blocks = tl.load(table)
        for index in tl.static_range(1, TOKENS // BLOCK_SIZE):
            block = tl.load(table + index, mask=index * BLOCK_SIZE < left, other=0)
            blocks = tl.where(lane < index * BLOCK_SIZE, blocks, block)
        table += TOKENS // BLOCK_SIZE
    else:
        slots = (first + lane) % BLOCK_SIZE
        blocks = tl.load(table + (first + lane) // BLOCK_SIZE, mask=lane < left, other=0)
    return blocks, slots, table


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_INDICES)
def paged_attention_kernel(
    query: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    output: tl.tensor,
    partial_output: tl.tensor,
    partial_highest: tl.tensor,
    partial_total: tl.tensor,
    parts: tl.tensor,
    query_starts: tl.tensor,
    seq_lens: tl.tensor,
    block_tables: tl.tensor,
    num_tokens: tl.tensor,
    num_sequences: tl.tensor,
    shortest: tl.tensor,
    longest: tl.tensor,
    slots_per_sequence: tl.tensor,
    first_partial: tl.tensor,
    wanted_splits: tl.tensor,
    num_splits: tl.tensor,
    window: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    table_stride: tl.tensor,
    query_stride: tl.tensor,
    query_head_stride: tl.tensor,
    output_stride: tl.tensor,
    output_head_stride: tl.tensor,
    cache_head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_FEW_BLOCKS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    UPCASTS: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    SEARCH: tl.constexpr,
    LEAST: tl.constexpr,
    LONG: tl.constexpr,
) -> None:
    """Attends from the sequences with `shortest` to `longest` new tokens; see `paged_attention.launch_attention_forms`.

    Where contexts may be divided, `parts` says of each token how many partial results it has, and where the first of them lies.
    """
    kv_head = tl.program_id(1)
    # fmt: off
    work = (
        query_starts, seq_lens, num_tokens, num_sequences, shortest, longest, wanted_splits, num_splits, window,
        HAS_WINDOW, IS_SPLIT, QUERIES, TOKENS, LEAST, LONG,
    )
    # fmt: on
    _, _, num_pieces = _passed(0, num_sequences, work, SEARCH)
    for piece in tl.range(tl.program_id(0), num_pieces, tl.num_programs(0), disable_licm=True):
        sequence, num_passed, _ = _passed(piece, num_sequences, work, SEARCH)
        start, query_len, seq_len, num_blocks, num_parts = _work_of(sequence, *work)
        part = (piece - num_passed) % num_parts
        # The last blocks of a prompt see most of it: whatever starts last should be short.
        first_query = (num_blocks - 1 - (piece - num_passed) // num_parts) * QUERIES
        end = start + query_len

        row = tl.arange(0, ROWS)
        token = start + first_query + row // GROUP
        head = kv_head * GROUP + row % GROUP
        is_row = (row < QUERIES * GROUP) & (token < end)
        context = seq_len - query_len
        dim = tl.arange(0, DIM)
        is_dim = dim < HEAD_DIM
        rows = tl.load(
            query + (token.to(tl.int64) * query_stride + head * query_head_stride)[:, None] + dim[None, :],
            mask=is_row[:, None] & is_dim[None, :],
            other=0.0,
        )
        if UPCASTS:
            rows = rows.to(tl.float32)

        # Of the context, [begin, until) is what any of these rows sees; each has its own place before its end.
        until = tl.maximum(context + tl.minimum(first_query + QUERIES, query_len), 0)
        before_end = until - (context + first_query + row // GROUP)
        begin = tl.maximum(context + first_query - window + 1, 0) if HAS_WINDOW else 0
        first_tile, end_tile = begin // TOKENS, tl.cdiv(until, TOKENS)
        if IS_SPLIT:
            share = tl.cdiv(end_tile - first_tile, num_parts)
            first_tile += part * share
            end_tile = tl.minimum(first_tile + share, end_tile)

        highest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        weighted = tl.zeros([ROWS, DIM], tl.float32)
        table = block_tables + tl.cast(sequence, tl.int64) * table_stride
        table += first_tile * (TOKENS // BLOCK_SIZE) if HAS_FEW_BLOCKS else 0
        for first in range(first_tile * TOKENS, end_tile * TOKENS, TOKENS):
            lane = tl.arange(0, TOKENS)
            left = until - first
            blocks, slots, table = _slots_of(table, first, left, BLOCK_SIZE, HAS_FEW_BLOCKS, TOKENS)
            # What lies in other slots may be NaN, which a weight of 0 does not silence: it is not read.
            is_seen = (lane < left) & (lane >= begin - first) if HAS_WINDOW else lane < left
            is_place = is_seen[:, None] & is_dim[None, :] if HEAD_DIM < DIM else is_seen[:, None]
            # A place in the cache may be beyond 2^31. It is the same for keys and values, which are loaded alike.
            places = blocks.to(tl.int64) * BLOCK_STRIDE + slots * SLOT_STRIDE + kv_head * cache_head_stride
            places = places[:, None] + dim[None, :]
            keys = tl.load(key_cache + places, mask=is_place, other=0.0)
            values = tl.load(value_cache + places, mask=is_place, other=0.0)
            if UPCASTS:
                keys, values = keys.to(tl.float32), values.to(tl.float32)
            scores = tl.dot(rows, keys.T, input_precision="ieee") * scale
            if HAS_SOFT_CAP:
                # tanh x = 2 sigmoid(2 x) - 1
                scores = soft_cap * (2 * tl.sigmoid(2 * scores / soft_cap) - 1)
            own = left - before_end
            may_see = lane[None, :] <= own[:, None]
            if HAS_WINDOW:
                may_see &= lane[None, :] > own[:, None] - window
            scores = tl.where(may_see, scores, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(scores, 1))
            # A row that has seen nothing yet: the difference of two infinities would be NaN.
            reference = tl.where(new_highest == float("-inf"), 0.0, new_highest)
            weights = tl.exp2(scores - reference[:, None])
            shrink = tl.exp2(highest - reference)
            total = total * shrink + tl.sum(weights, 1)
            weighted = weighted * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            highest = new_highest

        is_whole = True
        if IS_SPLIT:
            is_whole = num_parts == 1
            slot = first_query + row // GROUP + tl.where(slots_per_sequence > 0, sequence * slots_per_sequence, start)
            place = first_partial + slot * num_splits * NUM_HEADS
            is_first = is_row & (row % GROUP == 0) & (kv_head == 0) & (part == 0)
            tl.store(parts + 2 * token, num_parts, mask=is_first)
            tl.store(parts + 2 * token + 1, place, mask=is_first)
            if num_parts > 1:
                place += part * NUM_HEADS + head
                tl.store(partial_highest + place, highest, mask=is_row)
                tl.store(partial_total + place, total, mask=is_row)
                if first_tile < end_tile:
                    sums = partial_output + place.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
                    tl.store(sums, weighted, mask=is_row[:, None] & is_dim[None, :])
        if is_whole:
            result = weighted / tl.where(total == 0, 1.0, total)[:, None]
            tl.store(
                output + (token.to(tl.int64) * output_stride + head * output_head_stride)[:, None] + dim[None, :],
                result.to(output.dtype.element_ty),
                mask=is_row[:, None] & is_dim[None, :],
            )


@triton.jit
def join_kernel(
    partial_output: tl.tensor,
    partial_highest: tl.tensor,
    partial_total: tl.tensor,
    parts: tl.tensor,
    output: tl.tensor,
    output_stride: tl.tensor,
    output_head_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    JOINED: tl.constexpr,
) -> None:
    """Adds up the partial results of some heads of a token that has several."""
    token = tl.program_id(0).to(tl.int64)
    num_parts = tl.load(parts + 2 * token)
    if num_parts == 1:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < NUM_HEADS
    first = tl.load(parts + 2 * token + 1) + head
    split = tl.arange(0, SPLITS)
    is_part = is_head[:, None] & (split < num_parts)[None, :]
    place = first[:, None] + split[None, :] * NUM_HEADS
    highs = tl.load(partial_highest + place, mask=is_part, other=float("-inf"))
    totals = tl.load(partial_total + place, mask=is_part, other=0.0)
    highest = tl.max(highs, 1)
    # Of a row that sees nothing, nothing is added.
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(totals * tl.exp2(highs - highest[:, None]), 1)
    dim = tl.arange(0, DIM)
    weighted = tl.zeros([HEADS, DIM], tl.float32)
    for begin in range(0, num_parts, JOINED):
        index = begin + tl.arange(0, JOINED)
        places = first[:, None] + index[None, :] * NUM_HEADS
        counts = tl.load(partial_total + places, mask=is_head[:, None] & (index < num_parts)[None, :], other=0.0) != 0
        shares = tl.exp2(tl.load(partial_highest + places, mask=counts, other=float("-inf")) - highest[:, None])
        # Programs without work have written no sums.
        sums = tl.load(
            partial_output + places.to(tl.int64)[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=counts[:, :, None] & (dim < HEAD_DIM)[None, None, :],
            other=0.0,
        )
        weighted += tl.sum(sums * shares[:, :, None], 1)
    result = weighted / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(
        output + token * output_stride + (head * output_head_stride)[:, None] + dim[None, :],
        result.to(output.dtype.element_ty),
        mask=is_head[:, None] & (dim < HEAD_DIM)[None, :],
    )
