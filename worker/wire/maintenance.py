"""Checks of a step's KV cache maintenance: blocks that are zeroed and copied before the forward pass."""

from collections.abc import Callable

import numpy as np

from modelworker.worker.arrays import Int32Array
from modelworker.worker.description import WorkerDescription
from modelworker.worker.ragged import starts_of
from modelworker.worker.wire.checks import StepFields, check_range
from modelworker.worker.wire.violations import Violations, check_length

_ZERO = "zero_block_ids"
_SOURCE = "block_copies.source_ids"
_DESTINATION = "block_copies.destination_ids"


def check_maintenance(fields: StepFields, description: WorkerDescription, violations: Violations) -> None:
    """Blocks that are zeroed or copied exist, no destination is named twice, and no row's context is zeroed."""
    zeroed, sources, destinations = fields.zero_block_ids, fields.copy_source_ids, fields.copy_destination_ids
    if not (zeroed.size or sources.size or destinations.size):
        return
    num_blocks = description.kv_cache.num_blocks
    check_length(_DESTINATION, destinations, len(sources), violations, "one per entry of block_copies.source_ids")
    for path, blocks in ((_ZERO, zeroed), (_SOURCE, sources), (_DESTINATION, destinations)):
        check_range(path, blocks, range(1, num_blocks), _describe_range(blocks, num_blocks), violations)
    if _ZERO in violations or _DESTINATION in violations:
        return
    _check_destinations(destinations, violations)
    _check_contexts(fields, description, violations)


def _describe_range(blocks: Int32Array, num_blocks: int) -> Callable[[int], str]:
    def describe(index: int) -> str:
        null = " (block 0 is the null block)" if blocks[index] == 0 else ""
        return f"found {blocks[index]}, expected 1 .. {num_blocks - 1}{null}"

    return describe


def _check_destinations(destinations: Int32Array, violations: Violations) -> None:
    order = np.argsort(destinations, kind="stable")
    ordered = destinations[order]
    repeated = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
    for at in repeated[: Violations.LIMIT].tolist():
        first = order[np.searchsorted(ordered, ordered[at])]
        violations.add(
            f"{_DESTINATION}[{order[at]}]", f"found block {ordered[at]}, the destination of copy {first} as well, expected once"
        )


def _check_contexts(fields: StepFields, description: WorkerDescription, violations: Violations) -> None:
    """A row that reads a zeroed block as context reads nothing of its own, unless something is copied there after zeroing."""
    if not fields.zero_block_ids.size or any(name in violations for name in ("context_lens", "block_counts", "block_ids")):
        return
    is_lost = np.zeros(description.kv_cache.num_blocks, np.bool_)
    is_lost[fields.zero_block_ids] = True
    is_lost[fields.copy_destination_ids] = False
    # `take` is three times as fast as an index, and few entries are left.
    entries = np.flatnonzero(is_lost.take(fields.block_ids))
    starts = starts_of(fields.block_counts)
    rows = np.searchsorted(starts, entries, side="right") - 1
    lost = (entries - starts[rows]) * description.kv_cache.block_size < fields.context_lens[rows]
    for entry, row in zip(entries[lost][: Violations.LIMIT].tolist(), rows[lost].tolist(), strict=False):
        block = int(fields.block_ids[entry])
        index = int(np.flatnonzero(fields.zero_block_ids == block)[0])
        violations.add(
            f"{_ZERO}[{index}]",
            f"found block {block}, which is context of row {row} (block_ids[{entry}]), expected no context, or a copy into it",
        )
