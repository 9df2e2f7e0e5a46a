"""Whatever comes in, a step is either right by brute force or refused with named violations. Nothing else ever happens."""

import math
import struct

import hypothesis.strategies as st
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, event, given, settings

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.errors import InvalidStepError
from modelworker.worker.wire import parse_step
from modelworker.worker.wire.violations import Violations
from modelworker_testing.descriptions import describe_worker
from modelworker_testing.step_rules import is_valid, token_places
from modelworker_testing.steps import mutated_requests, valid_requests, varint

WORKER = describe_worker()

many = settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def parses_exactly_when_valid(request: pb.ExecuteStepRequest, raw: bytes | None = None) -> None:
    """The property: agrees with brute force, says what is wrong, and leaves the request as it was.

    Args:
        request: of any content.
        raw: what it was parsed from, if that is there; the outcome is the same without.
    """
    before = request.SerializeToString(deterministic=True)
    if is_valid(request, WORKER):
        event("valid")
        batch = parse_step(request, WORKER, arrival_ns=0, deadline_ns=None, raw=raw)
        assert batch.slots(WORKER.kv_cache.block_size).tolist() == [slot for _, _, slot in token_places(request)]
        assert batch.digest == parse_step(request, WORKER, arrival_ns=0, deadline_ns=None).digest
    else:
        event("invalid")
        with pytest.raises(InvalidStepError) as caught:
            parse_step(request, WORKER, arrival_ns=0, deadline_ns=None, raw=raw)
        with pytest.raises(InvalidStepError) as caught_without:
            parse_step(request, WORKER, arrival_ns=0, deadline_ns=None)
        assert {violation.field for violation in caught.value.violations} == {
            violation.field for violation in caught_without.value.violations
        }
        assert 1 <= len(caught.value.violations) <= Violations.LIMIT
        assert all(violation.field and violation.description for violation in caught.value.violations)
        assert "\n" not in str(caught.value)
    assert request.SerializeToString(deterministic=True) == before


def parses_or_is_no_message(content: bytes) -> None:
    try:
        request = pb.ExecuteStepRequest.FromString(content)
    except DecodeError:
        event("not a message")
        return
    parses_exactly_when_valid(request, content)


@many
@given(valid_requests())
def test_valid_steps_reach_the_batch_as_they_were_sent(request: pb.ExecuteStepRequest) -> None:
    batch = parse_step(pb.ExecuteStepRequest.FromString(request.SerializeToString()), WORKER, arrival_ns=5, deadline_ns=None)
    for name in ("query_lens", "context_lens", "token_ids", "block_counts", "block_ids"):
        assert getattr(batch, name).tolist() == list(getattr(request, name))
    for name in ("step_id", "worker_epoch", "router_id", "client_tag", "traceparent"):
        assert getattr(batch, name) == getattr(request, name)
    assert batch.sample.tolist() == (list(request.sample) or [True] * batch.num_sequences)
    assert batch.slots(WORKER.kv_cache.block_size).tolist() == [slot for _, _, slot in token_places(request)]
    sampling = request.sampling
    wants_sampling = (
        any(sampling.temperature)
        or any(number >= 0 for number in sampling.num_logprobs)
        or any((*sampling.presence, *sampling.frequency))
        or any(value != 1 for value in sampling.repetition)
        or any(part.token_ids for part in (request.allowed_ids, request.banned_ids, request.logit_bias))
        or bool(request.grammar.rows)
    )
    assert (batch.sampling is not None) == wants_sampling
    assert batch.draft_lens.tolist() == (list(request.draft_lens) or [0] * batch.num_sequences)
    if batch.sampling is not None:
        for name in ("temperature", "top_p", "min_p", "seed", "has_seed", "num_logprobs", "presence", "frequency", "repetition"):
            sent = list(getattr(request.sampling, name))
            assert not sent or getattr(batch.sampling, name).tolist() == sent


@many
@given(mutated_requests())
def test_mutated_steps_are_accepted_exactly_when_brute_force_accepts_them(request: pb.ExecuteStepRequest) -> None:
    parses_exactly_when_valid(request)


@st.composite
def records(draw: st.DrawFn) -> bytes:
    """One field of any number and wire type, known or unknown, well-formed or not quite."""
    number = draw(st.integers(1, 30) | st.sampled_from((127, 2**29 - 1)))
    wire_type = draw(st.sampled_from((0, 1, 2, 3, 5)))
    tag = varint(number << 3 | wire_type)
    if wire_type == 0:
        return tag + varint(draw(st.sampled_from((0, 1, 127, 128, 2**32 - 1, 2**64 - 1))))
    if wire_type == 1:
        return tag + struct.pack("<Q", draw(st.sampled_from((0, 1, 2**64 - 1))))
    if wire_type == 3:
        return tag + draw(st.sampled_from((b"", b"\x08\x01"))) + varint(number << 3 | 4)
    if wire_type == 5:
        return tag + struct.pack("<f", draw(st.sampled_from((0.0, 1.0, math.nan, math.inf))))
    payload = draw(
        st.binary(max_size=16) | st.lists(st.integers(-1, 3), max_size=4).map(lambda ints: struct.pack(f"<{len(ints)}i", *ints))
    )
    return tag + varint(len(payload)) + payload


@many
@given(
    base=st.just(pb.ExecuteStepRequest()) | valid_requests(),
    extra=st.lists(records(), min_size=1, max_size=2),
    nested=st.sampled_from((0, 15, 16, 17, 18, 20)),  # sampling, history, logit_bias, allowed_ids, grammar
)
def test_any_fields_on_the_wire_are_accepted_exactly_when_brute_force_accepts_them(
    base: pb.ExecuteStepRequest, extra: list[bytes], nested: int
) -> None:
    fields = b"".join(extra)
    if nested:
        fields = varint(nested << 3 | 2) + varint(len(fields)) + fields
    parses_or_is_no_message(base.SerializeToString() + fields)


@many
@given(base=valid_requests(), data=st.data())
def test_damaged_bytes_are_accepted_exactly_when_brute_force_accepts_them(base: pb.ExecuteStepRequest, data: st.DataObject) -> None:
    content = bytearray(base.SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        if content:
            index = data.draw(st.integers(0, len(content) - 1))
            content[index] = data.draw(st.integers(0, 255))
    parses_or_is_no_message(bytes(content))


@many
@given(st.binary(max_size=64))
def test_random_bytes_are_accepted_exactly_when_brute_force_accepts_them(content: bytes) -> None:
    parses_or_is_no_message(content)
