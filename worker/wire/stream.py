"""The answers of a stream of steps."""

from google.rpc import status_pb2

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.wire.step import StepIdentity


def encode_stream_answer(step: StepIdentity, outcome: pb.ExecuteStepResponse | status_pb2.Status) -> pb.ExecuteStepsResponse:
    """Hot path: makes the answer to a step of a stream: what it produced, or the status that a call of its own would have got."""
    if isinstance(outcome, pb.ExecuteStepResponse):
        return pb.ExecuteStepsResponse(step_id=step.step_id, client_tag=step.client_tag, ok=outcome)
    status = pb.Status.FromString(outcome.SerializeToString())
    return pb.ExecuteStepsResponse(step_id=step.step_id, client_tag=step.client_tag, error=status)
