"""How large a step may be, judged before it costs anything."""

import struct
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.client import build_step
from modelworker.worker.errors import InvalidStepError
from modelworker.worker.wire import check_request_size, check_step_size, max_step_bytes, parse_step
from modelworker.worker.wire.sizes import MAX_OTHER_REQUEST_BYTES
from modelworker_testing.descriptions import describe_worker
from modelworker_testing.steps import step_request, valid_requests, varint

WORKER = describe_worker()
LARGE_WORKER = describe_worker(max_model_len=8192, block_size=32, num_blocks=70_000, max_sequences=256, max_tokens_per_step=8192)
ENTRIES = 2_000_000
STEP_ARRAYS = (
    "query_lens", "context_lens", "token_ids", "block_counts", "block_ids", "sample", "draft_lens", "prompt_logprobs",
    "next_prompt_ids",
)  # fmt: skip
SAMPLING_ARRAYS = (
    "temperature", "top_k", "top_p", "min_p", "seed", "has_seed", "num_logprobs", "logprobs_mode", "presence", "frequency",
    "repetition",
)  # fmt: skip
PART_ARRAYS = (
    "history.prompt_lens", "history.output_lens", "history.token_ids", "logit_bias.counts", "logit_bias.token_ids",
    "logit_bias.values", "allowed_ids.counts", "allowed_ids.token_ids", "banned_ids.counts", "banned_ids.token_ids",
    "grammar.rows",
)  # fmt: skip
_PACKING = {
    FieldDescriptor.TYPE_SFIXED32: (5, struct.Struct("<i").pack),
    FieldDescriptor.TYPE_FLOAT: (5, struct.Struct("<f").pack),
    FieldDescriptor.TYPE_FIXED64: (1, struct.Struct("<Q").pack),
    FieldDescriptor.TYPE_BOOL: (0, lambda value: b"\x81" + b"\x80" * 8 + b"\0" if value else b"\x80" * 9 + b"\0"),
    FieldDescriptor.TYPE_ENUM: (0, lambda value: varint(value % 2**64)),
}


def unpacked(message: Any) -> bytes:
    """A message as the most wasteful client would write it: arrays entry by entry, booleans as varints of ten bytes."""
    content = b""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            part = unpacked(value)
            content += varint(field.number << 3 | 2) + varint(len(part)) + part
        elif field.is_repeated:
            wire_type, pack = _PACKING[field.type]
            content += b"".join(varint(field.number << 3 | wire_type) + pack(entry) for entry in value)
        else:
            alone = type(message)()
            setattr(alone, field.name, value)
            content += alone.SerializeToString()
    return content


def violations_of(request: pb.ExecuteStepRequest, **arguments: Any) -> dict[str, str]:
    with pytest.raises(InvalidStepError) as caught:
        parse_step(request, WORKER, arrival_ns=0, deadline_ns=None, **arguments)
    return {violation.field: violation.description for violation in caught.value.violations}


def size_violations_of(raw: bytes) -> dict[str, str]:
    with pytest.raises(InvalidStepError) as caught:
        check_step_size(raw, max_step_bytes(WORKER), WORKER)
    return {violation.field: violation.description for violation in caught.value.violations}


@given(valid_requests())
def test_no_valid_step_is_too_large_however_it_is_spelled(request: pb.ExecuteStepRequest) -> None:
    raw = unpacked(request)
    assert pb.ExecuteStepRequest.FromString(raw) == request
    check_step_size(raw, max_step_bytes(WORKER), WORKER)
    batch = parse_step(pb.ExecuteStepRequest.FromString(raw), WORKER, arrival_ns=0, deadline_ns=None, raw=raw)
    assert batch.token_ids.tolist() == list(request.token_ids)


def test_a_step_at_every_limit_is_within_the_size_packed_and_unpacked() -> None:
    rows = 256
    step = build_step(
        query_lens=[32] * rows,
        context_lens=[8160] * rows,
        token_ids=[1] * 8192,
        block_counts=[256] * rows,
        block_ids=np.arange(1, rows * 256 + 1),
        sample=[True] * rows,
    )
    step.sampling.temperature.extend([0.5] * rows)
    step.sampling.seed.extend([1] * rows)
    step.sampling.logprobs_mode.extend([1] * rows)
    limit = max_step_bytes(LARGE_WORKER)
    assert len(step.SerializeToString()) < len(unpacked(step)) <= limit < 2_000_000
    raw = unpacked(step)
    assert (
        parse_step(pb.ExecuteStepRequest.FromString(raw), LARGE_WORKER, arrival_ns=0, deadline_ns=None, raw=raw).num_tokens == 8192
    )


@pytest.mark.parametrize("name", [*STEP_ARRAYS, *(f"sampling.{name}" for name in SAMPLING_ARRAYS), *PART_ARRAYS])
def test_an_array_longer_than_any_steps_is_refused_by_its_name_without_being_copied(name: str) -> None:
    group, _, field = name.rpartition(".")
    request = step_request((3, 1, [1]))
    message: Any = getattr(request, group) if group else request
    # 0 bytes at the end of a packed array are entries of any type.
    number = message.DESCRIPTOR.fields_by_name[field].number
    message.MergeFromString(varint(number << 3 | 2) + varint(8 * ENTRIES) + bytes(8 * ENTRIES))
    raw = request.SerializeToString()
    tracemalloc.start()
    try:
        found = violations_of(request, raw=raw)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert f"found {len(getattr(message, field))} " in found[name]
    assert ", expected at most " in found[name]
    assert peak < 1_000_000


def test_beside_an_array_that_is_too_long_everything_is_named_that_needs_no_look_at_entries() -> None:
    request = step_request((3, 1, [1]), lora_index=[1], draft_lens=[0] * 7)
    request.query_lens.extend([1] * 7)
    request.sampling.top_k.extend([0] * 9)
    assert list(violations_of(request)) == ["query_lens", "draft_lens", "sampling.top_k", "lora_index"]


def test_too_many_bytes_are_refused_with_found_and_limit_and_the_field_that_has_them() -> None:
    limit = max_step_bytes(WORKER)
    request = step_request((3, 1, [1]), block_ids=[1] * limit)
    raw = request.SerializeToString()
    assert size_violations_of(raw) == {
        "request": f"found {len(raw)} bytes, expected at most {limit}: no step within this worker's limits has more",
        "block_ids": f"found {4 * limit} bytes, expected at most 48 entries",
    }


def test_a_large_field_that_is_not_implemented_is_named_as_such() -> None:
    request = step_request((3, 1, [1]), draft_probabilities=pb.DraftProbabilities(data=bytes(max_step_bytes(WORKER))))
    assert size_violations_of(request.SerializeToString())["draft_probabilities"].startswith("found set, expected unset: ")


@pytest.mark.parametrize("part", ["history", "logit_bias", "allowed_ids", "banned_ids", "grammar"])
def test_what_is_said_of_single_tokens_may_be_large_but_not_larger_than_any_steps(part: str) -> None:
    limit = max_step_bytes(LARGE_WORKER)

    def request_of(num_bytes: int) -> bytes:
        request = step_request((3, 1, [1]))
        field = request.DESCRIPTOR.fields_by_name[part]
        return request.SerializeToString() + varint(field.number << 3 | 2) + varint(num_bytes) + bytes(num_bytes)

    largest = {"grammar": 200_000, "history": 8_000_000}.get(part, 4_000_000)
    check_step_size(request_of(largest), limit, LARGE_WORKER)
    with pytest.raises(InvalidStepError) as caught:
        check_step_size(request_of(30_000_000), limit, LARGE_WORKER)
    assert [violation.field for violation in caught.value.violations] == [part]


def test_the_rest_of_a_step_is_no_larger_for_what_is_said_of_single_tokens() -> None:
    limit = max_step_bytes(LARGE_WORKER)
    request = step_request((3, 1, [1]), history=pb.TokenHistory(token_ids=[1] * 100_000), block_ids=[1] * limit)
    with pytest.raises(InvalidStepError) as caught:
        check_step_size(request.SerializeToString(), limit, LARGE_WORKER)
    assert [violation.field for violation in caught.value.violations] == ["request", "block_ids"]
    assert " beside history" in caught.value.violations[0].description


@pytest.mark.parametrize(
    "raw", [b"\xff" * 30_000_000, b"\x0a" * 30_000_000, b"\x52\xff\xff\xff\x7f" + bytes(30_000_000), bytes(30_000_000)]
)
def test_large_nonsense_is_refused_at_once(raw: bytes) -> None:
    begun = time.thread_time()
    assert "request" in size_violations_of(raw)
    assert time.thread_time() - begun < 0.1


def test_a_request_that_is_no_step_may_have_a_mebibyte() -> None:
    check_request_size(bytes(MAX_OTHER_REQUEST_BYTES))
    with pytest.raises(InvalidStepError, match="request: found 1048577 bytes, expected at most 1048576"):
        check_request_size(bytes(MAX_OTHER_REQUEST_BYTES + 1))


@pytest.mark.parametrize("num_entries", [1, 40])
def test_an_unknown_field_behind_arrays_that_came_entry_by_entry_is_found(num_entries: int) -> None:
    request = step_request((0, num_entries, list(range(1, 9))) if num_entries < 31 else (0, 20, list(range(1, 9))))
    many = b"".join(varint(4 << 3) + varint(index) for index in range(1000)) if num_entries > 31 else b""
    raw = unpacked(request) + many + varint(1000 << 3) + b"\x01"
    found = violations_of(pb.ExecuteStepRequest.FromString(raw), raw=raw)
    assert found == {"1000": "found field number 1000, which this worker does not know, expected unset"}
