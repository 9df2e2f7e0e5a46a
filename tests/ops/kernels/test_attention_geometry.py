"""Which launches of attention the shapes of a step choose: grids, room for partial results, who serves whom. Arithmetic only."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from modelworker.ops.kernels.geometry import (
    ARCHITECTURES,
    MAX_SPLITS,
    AttentionGeometry,
    attention_geometry,
    attention_tiles,
    attention_workspace_bytes,
)

# Heads, KV heads and head_dim of Llama-3.1-8B.
LLAMA: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
MULTIPROCESSORS = {80: 108, 90: 132, 100: 148}


def chosen(
    num_tokens: int, num_sequences: int, *, max_context: int = 131072, window: int = 0, capability: int = 90, **heads: int
) -> tuple[AttentionGeometry, ...]:
    sizes = {**LLAMA, **heads}
    return attention_geometry(
        ARCHITECTURES[capability], num_tokens=num_tokens, num_sequences=num_sequences, max_context=max_context, window=window,
        dtype=torch.bfloat16, **sizes,
    )  # fmt: skip


def decode(num_sequences: int, query_len: int = 1, **others: int) -> AttentionGeometry:
    (launch,) = chosen(num_sequences * query_len, num_sequences, **others)
    return launch


@pytest.mark.parametrize("num_sequences", [1, 2, 16, 64, 256])
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_programs_of_a_decode_are_a_few_for_each_multiprocessor_however_wide_the_table(
    num_sequences: int, query_len: int, capability: int
) -> None:
    launch = decode(num_sequences, query_len, capability=capability)
    programs = launch.num_programs * LLAMA["num_kv_heads"]
    assert programs <= 8 * MULTIPROCESSORS[capability] + LLAMA["num_kv_heads"]
    assert programs >= min(2 * MULTIPROCESSORS[capability], num_sequences * LLAMA["num_kv_heads"] * launch.num_splits)


@pytest.mark.parametrize("num_sequences", [1, 16, 64, 256])
def test_the_width_of_the_table_bounds_parts_and_decides_nothing_else(num_sequences: int) -> None:
    """A context that fits into both is divided alike: into no more parts than its own tiles allow."""
    wide = decode(num_sequences)
    for max_context in (64, 300, 2048, 9000, 40000):
        narrow = decode(num_sequences, max_context=max_context)
        assert (narrow.tile, narrow.block_queries) == (wide.tile, wide.block_queries)
        tiles = -(-max_context // wide.tile.tokens)
        for least, parts in ((2, "wanted_splits"), (64, "num_splits")):
            of_context = -(-tiles // least)
            assert min(of_context, getattr(narrow, parts)) == min(of_context, getattr(wide, parts)), parts


def test_a_long_context_among_many_short_ones_is_divided() -> None:
    for num_sequences in (1, 16, 64, 256):
        assert decode(num_sequences).num_splits >= 16
    # Where all have work without it, short ones are not.
    assert decode(64).wanted_splits == 1
    assert decode(16).wanted_splits == 3


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_a_prompt_among_decodes_has_large_tiles_and_the_decodes_have_small_ones(capability: int) -> None:
    prompt, decodes = chosen(256 + 15, 16, capability=capability)
    assert prompt.tile.rows == 128
    assert decodes.tile.rows == 16
    # The prompt's context is read once for each block of its 256 tokens: with small tiles that would be 64 times.
    assert -(-256 // prompt.block_queries) == 8
    assert (prompt.shortest, prompt.longest, decodes.shortest, decodes.longest) == (5, 271, 1, 4)


def test_one_sequence_or_equal_ones_have_one_launch() -> None:
    for num_tokens, num_sequences, rows in ((1, 1, 16), (4, 1, 16), (5, 1, 64), (4096, 1, 128), (64, 64, 16), (256, 64, 16)):
        (launch,) = chosen(num_tokens, num_sequences)
        assert (launch.tile.rows, launch.shortest, launch.longest) == (rows, 1, num_tokens)


HEADS = st.sampled_from(
    [(32, 8, 128), (32, 8, 64), (9, 3, 64), (16, 8, 128), (32, 32, 96), (64, 8, 128), (128, 1, 128), (8, 1, 256)]
)
LENGTHS = st.one_of(
    st.lists(st.integers(1, 6), min_size=1, max_size=300),
    st.lists(st.integers(0, 700), min_size=0, max_size=20),
    st.integers(1, 300).flatmap(lambda size: st.integers(1, 5).map(lambda length: [length] * size)),
)


@given(LENGTHS, st.integers(0, 30), HEADS, st.sampled_from([0, 64, 1024]), st.sampled_from([64, 4096, 131072]), st.sampled_from(
    list(ARCHITECTURES)
))  # fmt: skip
@example([1, 4], 0, (8, 1, 256), 0, 8192, 90)
@example([1, 2], 0, (16, 1, 128), 0, 131072, 90)
@example([1, 1, 1, 3], 0, (8, 1, 256), 0, 131072, 90)
def test_every_sequence_is_served_by_one_launch_which_has_room_for_its_partial_results(
    query_lens: Sequence[int], padding: int, heads: tuple[int, int, int], window: int, max_context: int, capability: int
) -> None:
    num_heads, num_kv_heads, head_dim = heads
    num_tokens, num_sequences = sum(query_lens) + padding, len(query_lens)
    if num_tokens == 0:
        return
    launches = chosen(
        num_tokens, num_sequences, window=window, max_context=max_context, capability=capability, num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=head_dim,
    )  # fmt: skip
    group = num_heads // num_kv_heads
    tiles = attention_tiles(ARCHITECTURES[capability], group=group, head_dim=head_dim, dtype=torch.bfloat16)
    starts = [sum(query_lens[:index]) for index in range(num_sequences)]
    for sequence, query_len in enumerate([*query_lens, padding]):
        serving = [launch for launch in launches if launch.shortest <= query_len <= launch.longest]
        assert len(serving) == (query_len > 0)
        for launch in serving:
            start = starts[sequence] if sequence < num_sequences else sum(query_lens)
            first = sequence * launch.slots_per_sequence if launch.slots_per_sequence else start
            assert first + query_len <= launch.num_slots
            assert not launch.slots_per_sequence or query_len <= launch.slots_per_sequence
    rows = 0
    for launch in launches:
        assert launch.tile in tiles
        assert 1 <= launch.block_queries * group <= launch.tile.rows
        assert 1 <= launch.wanted_splits <= launch.num_splits <= MAX_SPLITS
        assert launch.num_programs >= 1
        rows += launch.num_partial_rows(num_heads)
    taken = rows * (head_dim + 2) * 4 + (8 * num_tokens if rows else 0)
    assert taken <= attention_workspace_bytes(num_tokens, num_heads=num_heads, head_dim=head_dim)


@pytest.mark.parametrize("num_sequences", [1, 64])
@pytest.mark.parametrize("query_len", [1, 4, 300])
@pytest.mark.parametrize("window", [64, 1024, 6000])
def test_a_long_context_is_divided_as_one_that_fills_the_window(num_sequences: int, query_len: int, window: int) -> None:
    num_tokens = num_sequences * query_len
    long, filled = (chosen(num_tokens, num_sequences, max_context=context, window=window) for context in (131072, window + 300))
    assert long == filled
    for launch in long:
        # Each program has a tile of what the first sees; one more where the window begins in the middle of a tile.
        assert (launch.num_splits - 1) * launch.tile.tokens < window + launch.block_queries
    assert decode(1).num_splits > decode(1, window=64).num_splits


def test_a_window_that_is_longer_than_the_context_changes_nothing() -> None:
    assert decode(1, max_context=9000, window=20000) == decode(1, max_context=9000)


def test_a_launch_of_all_has_a_program_for_each_block_and_part() -> None:
    tile = ARCHITECTURES[90].tiles[0]
    launch = AttentionGeometry.of_all(tile, group=4, num_tokens=17, num_sequences=3, num_splits=5)
    assert launch.num_programs == (4 + 3 + 1) * 5
    assert dataclasses.replace(launch, num_splits=1).num_partial_rows(8) == 0
    assert launch.num_partial_rows(8) == 17 * 8 * 5
