"""What a worker promises and what it accepts are one thing."""

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.errors import InvalidStepError
from modelworker.worker.wire import CAPABILITIES, parse_step
from modelworker.worker.wire.capabilities import FIELD_CAPABILITIES, RPC_CAPABILITIES
from modelworker.worker.wire.unbuilt import REQUIRED_FIELDS
from modelworker_testing.descriptions import describe_worker
from modelworker_testing.steps import step_request

STEP_FIELDS = pb.ExecuteStepRequest.DESCRIPTOR.fields
OPTIONAL_PATHS = [
    path
    for field in STEP_FIELDS
    if field.name not in REQUIRED_FIELDS
    for path in (
        [f"sampling.{inner.name}" for inner in pb.SamplingParams.DESCRIPTOR.fields] if field.name == "sampling" else [field.name]
    )
]

# A value that asks for something, where 1 (or true, or an empty message) does not or is not valid.
TELLING = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "sampling.repetition": 2,
    "sampling.min_p": 0.5,
}


def request_with(path: str, value: Any) -> pb.ExecuteStepRequest:
    request = step_request((0, 2, [1]), worker_epoch=1, router_id=1)
    message: Any = request
    if path.startswith("sampling."):
        message = request.sampling
    name = path.rpartition(".")[2]
    field = message.DESCRIPTOR.fields_by_name[name]
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        getattr(message, name).SetInParent()
    elif field.is_repeated:
        getattr(message, name).append(value)
    else:
        setattr(message, name, value)
    if path == "next_prompt_ids":
        request.prompt_logprobs.append(True)
    return request


def parse(request: pb.ExecuteStepRequest) -> None:
    parse_step(request, describe_worker(), arrival_ns=0, deadline_ns=None)


def test_the_paths_are_those_of_the_protocol() -> None:
    assert len(OPTIONAL_PATHS) == len(set(OPTIONAL_PATHS)) > 30
    assert set(FIELD_CAPABILITIES) < set(OPTIONAL_PATHS)
    assert len(set(CAPABILITIES)) == len(CAPABILITIES)


@pytest.mark.parametrize("path", OPTIONAL_PATHS)
def test_every_optional_field_is_a_capability_or_refused_by_its_name(path: str) -> None:
    request = request_with(path, TELLING.get(path, 1))
    if path in CAPABILITIES:
        parse(request)
        return
    with pytest.raises(InvalidStepError) as caught:
        parse(request)
    assert [violation.field.partition("[")[0] for violation in caught.value.violations] == [path]
    assert "not implement" in caught.value.violations[0].description


@pytest.mark.parametrize("path", ["draft_lens", "prompt_logprobs", "next_prompt_ids"])
def test_an_optional_array_of_another_length_is_refused(path: str) -> None:
    request = request_with(path, 0)
    getattr(request, path).append(0)
    with pytest.raises(InvalidStepError, match=f"{path}: found 2 entries, expected 1"):
        parse(request)


def test_every_promised_rpc_is_one_of_the_protocol() -> None:
    assert set(RPC_CAPABILITIES) < {method.name for method in pb.DESCRIPTOR.services_by_name["ModelWorker"].methods}
