"""What leaves the worker says what the worker knows."""

from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.batch import StepBatch
from modelworker.worker.fencing import FenceState
from modelworker.worker.result import (
    GraphExecution,
    GraphMode,
    SampledLogprobs,
    SequenceErrorCode,
    SequenceFailure,
    StepResult,
    StepTimings,
)
from modelworker.worker.wire import CAPABILITIES, encode_reset_kv_cache, encode_result, encode_worker_info, parse_step
from modelworker_testing.descriptions import describe_worker
from modelworker_testing.steps import step_request


def int32(*values: int) -> Any:
    return np.array(values, np.int32)


def batch_of_three() -> StepBatch:
    request = step_request(*((0, 1, [row]) for row in (1, 2, 3)), step_id=2**64 - 1, worker_epoch=4, router_id=5, client_tag=6)
    return parse_step(request, describe_worker(), arrival_ns=0, deadline_ns=None)


def result_of(**changes: Any) -> StepResult:
    return StepResult(
        **{
            "sampled_counts": int32(1, 0, 1),
            "sampled_ids": int32(70, 71),
            "logprobs": None,
            "sequence_errors": (),
            "tainted_block_ids": int32(),
            "graph": GraphExecution(
                mode=GraphMode.NONE, padded_tokens=8, padded_sequences=4, compiled=True, fallback_reason="disabled"
            ),
            "timings": StepTimings(queue_ns=1, prepare_ns=2, forward_ns=3, sample_ns=2**40, total_ns=2**41),
            **changes,
        }
    )


def test_an_answer_carries_the_identity_of_its_request_and_the_epoch_it_ran_in() -> None:
    answer = encode_result(batch_of_three(), result_of(), 2**64 - 2)
    assert (answer.worker_epoch, answer.step_id, answer.client_tag) == (2**64 - 2, 2**64 - 1, 6)


def test_an_answer_carries_tokens_graph_and_timings() -> None:
    answer = encode_result(batch_of_three(), result_of(), 4)
    assert list(answer.sampled_counts) == [1, 0, 1]
    assert list(answer.sampled_ids) == [70, 71]
    assert not answer.HasField("logprobs")
    assert not answer.sequence_errors
    assert not answer.tainted_block_ids
    assert answer.graph == pb.GraphExecution(
        mode="GRAPH_MODE_NONE", padded_tokens=8, padded_sequences=4, compiled=True, fallback_reason="disabled"
    )
    assert answer.timings_ns == pb.StepTimings(queue=1, prepare=2, forward=3, sample=2**40, total=2**41)


@pytest.mark.parametrize("code", list(SequenceErrorCode))
def test_row_errors_and_tainted_blocks_are_named(code: SequenceErrorCode) -> None:
    failure = SequenceFailure(index=1, code=code, message="NaN")
    answer = encode_result(batch_of_three(), result_of(sequence_errors=(failure,), tainted_block_ids=int32(2, 9)), 4)
    assert list(answer.sequence_errors) == [pb.SequenceError(index=1, code=code.name, message="NaN")]
    assert list(answer.tainted_block_ids) == [2, 9]


def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    logprobs = SampledLogprobs(
        processed=np.array([True, False, False]),
        counts=int32(1, 0),
        token_ids=int32(70),
        values=np.array([-0.25], np.float32),
        ranks=int32(1),
    )
    answer = encode_result(batch_of_three(), result_of(logprobs=logprobs), 4)
    assert answer.logprobs == pb.Logprobs(modes=[1, 0, 0], counts=[1, 0], token_ids=[70], values=[-0.25], ranks=[1])


def test_a_step_without_rows_has_an_answer_without_rows() -> None:
    batch = parse_step(step_request(), describe_worker(), arrival_ns=0, deadline_ns=None)
    answer = encode_result(batch, result_of(sampled_counts=int32(), sampled_ids=int32()), 4)
    assert list(answer.sampled_counts) == []


def test_names_and_numbers_of_the_enums_are_those_of_the_protocol() -> None:
    assert {f"GRAPH_MODE_{mode.name}": mode.value for mode in GraphMode} == dict(pb.GraphMode.items())
    codes = {code.name: code.value for code in SequenceErrorCode}
    assert codes | {"SEQUENCE_ERROR_CODE_UNSPECIFIED": 0} == dict(pb.SequenceErrorCode.items())


def same(message: Any, described: Any) -> bool:
    """Compares a message with the dataclass it was made from, name by name; every field has to be there and to be set."""
    if is_dataclass(described):
        names = {field.name for field in fields(described)}
        assert isinstance(message, Message)
        assert names == set(message.DESCRIPTOR.fields_by_name)
        return all(same(getattr(message, name), getattr(described, name)) and getattr(described, name) for name in names)
    if isinstance(described, tuple):
        return len(message) == len(described) and all(map(same, message, described))
    return bool(message == described)


def test_worker_info_says_everything_that_the_description_says() -> None:
    description = describe_worker()
    info = encode_worker_info(description, FenceState(worker_epoch=1, next_step_id=3, last_executed_step_id=2, lease_holder=9), {})
    for name in ("model", "kv_cache", "limits", "execution", "self_check", "degradations"):
        assert same(getattr(info, name), getattr(description, name)), name
    assert dict(info.versions) == dict(description.versions)
    assert tuple(info.capabilities) == CAPABILITIES


def test_worker_info_says_where_the_epoch_stands_and_what_was_counted() -> None:
    state = FenceState(worker_epoch=2**64 - 1, next_step_id=2**63, last_executed_step_id=2**63 - 1, lease_holder=2**64 - 2)
    info = encode_worker_info(describe_worker(), state, {'steps_total{mode="NONE"}': 2**40})
    assert (info.worker_epoch, info.next_step_id) == (2**64 - 1, 2**63)
    assert (info.last_executed_step_id, info.lease_holder) == (2**63 - 1, 2**64 - 2)
    assert dict(info.counters) == {'steps_total{mode="NONE"}': 2**40}


def test_the_answer_to_a_reset_is_the_new_epoch() -> None:
    assert encode_reset_kv_cache(2**64 - 1).worker_epoch == 2**64 - 1
