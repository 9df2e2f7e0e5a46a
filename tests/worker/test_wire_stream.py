"""Which step a stream's answer names, when the step was not parsed."""

import time

from hypothesis import given
from hypothesis import strategies as st

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.wire.stream import read_step_numbers
from modelworker_testing.steps import valid_requests, varint

UINT64 = st.integers(0, 2**64 - 1)


@given(request=valid_requests(), step_id=UINT64, client_tag=UINT64)
def test_the_numbers_of_an_unparsed_step_are_those_that_parsing_would_find(
    request: pb.ExecuteStepRequest, step_id: int, client_tag: int
) -> None:
    request.step_id, request.client_tag = step_id, client_tag
    assert read_step_numbers(request.SerializeToString()) == (step_id, client_tag)
    # Of a number that comes more than once the last one counts.
    twice = pb.ExecuteStepRequest(step_id=5, client_tag=6).SerializeToString() + request.SerializeToString()
    parsed = pb.ExecuteStepRequest.FromString(twice)
    assert read_step_numbers(twice) == (parsed.step_id, parsed.client_tag)


@given(raw=st.binary(max_size=60))
def test_anything_that_is_no_message_has_numbers_that_fit_an_answer(raw: bytes) -> None:
    step_id, client_tag = read_step_numbers(raw)
    pb.ExecuteStepsResponse(step_id=step_id, client_tag=client_tag)


def test_numbers_behind_many_fields_cost_no_time() -> None:
    tag = pb.ExecuteStepRequest.DESCRIPTOR.fields_by_name["query_lens"].number << 3 | 5
    raw = (varint(tag) + bytes(4)) * 10**6 + pb.ExecuteStepRequest(client_tag=7).SerializeToString()
    begun = time.thread_time()
    assert read_step_numbers(raw) == (0, 0)
    # All of them take half a second.
    assert time.thread_time() - begun < 0.05
