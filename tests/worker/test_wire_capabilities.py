"""What a worker promises and what it accepts are one thing."""

from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.errors import InvalidStepError
from modelworker.worker.wire import CAPABILITIES, parse_step
from modelworker.worker.wire.capabilities import FIELD_CAPABILITIES, RPC_CAPABILITIES
from modelworker.worker.wire.unbuilt import NEUTRAL_VALUES, REQUIRED_FIELDS
from modelworker_testing.steps import describe_worker, step_request

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
    return request


def parse(request: pb.ExecuteStepRequest) -> None:
    parse_step(request, describe_worker(), arrival_ns=0, deadline_ns=None)


def test_the_paths_are_those_of_the_protocol() -> None:
    assert len(OPTIONAL_PATHS) == len(set(OPTIONAL_PATHS)) > 30
    assert {capability.partition("=")[0] for capability in FIELD_CAPABILITIES} < set(OPTIONAL_PATHS)
    assert len(set(CAPABILITIES)) == len(CAPABILITIES)
    assert set(NEUTRAL_VALUES) < set(OPTIONAL_PATHS)


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


@pytest.mark.parametrize("path", [path for path in FIELD_CAPABILITIES if "=" in path])
def test_a_value_that_is_a_capability_of_its_own_is_accepted(path: str) -> None:
    name, _, value = path.partition("=")
    parse(request_with(name, int(value)))


@pytest.mark.parametrize("path", sorted(NEUTRAL_VALUES))
def test_a_neutral_value_asks_for_nothing_and_is_accepted(path: str) -> None:
    parse(request_with(path, NEUTRAL_VALUES[path]))


def test_a_neutral_array_of_another_length_is_refused() -> None:
    request = request_with("draft_lens", 0)
    request.draft_lens.append(0)
    with pytest.raises(InvalidStepError, match="draft_lens: found 2 entries, expected 1"):
        parse(request)


def test_a_refused_array_names_its_first_row_and_leaves_room_for_other_violations() -> None:
    request = step_request(*((0, 1, [row + 1]) for row in range(6)), draft_lens=[0, 1, 1, 1, 1, 1])
    with pytest.raises(InvalidStepError) as caught:
        parse(request)
    assert [violation.field for violation in caught.value.violations] == ["draft_lens[1]"]
    assert caught.value.violations[0].description.startswith("row 1 (of 5 such rows): found 1, expected the neutral 0: ")


def test_every_promised_rpc_is_one_of_the_protocol() -> None:
    assert set(RPC_CAPABILITIES) < {method.name for method in pb.DESCRIPTOR.services_by_name["ModelWorker"].methods}
