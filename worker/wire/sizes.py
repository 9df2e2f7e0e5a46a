"""How large a request may be: its bytes before it is parsed, its arrays before any of them is copied.

The event loop parses; what it spends on a request that can only be refused must not depend on what the client sends. Found by
measuring: a 60 MiB message of one array took 0.2 to 1.2 s to parse and copy, in which no probe was answered.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.description import WorkerDescription
from modelworker.worker.wire.content import read_records
from modelworker.worker.wire.unbuilt import ACCEPTED_FIELDS, NEUTRAL_VALUES, NOT_IMPLEMENTED
from modelworker.worker.wire.violations import Violations

MAX_OTHER_REQUEST_BYTES = 2**20
"""Of every request that is no step."""

# For everything that is no array: ids, a trace context, and what a client sends twice.
_OTHER_FIELDS_BYTES = 2**16
# An array may come entry by entry, each with its tag (two bytes from field 16 on); a varint may be spelled with ten bytes.
_TAG_BYTES = 2
_VARINT_BYTES = 10
_ENTRY_BYTES = {
    FieldDescriptor.TYPE_SFIXED32: 4,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED64: 8,
    FieldDescriptor.TYPE_BOOL: _VARINT_BYTES,
    FieldDescriptor.TYPE_ENUM: _VARINT_BYTES,
}
# How many fields of a message that is too large are looked at to say which of them make it so.
_MAX_RECORDS = 256


def _arrays_of(message: Message, prefix: str = "") -> Iterator[tuple[str, Any]]:
    accepted = ACCEPTED_FIELDS | NEUTRAL_VALUES.keys()
    for field in message.DESCRIPTOR.fields:
        path = f"{prefix}{field.name}"
        if field.is_repeated and (path in accepted or prefix.removesuffix(".") in accepted):
            yield path, field


_STEP_ARRAYS = dict(_arrays_of(pb.ExecuteStepRequest()))
_SAMPLING_ARRAYS = dict(_arrays_of(pb.SamplingParams(), "sampling."))
_COPY_ARRAYS = dict(_arrays_of(pb.BlockCopies(), "block_copies."))
_ALL_ARRAYS = _STEP_ARRAYS | _SAMPLING_ARRAYS | _COPY_ARRAYS
# Groups of the arrays of a submessage, by its name.
_GROUPED_ARRAYS = {"sampling": _SAMPLING_ARRAYS, "block_copies": _COPY_ARRAYS}


def max_entries(path: str, description: WorkerDescription) -> int:
    """Returns how many entries an array of a step has at most: one per row, unless it lists tokens, blocks or other sequences."""
    limits = description.limits
    if path == "token_ids":
        return limits.max_tokens_per_step
    if path == "block_ids":
        return limits.max_sequences * -(-description.model.max_model_len // description.kv_cache.block_size)
    if path == "zero_block_ids" or path in _COPY_ARRAYS:
        return description.kv_cache.num_blocks - 1
    if path == "finished_sequence_ids":
        return max(limits.max_feedback_sequences, limits.max_sequences)
    return limits.max_sequences


def max_step_bytes(description: WorkerDescription) -> int:
    """Returns a size that no step within the worker's limits exceeds, however its client spells it."""
    return _OTHER_FIELDS_BYTES + sum(
        max_entries(path, description) * (_TAG_BYTES + _ENTRY_BYTES[field.type]) for path, field in _ALL_ARRAYS.items()
    )


def check_step_size(raw: bytes, max_bytes: int, description: WorkerDescription) -> None:
    """Checks the bytes of a step before anything of them is parsed.

    Args:
        raw: what came, whatever it is.
        max_bytes: `max_step_bytes` of the description.
        description: of the worker.

    Raises:
        InvalidStepError: there are too many. Names fields that are too long, where that can be seen.
    """
    if len(raw) <= max_bytes:
        return
    violations = Violations()
    violations.add("request", f"found {len(raw)} bytes, expected at most {max_bytes}: no step within this worker's limits has more")
    for path, num_bytes in _field_bytes(raw).items():
        if path not in ACCEPTED_FIELDS | NEUTRAL_VALUES.keys() and path not in _GROUPED_ARRAYS:
            violations.add(path, f"found set, expected unset: {NOT_IMPLEMENTED}")
        elif path in _STEP_ARRAYS:
            most = max_entries(path, description)
            if num_bytes > most * (_TAG_BYTES + _ENTRY_BYTES[_STEP_ARRAYS[path].type]):
                violations.add(path, f"found {num_bytes} bytes, expected at most {most} entries")
    violations.raise_if_any()


def _field_bytes(raw: bytes) -> dict[str, int]:
    """Returns the bytes of each known field among the first ones of something that may be a step."""
    sizes: dict[str, int] = {}
    names = pb.ExecuteStepRequest.DESCRIPTOR.fields_by_number
    try:
        for record in islice(read_records(raw), _MAX_RECORDS):
            field = names.get(record.tag >> 3)
            if field is not None:
                sizes[field.name] = sizes.get(field.name, 0) + min(record.end, len(raw)) - record.payload
    except DecodeError:
        pass  # What was read before is worth saying.
    return sizes


def check_request_size(raw: bytes) -> None:
    """Checks the bytes of a request that is no step before anything of them is parsed.

    Raises:
        InvalidStepError: there are too many.
    """
    if len(raw) > MAX_OTHER_REQUEST_BYTES:
        violations = Violations()
        violations.add("request", f"found {len(raw)} bytes, expected at most {MAX_OTHER_REQUEST_BYTES}")
        violations.raise_if_any()


def refuse_long_arrays(request: pb.ExecuteStepRequest, description: WorkerDescription, violations: Violations) -> None:
    """Refuses arrays that are longer than any step's, without looking at their entries."""
    for path, field in _STEP_ARRAYS.items():
        _check_most(path, len(getattr(request, field.name)), description, violations)
    for name, arrays in _GROUPED_ARRAYS.items():
        if request.HasField(name):
            for path, field in arrays.items():
                _check_most(path, len(getattr(getattr(request, name), field.name)), description, violations)


def _check_most(path: str, found: int, description: WorkerDescription, violations: Violations) -> None:
    most = max_entries(path, description)
    if found <= most:
        return
    if path == "query_lens":
        violations.add(path, f"found {found} sequences, expected at most max_sequences = {most}")
    elif path == "token_ids":
        violations.add(path, f"found {found} tokens, expected at most max_tokens_per_step = {most}")
    elif path == "block_ids":
        violations.add(
            path, f"found {found} blocks, expected at most {most}: max_sequences tables of the longest sequence's length"
        )
    elif path == "zero_block_ids" or path in _COPY_ARRAYS:
        violations.add(path, f"found {found} blocks, expected at most num_blocks - 1 = {most}")
    elif path == "finished_sequence_ids":
        violations.add(path, f"found {found} sequences, expected at most {most}: all whose tokens are kept")
    else:
        violations.add(path, f"found {found} entries, expected at most max_sequences = {most}")
