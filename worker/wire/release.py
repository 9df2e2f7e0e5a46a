"""ReleaseSequences: its request becomes checked values, its result an answer."""

from dataclasses import dataclass

import numpy as np

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.arrays import UInt64Array
from modelworker.worker.wire.content import MessageSchema, refuse_unknown_fields
from modelworker.worker.wire.violations import Violations

_SCHEMA = MessageSchema.of(pb.ReleaseSequencesRequest())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SequenceRelease:
    """Sequences that a router has done with.

    Attributes:
        worker_epoch: in which it knows them.
        router_id: who it is.
        sequence_ids: [number of sequences].
    """

    worker_epoch: int
    router_id: int
    sequence_ids: UInt64Array


def parse_release_sequences(request: pb.ReleaseSequencesRequest) -> SequenceRelease:
    """Checks a request, which may contain anything.

    Raises:
        InvalidStepError: it names no epoch or no router, or has a field that this worker does not know.
    """
    violations = Violations()
    if request.worker_epoch == 0:
        violations.add("worker_epoch", "found 0, expected the worker's epoch (WorkerInfo.worker_epoch)")
    if request.router_id == 0:
        violations.add("router_id", "found 0, expected the id of the router that owns the worker")
    refuse_unknown_fields(request.SerializeToString(), _SCHEMA, violations)
    violations.raise_if_any()
    return SequenceRelease(
        worker_epoch=request.worker_epoch, router_id=request.router_id, sequence_ids=np.array(request.sequence_ids, np.uint64)
    )


def encode_release_sequences(num_released: int) -> pb.ReleaseSequencesResponse:
    """Makes the answer: how many of the sequences were known."""
    return pb.ReleaseSequencesResponse(num_released=num_released)
