"""In which order blocks are copied, so that every source is read before it is overwritten. numpy only."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from modelworker.worker.arrays import Int32Array


class CopyRound(NamedTuple):
    """Copies that are made at once: all sources are read before any destination is written.

    Attributes:
        source_ids: [count].
        destination_ids: [count].
    """

    source_ids: Int32Array
    destination_ids: Int32Array


_Copy = tuple[int, int]


def plan_copies(source_ids: Int32Array, destination_ids: Int32Array, max_round: int) -> Iterator[CopyRound]:
    """Splits copies into rounds, none of which writes what a later one reads.

    Args:
        source_ids: [count].
        destination_ids: [count], without duplicates.
        max_round: copies in a round at most; a ring (a to b, b to c, c to a) that is longer is a round of its own.
    """
    if not np.isin(destination_ids, source_ids).any():
        for start in range(0, len(source_ids), max_round):
            yield CopyRound(source_ids[start : start + max_round], destination_ids[start : start + max_round])
        return
    source_of = {
        destination: source
        for source, destination in zip(source_ids.tolist(), destination_ids.tolist(), strict=True)
        if source != destination
    }
    chains = _take_chains(source_of)
    for start in range(0, len(chains), max_round):
        yield _round(chains[start : start + max_round])
    together: list[_Copy] = []
    for ring in _take_rings(source_of):
        if together and len(together) + len(ring) > max_round:
            yield _round(together)
            together = []
        together += ring
    if together:
        yield _round(together)


def _take_chains(source_of: dict[int, int]) -> list[_Copy]:
    """Takes out what is no part of a ring: each copy before those that write its source."""
    num_readers = Counter(source_of.values())
    unread = [destination for destination in source_of if not num_readers[destination]]
    copies = []
    while unread:
        destination = unread.pop()
        source = source_of.pop(destination)
        copies.append((source, destination))
        num_readers[source] -= 1
        if not num_readers[source] and source in source_of:
            unread.append(source)
    return copies


def _take_rings(source_of: dict[int, int]) -> Iterator[list[_Copy]]:
    """Takes out the rings: what is left is read once and written once."""
    while source_of:
        destination = next(iter(source_of))
        ring = []
        while destination in source_of:
            source = source_of.pop(destination)
            ring.append((source, destination))
            destination = source
        yield ring


def _round(copies: Sequence[_Copy]) -> CopyRound:
    pairs = np.array(copies, np.int32)
    return CopyRound(pairs[:, 0], pairs[:, 1])
