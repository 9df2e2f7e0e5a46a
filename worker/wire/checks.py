"""The checks of a step: everything that wire and engine rely on, before anything is touched.

Each check looks at one group of fields and is a line of `CHECKS`; a new field is a new function there. Checks run in order, and one
that builds on other fields asks `violations` whether those were found in order. On a good request nothing loops in Python.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.batch import FEEDBACK_TOKEN, BoolArray, IndexArray, Int32Array, Int64Array, UInt64Array
from modelworker.worker.description import WorkerDescription
from modelworker.worker.ragged import starts_of
from modelworker.worker.wire.violations import Violations, check_length, check_optional_length

ScalarT = TypeVar("ScalarT", bound=np.generic)

_MAX_LISTED_ENTRIES = 32
# An array without entries can't change.
_NO_INT32S: Int32Array = np.zeros(0, np.int32)
_NO_UINT64S: UInt64Array = np.zeros(0, np.uint64)
_NO_BOOLS: BoolArray = np.zeros(0, np.bool_)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFields:
    """A request, and its arrays in numpy, of any content and of lengths that `sizes` allows."""

    request: pb.ExecuteStepRequest
    query_lens: Int32Array
    context_lens: Int32Array
    token_ids: Int32Array
    block_counts: Int32Array
    block_ids: Int32Array
    sample: BoolArray
    sequence_ids: UInt64Array
    draft_lens: Int32Array
    finished_sequence_ids: UInt64Array
    zero_block_ids: Int32Array
    copy_source_ids: Int32Array
    copy_destination_ids: Int32Array

    @classmethod
    def of(cls, request: pb.ExecuteStepRequest) -> "StepFields":
        """Copies the arrays out of the request. protobuf hands long repeated fields to numpy whole: 10 us for 65,536 numbers."""
        has_copies = request.HasField("block_copies")
        return cls(
            request=request,
            query_lens=_copied(request.query_lens, _NO_INT32S),
            context_lens=_copied(request.context_lens, _NO_INT32S),
            token_ids=_copied(request.token_ids, _NO_INT32S),
            block_counts=_copied(request.block_counts, _NO_INT32S),
            block_ids=_copied(request.block_ids, _NO_INT32S),
            sample=_copied(request.sample, _NO_BOOLS),
            sequence_ids=_copied(request.sequence_ids, _NO_UINT64S),
            draft_lens=_copied(request.draft_lens, _NO_INT32S),
            finished_sequence_ids=_copied(request.finished_sequence_ids, _NO_UINT64S),
            zero_block_ids=_copied(request.zero_block_ids, _NO_INT32S),
            copy_source_ids=_copied(request.block_copies.source_ids, _NO_INT32S) if has_copies else _NO_INT32S,
            copy_destination_ids=_copied(request.block_copies.destination_ids, _NO_INT32S) if has_copies else _NO_INT32S,
        )

    @property
    def num_sequences(self) -> int:
        """Number of rows: whatever else the request says, there is one query length per row."""
        return len(self.query_lens)


Check = Callable[[StepFields, WorkerDescription, Violations], None]


def check_identity(fields: StepFields, description: WorkerDescription, violations: Violations) -> None:
    """Sequenced steps name their epoch and router."""
    request = fields.request
    if request.step_id > 0:
        for name, value in (("worker_epoch", request.worker_epoch), ("router_id", request.router_id)):
            if value == 0:
                violations.add(name, f"found 0, expected to be set, because step_id is {request.step_id} (a sequenced step)")


def check_rows(fields: StepFields, description: WorkerDescription, violations: Violations) -> None:
    """There are not too many tokens, each row has some, and none is longer than the model allows."""
    query_lens, context_lens = fields.query_lens, fields.context_lens
    max_tokens = description.limits.max_tokens_per_step
    _check_minimum("query_lens", query_lens, 1, violations)
    num_tokens = _sum(query_lens)
    if "query_lens" not in violations and num_tokens > max_tokens:
        violations.add("query_lens", f"found {num_tokens} tokens in sum, expected at most max_tokens_per_step = {max_tokens}")
    same_length = check_length("context_lens", context_lens, fields.num_sequences, violations)
    _check_minimum("context_lens", context_lens, 0, violations)
    if not same_length:
        return
    max_model_len = description.model.max_model_len
    seq_lens = context_lens.astype(np.int64) + query_lens
    if seq_lens.size and np.maximum.reduce(seq_lens) > max_model_len:
        too_long = (seq_lens > max_model_len) & (query_lens >= 1) & (context_lens >= 0)
        violations.add_entries(
            "context_lens",
            np.flatnonzero(too_long),
            lambda row: (
                f"row {row}: found context {context_lens[row]} + query {query_lens[row]} = {seq_lens[row]} tokens, "
                f"expected at most max_model_len = {max_model_len}"
            ),
        )


def check_tokens(fields: StepFields, description: WorkerDescription, violations: Violations) -> None:
    """There are as many tokens as the query lengths say, and the model has a row for each that is not fed back."""
    has_rows = "query_lens" not in violations
    if has_rows:
        check_length("token_ids", fields.token_ids, _sum(fields.query_lens), violations, "the sum of query_lens")
    vocab_size = description.model.vocab_size

    def describe(index: int) -> str:
        place = place_of(starts_of(fields.query_lens), index, "token") if has_rows else ""
        return f"{place}found {fields.token_ids[index]}, expected 0 .. {vocab_size - 1}, or -1 (feedback)"

    check_range("token_ids", fields.token_ids, range(FEEDBACK_TOKEN, vocab_size), describe, violations)


def check_block_tables(fields: StepFields, description: WorkerDescription, violations: Violations) -> None:
    """Each row's table covers the row and is no longer than the longest sequence's; its blocks exist."""
    block_size, num_blocks = description.kv_cache.block_size, description.kv_cache.num_blocks
    largest = -(-description.model.max_model_len // block_size)
    counts = fields.block_counts
    if check_length("block_counts", counts, fields.num_sequences, violations):
        smallest = _smallest_counts(fields, description, violations)
        bad = (counts < smallest) | (counts > largest)
        if np.count_nonzero(bad):
            violations.add_entries(
                "block_counts",
                np.flatnonzero(bad),
                lambda row: f"row {row}: found {counts[row]} blocks of {block_size} tokens, expected {smallest[row]} .. {largest}",
            )
    has_tables = "block_counts" not in violations and check_length(
        "block_ids", fields.block_ids, _sum(counts), violations, "the sum of block_counts"
    )

    def describe(index: int) -> str:
        place = place_of(starts_of(counts), index, "block") if has_tables else ""
        null = " (block 0 is the null block)" if fields.block_ids[index] == 0 else ""
        return f"{place}found {fields.block_ids[index]}, expected 1 .. {num_blocks - 1}{null}"

    check_range("block_ids", fields.block_ids, range(1, num_blocks), describe, violations)


def check_writes(fields: StepFields, description: WorkerDescription, violations: Violations) -> None:
    """No two rows write one slot, and no row's table names a block twice that the row writes.

    Rows may read what others read or write: the new keys and values of a layer are all written before any is read.
    """
    if any(name in violations for name in ("query_lens", "context_lens", "block_counts", "block_ids")):
        return
    written = _written_entries(fields, description.kv_cache.block_size)
    blocks = fields.block_ids[written]
    if len(blocks) == fields.num_sequences:  # One block per row: each entry is compared with the one that its row writes.
        named = np.repeat(blocks, fields.block_counts) == fields.block_ids
    else:
        is_written = np.zeros(description.kv_cache.num_blocks, np.bool_)
        is_written[blocks] = True
        named = is_written.take(fields.block_ids)
    # The good case, in one pass over the tables: no written block is named again.
    if np.count_nonzero(named) == len(blocks) and not _has_duplicates(blocks):
        return
    _find_blocks_repeated_in_a_row(fields, written, np.flatnonzero(named), violations)
    _find_slots_of_two_rows(fields, description.kv_cache.block_size, violations)


def check_sample(fields: StepFields, description: WorkerDescription, violations: Violations) -> None:
    """`sample` is empty or has one entry per row."""
    check_optional_length("sample", fields.sample, fields.num_sequences, violations)


def check_drafts(fields: StepFields, description: WorkerDescription, violations: Violations) -> None:
    """Rows with drafts sample, and have one token beside them."""
    draft_lens = fields.draft_lens
    if not check_optional_length("draft_lens", draft_lens, fields.num_sequences, violations):
        return
    _check_minimum("draft_lens", draft_lens, 0, violations)
    drafted = draft_lens > 0
    wrong = drafted & (fields.query_lens != draft_lens.astype(np.int64) + 1)
    if wrong.any():
        violations.add_entries(
            "draft_lens",
            np.flatnonzero(wrong),
            lambda row: (
                f"row {row}: found {draft_lens[row]} drafts in {fields.query_lens[row]} tokens, "
                f"expected 0 drafts or {int(draft_lens[row]) + 1} tokens"
            ),
        )
    if len(fields.sample) == fields.num_sequences and (unsampled := drafted & ~fields.sample).any():
        violations.add_entries(
            "draft_lens",
            np.flatnonzero(unsampled),
            lambda row: f"row {row}: found {draft_lens[row]} drafts, expected 0, because sample of the row is false",
        )


CHECKS: tuple[Check, ...] = (
    check_identity,
    check_rows,
    check_tokens,
    check_block_tables,
    check_writes,
    check_sample,
    check_drafts,
)


def _copied(entries: Sequence[Any], empty: npt.NDArray[ScalarT]) -> npt.NDArray[ScalarT]:
    """Returns the entries of a repeated field as an array; `empty`, which has the field's type, where there are none."""
    if not entries:
        return empty
    # A few numbers are handed over faster as a list: 0.7 us instead of 4.8.
    return np.array(entries[:] if len(entries) <= _MAX_LISTED_ENTRIES else entries, dtype=empty.dtype)


def _check_minimum(field: str, array: Int32Array, minimum: int, violations: Violations) -> None:
    if array.size and np.minimum.reduce(array) < minimum:
        violations.add_entries(
            field, np.flatnonzero(array < minimum), lambda row: f"row {row}: found {array[row]}, expected at least {minimum}"
        )


def _sum(array: Int32Array) -> int:
    return int(np.add.reduce(array, dtype=np.int64))


def check_range(field: str, array: Int32Array, bounds: range, describe: Callable[[int], str], violations: Violations) -> None:
    """Refuses the entries of an array that are out of bounds, each with what `describe` says of it."""
    if array.size and (np.minimum.reduce(array) < bounds.start or np.maximum.reduce(array) >= bounds.stop):
        violations.add_entries(field, np.flatnonzero((array < bounds.start) | (array >= bounds.stop)), describe)


def place_of(starts: IndexArray, index: int, noun: str) -> str:
    """Says where in a row an entry of a flat array stands; "" behind the last row."""
    row = int(np.searchsorted(starts, index, side="right")) - 1
    return f"row {row}, {noun} {index - starts[row]} of the row: " if row < len(starts) - 1 else ""


def _smallest_counts(fields: StepFields, description: WorkerDescription, violations: Violations) -> Int64Array:
    """[num_sequences]: how many blocks each row needs; 0 where the row's lengths are refused already."""
    query_lens, context_lens = fields.query_lens, fields.context_lens.astype(np.int64)
    if len(query_lens) != len(context_lens):
        return np.zeros(len(query_lens), np.int64)
    seq_lens = context_lens + query_lens
    if "query_lens" in violations or "context_lens" in violations:
        seq_lens[(query_lens < 1) | (context_lens < 0) | (seq_lens > description.model.max_model_len)] = 0
    return -(-seq_lens // description.kv_cache.block_size)


def _written_entries(fields: StepFields, block_size: int) -> Int64Array:
    """Indices into `block_ids` of the blocks that the step writes to, in order."""
    context_lens = fields.context_lens.astype(np.int64)
    firsts: Int64Array = starts_of(fields.block_counts)[:-1] + context_lens // block_size
    if _sum(fields.query_lens) == fields.num_sequences:  # One token in each row.
        return firsts
    num_written = (context_lens + (fields.query_lens - 1)) // block_size - context_lens // block_size + 1
    starts = starts_of(num_written)
    return np.repeat(firsts - starts[:-1], num_written) + np.arange(starts[-1])


def _has_duplicates(array: Int32Array) -> bool:
    if len(array) < 2:
        return False
    ordered = np.sort(array)
    return bool(np.count_nonzero(ordered[1:] == ordered[:-1]))


def _find_blocks_repeated_in_a_row(fields: StepFields, written: Int64Array, named: Int64Array, violations: Violations) -> None:
    """Finds blocks that a row writes and that its table names more than once, so that a write destroys the row's own context."""
    starts = starts_of(fields.block_counts)

    def keys_of(entries: Int64Array) -> Int64Array:
        rows: Int64Array = np.searchsorted(starts, entries, side="right") - 1
        return rows << 32 | fields.block_ids[entries]

    keys = keys_of(named)
    unique_keys, counts = np.unique(keys, return_counts=True)
    for key in np.intersect1d(unique_keys[counts > 1], keys_of(written))[: Violations.LIMIT].tolist():
        row, block = key >> 32, key & 0xFFFFFFFF
        first, second = named[keys == key][:2].tolist()
        violations.add(
            f"block_ids[{second}]",
            f"row {row}: found block {block}, which the row writes, as blocks {first - starts[row]} and {second - starts[row]} "
            f"of its table, expected once",
        )


def _find_slots_of_two_rows(fields: StepFields, block_size: int, violations: Violations) -> None:
    """Finds slots to which two rows write."""
    query_starts = starts_of(fields.query_lens)
    rows = np.repeat(np.arange(fields.num_sequences), fields.query_lens)
    positions = np.arange(query_starts[-1]) + np.repeat(fields.context_lens - query_starts[:-1], fields.query_lens)
    entries = starts_of(fields.block_counts)[rows] + positions // block_size
    slots = fields.block_ids[entries].astype(np.int64) * block_size + positions % block_size
    order = np.argsort(slots, kind="stable")
    earlier, later = order[:-1], order[1:]
    collides = (slots[earlier] == slots[later]) & (rows[earlier] != rows[later])
    earlier, later = earlier[collides], later[collides]
    _, firsts = np.unique(entries[later], return_index=True)
    for index in firsts[: Violations.LIMIT].tolist():
        one, other = earlier[index], later[index]
        violations.add(
            f"block_ids[{entries[other]}]",
            f"rows {rows[one]} and {rows[other]} both write block {slots[other] // block_size}, offset {slots[other] % block_size} "
            f"(their positions {positions[one]} and {positions[other]}), expected one row to write there",
        )
