"""How large a request may be: its bytes before it is parsed, its arrays before any of them is copied.

The event loop parses; what it spends on a request that can only be refused must not depend on what the client sends. Found by
measuring: a 60 MiB message of one array took 0.2 to 1.2 s to parse and copy, in which no probe was answered.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.description import WorkerDescription
from modelworker.worker.wire.content import read_records
from modelworker.worker.wire.unbuilt import ACCEPTED_FIELDS, NOT_IMPLEMENTED
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
# Lists of tokens may be this long on average; a longer one is shorter as a grammar mask.
_MAX_LISTED_TOKENS = 4096
# How many fields of a message are looked at to say which of them make it large: 3 ms.
_MAX_RECORDS = 2**12


def _arrays_of(message: Message, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in message.DESCRIPTOR.fields:
        if field.is_repeated:
            yield f"{prefix}{field.name}", field


def _is_accepted(path: str) -> bool:
    return path in ACCEPTED_FIELDS or path.partition(".")[0] in ACCEPTED_FIELDS


# Arrays of a step by their paths, those of its parts included.
_STEP_ARRAYS = {path: field for path, field in _arrays_of(pb.ExecuteStepRequest()) if _is_accepted(path)}
_SAMPLING_ARRAYS = {path: field for path, field in _arrays_of(pb.SamplingParams(), "sampling.") if _is_accepted(path)}
_COPY_ARRAYS = dict(_arrays_of(pb.BlockCopies(), "block_copies."))
_SMALL_PARTS = {"sampling": _SAMPLING_ARRAYS, "block_copies": _COPY_ARRAYS}
# Parts that may be much larger than the rest of a step, each a message of its own.
_LARGE_PARTS = {
    name: dict(_arrays_of(getattr(pb.ExecuteStepRequest(), name), f"{name}."))
    for name in ("history", "logit_bias", "allowed_ids", "banned_ids", "grammar")
}

_PARTS = _SMALL_PARTS | _LARGE_PARTS


def max_entries(path: str, description: WorkerDescription) -> int:
    """Returns how many entries an array of a step has at most: one per row, unless it is one of the long ones."""
    limits, model = description.limits, description.model
    most = {
        "token_ids": limits.max_tokens_per_step,
        "grammar.rows": limits.max_tokens_per_step,
        "block_ids": limits.max_sequences * -(-model.max_model_len // description.kv_cache.block_size),
        "finished_sequence_ids": max(limits.max_feedback_sequences, limits.max_sequences),
        "history.token_ids": limits.max_sequences * model.max_model_len,
    }
    if path in most:
        return most[path]
    if path == "zero_block_ids" or path in _COPY_ARRAYS:
        return description.kv_cache.num_blocks - 1
    if path.endswith((".token_ids", ".values")):
        return max(limits.max_sequences * _MAX_LISTED_TOKENS, model.vocab_size)
    return limits.max_sequences


def max_step_bytes(description: WorkerDescription) -> int:
    """Returns a size that no step within the worker's limits exceeds, however its client spells it.

    Without what it says of single tokens (`history`, `logit_bias`, `allowed_ids`, `banned_ids`, `grammar`).
    """
    return _OTHER_FIELDS_BYTES + _max_array_bytes(_STEP_ARRAYS | _SAMPLING_ARRAYS | _COPY_ARRAYS, description)


def _max_part_bytes(name: str, description: WorkerDescription) -> int:
    masks = 4 * -(-description.model.vocab_size // 32) * description.limits.max_tokens_per_step if name == "grammar" else 0
    return _OTHER_FIELDS_BYTES + masks + _max_array_bytes(_LARGE_PARTS[name], description)


def _max_array_bytes(arrays: Mapping[str, Any], description: WorkerDescription) -> int:
    return sum(max_entries(path, description) * (_TAG_BYTES + _ENTRY_BYTES[field.type]) for path, field in arrays.items())


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
    sizes = _field_bytes(raw)
    rest = len(raw)
    for name in _LARGE_PARTS.keys() & sizes.keys() & ACCEPTED_FIELDS:
        most = _max_part_bytes(name, description)
        rest -= sizes[name]
        if sizes[name] > most:
            violations.add(name, f"found {sizes[name]} bytes, expected at most {most}")
    if rest > max_bytes:
        beside = "" if rest == len(raw) else f" beside {', '.join(_LARGE_PARTS)}"
        violations.add(
            "request",
            f"found {rest} bytes{beside}, expected at most {max_bytes}: no step within this worker's limits has more",
        )
        _name_large_fields(sizes, description, violations)
    violations.raise_if_any()


def _name_large_fields(sizes: Mapping[str, int], description: WorkerDescription, violations: Violations) -> None:
    for path, num_bytes in sizes.items():
        if path not in ACCEPTED_FIELDS and path not in _SMALL_PARTS:
            violations.add(path, f"found set, expected unset: {NOT_IMPLEMENTED}")
        elif path in _STEP_ARRAYS:
            most = max_entries(path, description)
            if num_bytes > most * (_TAG_BYTES + _ENTRY_BYTES[_STEP_ARRAYS[path].type]):
                violations.add(path, f"found {num_bytes} bytes, expected at most {most} entries")


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
    # No array has a lower limit.
    least = min(description.limits.max_sequences, description.limits.max_tokens_per_step, description.kv_cache.num_blocks - 1)
    for field, value in request.ListFields():
        if field.name in _STEP_ARRAYS:
            if len(value) > least:
                _check_most(field.name, len(value), description, violations)
        elif (arrays := _PARTS.get(field.name)) is not None:
            for part_field, part in value.ListFields():
                path = f"{field.name}.{part_field.name}"
                if path in arrays:
                    _check_most(path, len(part), description, violations)


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
    elif most == description.limits.max_sequences:
        violations.add(path, f"found {found} entries, expected at most max_sequences = {most}")
    else:
        violations.add(path, f"found {found} entries, expected at most {most}")
