"""Launch geometry of every Triton kernel: block shapes, warps, stages and grids, one table per architecture.

What is chosen here follows from static shapes and from the padded sizes of a step, which its graph's key names; never from values.
So all steps of one key have the same grids, and every kernel exists in a few forms that are known at the start.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
import triton

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
# More programs than this are launched for the sake of long contexts only while each has work.
_MAX_SPLIT_PROGRAMS: Final = 4096
# A sequence is divided where it may be longer than this, however many others there are: it would be the last to end.
_LONG_CONTEXT: Final = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """What one program of attention works on.

    Attributes:
        rows: query heads of one KV head, of as many tokens as fit.
        tokens: of the context, in each iteration.
        num_warps: of the program.
        num_stages: tiles of keys and values that are on their way while one is computed.
    """

    rows: int
    tokens: int
    num_warps: int
    num_stages: int


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
                Tile(rows=16, tokens=64, num_warps=4, num_stages=3),
                Tile(rows=64, tokens=64, num_warps=8, num_stages=3),
                Tile(rows=128, tokens=64, num_warps=8, num_stages=3),
            ),
        ),
        # H100 and H200: 132 multiprocessors, 227 KiB. Three stages keep a tile of 32 KiB under way (block ids come a stage before
        # their keys) in 38 KiB and 128 registers: four programs of a decode fit, and have 128 KiB under way, where 4.8 TB/s x
        # 1 us / 132 = 36 KiB are needed. Five stages would be two tiles, in three programs. 64 rows are what one warpgroup
        # multiplies at once, 128 are two.
        90: Architecture(
            wanted_programs=264,
            tiles=(
                Tile(rows=16, tokens=64, num_warps=4, num_stages=3),
                Tile(rows=64, tokens=64, num_warps=4, num_stages=3),
                Tile(rows=128, tokens=64, num_warps=8, num_stages=3),
            ),
        ),
        # B200: 148 multiprocessors, 227 KiB, tensor memory for products of 64 and 128 rows. Stages as on 9.0.
        100: Architecture(
            wanted_programs=296,
            tiles=(
                Tile(rows=16, tokens=64, num_warps=4, num_stages=3),
                Tile(rows=64, tokens=64, num_warps=4, num_stages=3),
                Tile(rows=128, tokens=64, num_warps=8, num_stages=3),
            ),
        ),
    }
)
"""By compute capability, major x 10. Others have the entry of 8.0, which asks least. None of this has been measured yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionGeometry:
    """How attention is launched.

    Attributes:
        tile: of each program.
        block_queries: tokens of one sequence that a program attends from.
        num_blocks: of queries: at least what any division of the tokens among the sequences needs.
        num_splits: programs among which a sequence's context is divided; 1: the result needs no reduction.
    """

    tile: Tile
    block_queries: int
    num_blocks: int
    num_splits: int


def architecture() -> Architecture:
    """Returns the entry of the GPU that kernels are compiled for; the interpreter has that of 9.0."""
    if triton.knobs.runtime.interpret:
        return ARCHITECTURES[90]
    capability: int = triton.runtime.driver.active.get_current_target().arch
    return ARCHITECTURES.get(capability // 10 * 10, ARCHITECTURES[80])


def attention_geometry(
    gpu: Architecture,
    *,
    num_tokens: int,
    num_sequences: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_context: int,
    dtype: torch.dtype,
) -> AttentionGeometry:
    """Chooses the tile and the grid.

    Args:
        gpu: that runs it.
        num_tokens: padded, > 0.
        num_sequences: padded.
        num_heads: of queries.
        num_kv_heads: of keys and values.
        head_dim: of both.
        max_context: tokens for which a sequence's row of the block table has room.
        dtype: of queries, keys and values.
    """
    group = num_heads // num_kv_heads
    tile = _attention_tile(gpu, -(-num_tokens // max(num_sequences, 1)) * group, group, head_dim, dtype)
    block_queries = tile.rows // group
    # Every sequence, and the padding behind the last, may end in the middle of a block.
    num_blocks = num_tokens // block_queries + num_sequences + 1
    # Programs that have work, as far as the shapes tell.
    programs = max(-(-num_tokens // block_queries), num_sequences) * num_kv_heads
    wanted = -(-gpu.wanted_programs // programs)
    for_length = min(-(-max_context // _LONG_CONTEXT), max(_MAX_SPLIT_PROGRAMS // programs, 1))
    num_splits = max(min(max(wanted, for_length), -(-max_context // tile.tokens), MAX_SPLITS), 1)
    return AttentionGeometry(tile=tile, block_queries=block_queries, num_blocks=num_blocks, num_splits=num_splits)


def attention_tiles(gpu: Architecture, *, group: int, head_dim: int, dtype: torch.dtype) -> tuple[Tile, ...]:
    """Returns all tiles that steps of a model may need."""
    return tuple(dict.fromkeys(_attention_tile(gpu, tile.rows, group, head_dim, dtype) for tile in gpu.tiles))


def _attention_tile(gpu: Architecture, rows: int, group: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """Takes the smallest tile that holds the rows of an average sequence, or else the largest."""
    if dtype == torch.float32:
        # Products in full precision run on the general units: small tiles keep their operands in registers.
        return Tile(rows=max(16, triton.next_power_of_2(group)), tokens=16, num_warps=4, num_stages=1)
    fitting = [tile for tile in gpu.tiles if tile.rows >= max(rows, group)]
    tile = fitting[0] if fitting else gpu.tiles[-1]
    if head_dim > 128:
        # As many bytes as at 128.
        return Tile(rows=max(min(tile.rows, 64), triton.next_power_of_2(group)), tokens=32, num_warps=tile.num_warps, num_stages=2)
    return tile


def row_warps(block: int) -> int:
    """Returns the warps of a program that keeps a row in registers: 16 elements of each thread, two loads of 16 bytes of bf16."""
    return max(1, min(block // 512, 16))
