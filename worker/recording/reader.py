"""Reads the records of a recording as what they stand for."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.arrays import UInt64Array
from modelworker.worker.errors import SetupError
from modelworker.worker.recording.file import RecordingFile, RecordKind


class ReleasedSequences(NamedTuple):
    """Sequences of which the engine forgot the sampled tokens."""

    sequence_ids: UInt64Array
    time_ns: int

    @property
    def num_bytes(self) -> int:
        """Memory that keeping it takes, roughly."""
        return self.sequence_ids.nbytes


class ExecutedStep(NamedTuple):
    """A record, parsed.

    Attributes:
        request: what was asked for.
        answer: what the step came to; None: it failed after launch.
        seed: what the engine drew the seeds of rows without one from.
        time_ns: when it was executed, by the worker's monotonic clock.
    """

    request: pb.ExecuteStepRequest
    answer: pb.ExecuteStepResponse | None
    seed: int
    time_ns: int


def read_steps(file: RecordingFile) -> Iterator[ExecutedStep | ReleasedSequences | str]:
    """Yields the steps of a recording and what was released between them; at the end, if it came before that of the epoch, why.

    Raises:
        SetupError: a record is damaged.
    """
    for record in file.records():
        if record.kind is RecordKind.END:
            yield record.request.decode(errors="replace")
            continue
        if record.kind is RecordKind.RELEASE:
            yield ReleasedSequences(np.frombuffer(record.request, "<u8").astype(np.uint64), record.time_ns)
            continue
        try:
            request = pb.ExecuteStepRequest.FromString(record.request)
            answer = pb.ExecuteStepResponse.FromString(record.answer) if record.kind is RecordKind.STEP else None
        except DecodeError as error:
            raise SetupError(f"{file.path}: a record is no step: {error}") from error
        yield ExecutedStep(request, answer, record.seed, record.time_ns)
    if file.header.ended:
        yield file.header.ended
