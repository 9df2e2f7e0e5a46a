"""The order of block copies, against a copy of everything that is read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworker.worker.copy_rounds import plan_copies

NUM_BLOCKS = 12


def run(pairs: list[tuple[int, int]], max_round: int) -> tuple[list[int], list[int]]:
    """Returns what blocks hold after the rounds, and how many copies each round made. At first each block holds its number."""
    blocks = np.arange(NUM_BLOCKS)
    sizes = []
    sources, destinations = (np.array([pair[at] for pair in pairs], np.int32) for at in (0, 1))
    for read, written in plan_copies(sources, destinations, max_round):
        blocks[written] = blocks[read]
        sizes.append(len(read))
    return blocks.tolist(), sizes


@settings(max_examples=500)
@given(
    destinations=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True),
    sources=st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=NUM_BLOCKS, max_size=NUM_BLOCKS),
    max_round=st.integers(1, NUM_BLOCKS),
)
def test_whatever_overlaps_every_destination_gets_what_its_source_held_before(
    destinations: list[int], sources: list[int], max_round: int
) -> None:
    pairs = list(zip(sources, destinations, strict=False))
    expected = list(range(NUM_BLOCKS))
    for source, destination in pairs:
        expected[destination] = source
    assert run(pairs, max_round)[0] == expected


@settings(max_examples=200)
@given(st.permutations(range(NUM_BLOCKS)), st.integers(1, NUM_BLOCKS))
def test_blocks_can_change_places_in_any_way(order: list[int], max_round: int) -> None:
    assert run(list(zip(order, range(NUM_BLOCKS), strict=True)), max_round)[0] == order


@pytest.mark.parametrize(
    ("pairs", "sizes"),
    [
        ([(0, 5), (1, 6), (2, 7), (0, 8), (0, 9)], [2, 2, 1]),
        ([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)], [2, 2, 1]),
        ([(0, 1), (1, 0), (2, 3), (3, 2), (4, 4)], [2, 2]),
        ([(0, 1), (1, 2), (2, 3), (3, 0)], [4]),
        ([], []),
    ],
)
def test_rounds_are_no_larger_than_allowed_but_for_a_ring_that_is(pairs: list[tuple[int, int]], sizes: list[int]) -> None:
    assert run(pairs, 2)[1] == sizes
