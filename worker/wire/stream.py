"""The answers of a stream of steps, and which steps they answer."""

from itertools import islice
from typing import NamedTuple

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.wire.content import read_records, read_varint
from modelworker.worker.wire.step import StepIdentity

_FIELDS = pb.ExecuteStepRequest.DESCRIPTOR.fields_by_name
_STEP_ID_TAG, _CLIENT_TAG_TAG = (_FIELDS[name].number << 3 for name in ("step_id", "client_tag"))
# How many fields are looked at for the two: a step of packed arrays has no more, and most clients write them in front.
_MAX_RECORDS = 64
_MAX_UINT64 = 2**64 - 1


class StepNumbers(NamedTuple):
    """The numbers by which a client knows a step."""

    step_id: int
    client_tag: int


def read_step_numbers(raw: bytes) -> StepNumbers:
    """Reads the numbers of a step that is refused unparsed, out of its first fields; 0 where they are not found there.

    Args:
        raw: what came, whatever it is.
    """
    found = {_STEP_ID_TAG: 0, _CLIENT_TAG_TAG: 0}
    try:
        for record in islice(read_records(raw), _MAX_RECORDS):
            if record.tag in found:
                found[record.tag] = read_varint(raw, record.payload)[0] & _MAX_UINT64
    except DecodeError:
        pass  # What stands before that is a step's, as far as can be told.
    return StepNumbers(step_id=found[_STEP_ID_TAG], client_tag=found[_CLIENT_TAG_TAG])


def encode_stream_answer(step: StepIdentity, outcome: pb.ExecuteStepResponse | status_pb2.Status) -> pb.ExecuteStepsResponse:
    """Hot path: makes the answer to a step of a stream: what it produced, or the status that a call of its own would have got."""
    if isinstance(outcome, pb.ExecuteStepResponse):
        return pb.ExecuteStepsResponse(step_id=step.step_id, client_tag=step.client_tag, ok=outcome)
    status = pb.Status.FromString(outcome.SerializeToString())
    return pb.ExecuteStepsResponse(step_id=step.step_id, client_tag=step.client_tag, error=status)
