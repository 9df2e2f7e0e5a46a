"""Launch geometry of every Triton kernel: block shapes, warps, stages and grids, one table per architecture.

What is chosen here follows from static shapes and from the padded sizes of a step, which its graph's key names; never from values.
So all steps of one key have the same grids, and every kernel exists in a few forms that are known at the start.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch

MAX_ROW_SIZE: Final = 32768
"""Elements of a row that one program keeps in registers: 64 of each of 512 threads."""
MAX_HEAD_DIM: Final = 256
MAX_GROUP: Final = 128
"""Query heads that share a KV head: the rows of the largest tile."""
MAX_SPLITS: Final = 64
"""Programs that share one sequence's context: the reduction keeps a maximum and a sum of each in registers."""

# One program's share of a copy or an activation: 8 elements (16 bytes of bf16) of each of 128 threads.
COLUMNS: Final = 1024
# Heads that one program rotates: at head_dim 128, 8 x 128 elements are 8 of each of 128 threads.
HEADS: Final = 8
# Logits of a row that a program looks at together: 8 of each of 512 threads, for the rows of a step are few and long.
SAMPLED: Final = 4096
SAMPLED_WARPS: Final = 16
# A program takes so many tiles of a context at least, or finding its work would take it longer than the work.
LEAST_TILES: Final = 2
# A sequence is divided where it is longer than this, however many others there are: it would be the last to end.
LONG_CONTEXT: Final = 4096
# Into so many parts at most, where there are programs enough without it.
_LONG_SPLITS: Final = 16
# Partial results, each of a head of a token and a part of its context, that there is room for in one launch for the sake of length:
# 256 sequences with 32 heads in 16 parts, 65 MiB at head_dim 128.
MAX_PARTIAL_ROWS: Final = 2**17
# Sequences of up to so many tokens, a decode and three drafts, are attended from apart from prompts of the same step.
_MAX_SHORT_QUERIES: Final = 4
# Programs of attention for each that is wanted: more than fit at once, so that those which end early make room. More work is shared
# by the same programs, for one that finds none still takes a place among about 400 for 1 us.
_ROUNDS: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """What one program of attention works on.

    Attributes:
        rows: query heads of one KV head, of as many tokens as fit.
        tokens: of the context, in each iteration.
        num_warps: of the program.
        num_stages: tiles of keys and values that are on their way while one is computed.
        max_registers: of a thread; None: as many as the assembler wants.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What is known of a family of GPUs.

    Attributes:
        wanted_programs: of attention, so that every multiprocessor has two: one computes while the other waits for memory.
        tiles: of 16-bit attention with a head_dim up to 128, smallest first.
    """

    wanted_programs: int
    tiles: tuple[Tile, ...]


ARCHITECTURES: Final[Mapping[int, Architecture]] = MappingProxyType(
    {
        # A100 has 108 multiprocessors. Cards of 8.6 and 8.9 have 99 KiB of shared memory, and no program needs more. 64 rows in
        # four warps need 256 registers of a thread, so they have eight.
        80: Architecture(
            wanted_programs=216,
            tiles=(
                Tile(rows=16, tokens=64, num_warps=4, num_stages=3, max_registers=168),
                Tile(rows=64, tokens=64, num_warps=8, num_stages=3),
                Tile(rows=128, tokens=64, num_warps=8, num_stages=3),
            ),
        ),
        # H100 and H200: 132 multiprocessors, 227 KiB. Three stages keep a tile of 32 KiB under way (block ids come a stage before
        # their keys) in 38 KiB. With 168 registers three programs of a decode fit, and have 96 KiB under way, where 4.8 TB/s x 1 us
        # / 132 = 36 KiB are needed. 64 rows are what one warpgroup multiplies at once: two programs fit. 128 rows are two
        # warpgroups, which leave no registers for another program, so five stages keep two tiles under way, in 129 KiB.
        90: Architecture(
            wanted_programs=264,
            tiles=(
                Tile(rows=16, tokens=64, num_warps=4, num_stages=3, max_registers=168),
                Tile(rows=64, tokens=64, num_warps=4, num_stages=3),
                Tile(rows=128, tokens=64, num_warps=8, num_stages=5),
            ),
        ),
        # B200: 148 multiprocessors, 227 KiB, tensor memory for products of 64 and 128 rows. Stages as on 9.0.
        100: Architecture(
            wanted_programs=296,
            tiles=(
                Tile(rows=16, tokens=64, num_warps=4, num_stages=3, max_registers=168),
                Tile(rows=64, tokens=64, num_warps=4, num_stages=3),
                Tile(rows=128, tokens=64, num_warps=8, num_stages=5),
            ),
        ),
    }
)
"""By compute capability, major x 10. Others have the entry of 8.0, which asks least. None of this has been measured yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionGeometry:
    """How attention is launched, over all sequences of a step or over those with some numbers of new tokens.

    Attributes:
        tile: of each program.
        block_queries: tokens of one sequence that a program attends from at once.
        shortest: new tokens of a sequence that is attended from; > 0.
        longest: likewise.
        slots_per_sequence: rows of partial results that each sequence has for its tokens; 0: they lie as the tokens do.
        num_slots: of all.
        num_programs: for each KV head, which share the work.
        wanted_splits: programs among which a context is divided as soon as each has a little of it.
        num_splits: programs among which a context is divided at most; 1: no result needs to be joined.
    """

    tile: Tile
    block_queries: int
    shortest: int
    longest: int
    slots_per_sequence: int
    num_slots: int
    num_programs: int
    wanted_splits: int
    num_splits: int

    @classmethod
    def of_all(cls, tile: Tile, *, group: int, num_tokens: int, num_sequences: int, num_splits: int = 1) -> "AttentionGeometry":
        """Returns a launch that serves all sequences of a step, with a program for each piece of work that there may be.

        Args:
            tile: of each program.
            group: query heads that share a KV head.
            num_tokens: padded.
            num_sequences: padded.
            num_splits: into how many parts a context is divided that has enough tiles.
        """
        queries = tile.rows // group
        return cls(
            tile=tile,
            block_queries=queries,
            shortest=1,
            longest=num_tokens,
            slots_per_sequence=0,
            num_slots=num_tokens,
            # Every sequence, and the padding behind the last, may end in the middle of a block.
            num_programs=(num_tokens // queries + num_sequences + 1) * num_splits,
            wanted_splits=num_splits,
            num_splits=num_splits,
        )

    def num_partial_rows(self, num_heads: int) -> int:
        """Returns the partial results for which there is room."""
        return self.num_slots * num_heads * self.num_splits if self.num_splits > 1 else 0


def attention_geometry(
    gpu: Architecture,
    *,
    num_tokens: int,
    num_sequences: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_context: int,
    window: int,
    dtype: torch.dtype,
) -> tuple[AttentionGeometry, ...]:
    """Chooses the launches, each with its tile and grid.

    Steps in which all sequences may have the same few tokens are decodes: one launch with the smallest tile attends from them, and
    from whatever else the step turns out to be. Others have prompts, for which the largest tile that one could fill reads a context
    least often; where there are several sequences, those with few tokens have a launch with the smallest tile.

    Args:
        gpu: that runs it.
        num_tokens: padded, > 0.
        num_sequences: padded.
        num_heads: of queries.
        num_kv_heads: of keys and values.
        head_dim: of both.
        max_context: tokens for which a sequence's row of the block table has room.
        window: how many tokens a query sees; 0 = all.
        dtype: of queries, keys and values.
    """
    group = num_heads // num_kv_heads

    def divided(launch: AttentionGeometry) -> AttentionGeometry:
        return _divided(
            launch,
            gpu=gpu,
            num_sequences=num_sequences,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            max_context=max_context,
            window=window,
        )

    smallest = _attention_tile(gpu, group, group, head_dim, dtype)
    of_smallest = AttentionGeometry.of_all(smallest, group=group, num_tokens=num_tokens, num_sequences=num_sequences)
    if num_sequences > 0 and num_tokens % num_sequences == 0 and num_tokens // num_sequences * group <= smallest.rows:
        return (divided(of_smallest),)
    # The others may have one each.
    largest = _attention_tile(gpu, (num_tokens - max(num_sequences, 1) + 1) * group, group, head_dim, dtype)
    of_largest = AttentionGeometry.of_all(largest, group=group, num_tokens=num_tokens, num_sequences=num_sequences)
    if num_sequences <= 1 or largest == smallest:
        return (divided(of_largest),)
    short = min(of_smallest.block_queries, _MAX_SHORT_QUERIES)
    of_short = replace(
        of_smallest,
        longest=short,
        slots_per_sequence=short,
        num_slots=short * (num_sequences + 1),
        num_programs=num_sequences + 1,
    )
    return divided(replace(of_largest, shortest=short + 1)), divided(of_short)


def _divided(
    launch: AttentionGeometry,
    *,
    gpu: Architecture,
    num_sequences: int,
    num_heads: int,
    num_kv_heads: int,
    max_context: int,
    window: int,
) -> AttentionGeometry:
    """Returns a launch with contexts divided among programs."""
    tile, queries = launch.tile, launch.block_queries
    # Programs that have work, as far as the shapes tell.
    blocks = num_sequences if launch.slots_per_sequence else max(-(-launch.num_slots // queries), num_sequences)
    # No program reads more, however long the sequence: the first of its queries sees the window, each other one token more.
    seen = min(max_context, window + queries - 1) if window > 0 else max_context
    wanted = min(-(-gpu.wanted_programs // (blocks * num_kv_heads)), -(-seen // (LEAST_TILES * tile.tokens)), MAX_SPLITS)
    for_length = min(-(-seen // LONG_CONTEXT), _LONG_SPLITS, MAX_PARTIAL_ROWS // (launch.num_slots * num_heads))
    num_splits = max(wanted, for_length, 1)
    return replace(
        launch,
        num_programs=min(launch.num_programs * num_splits, -(-_ROUNDS * gpu.wanted_programs // num_kv_heads)),
        wanted_splits=max(wanted, 1),
        num_splits=num_splits,
    )


def attention_tiles(gpu: Architecture, *, group: int, head_dim: int, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Returns all tiles that steps of a model may need."""
    return tuple(dict.fromkeys(_attention_tile(gpu, tile.rows, group, head_dim, dtype) for tile in gpu.tiles))


def attention_workspace_bytes(num_tokens: int, *, num_heads: int, head_dim: int) -> int:
    """Returns what partial results of attention take at most in a step of so many tokens or fewer.

    Each has a vector, a maximum and a sum in fp32; each token says in int32 how many it has, and where they lie. For each of two
    launches `MAX_PARTIAL_ROWS` bounds the parts that there are for length; those that are wanted for lack of programs are less.
    """
    # Short sequences beside prompts have places for the most tokens that they could have.
    places = num_tokens + _MAX_SHORT_QUERIES * (num_tokens + 1)
    rows = min(places * num_heads * MAX_SPLITS, 2 * MAX_PARTIAL_ROWS)
    return rows * (head_dim + 2) * 4 + num_tokens * 2 * 4


def _attention_tile(gpu: Architecture, rows: int, group: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """Takes the smallest tile that holds so many rows, or else the largest."""
    if dtype == torch.float32:
        # Products in full precision run on the general units: small tiles keep their operands in registers. They need up to 106,
        # of which the assembler, left to itself, spills some to be content with 72.
        rows = max(16, next_power_of_2(group))
        return Tile(rows=rows, tokens=16, num_warps=4, num_stages=1, max_registers=128 if rows == 16 else None)
    fitting = [tile for tile in gpu.tiles if tile.rows >= max(rows, group)]
    tile = fitting[0] if fitting else gpu.tiles[-1]
    if head_dim > 128:
        # As many bytes as at 128.
        return Tile(rows=max(min(tile.rows, 64), next_power_of_2(group)), tokens=32, num_warps=tile.num_warps, num_stages=2)
    return tile


def next_power_of_2(number: int) -> int:
    """Returns the smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def row_warps(block: int) -> int:
    """Returns the warps of a program that keeps a row in registers: 16 elements of each thread, two loads of 16 bytes of bf16."""
    return max(1, min(block // 512, 16))
