"""What can go wrong, as exceptions.

WorkerError                 ends one call; the interceptor turns it into a gRPC status (the table stands in `interceptor`)
  InvalidStepError          INVALID_ARGUMENT: the request is malformed; every violation is named
  PreconditionError         FAILED_PRECONDITION: epoch, order, ownership or feedback do not fit the worker's state
  OverloadedError           RESOURCE_EXHAUSTED: come back later
  UnavailableError          UNAVAILABLE: starting or draining
  StepIdReusedError         ALREADY_EXISTS: the step id was executed with other content
  StepDeadlineError         DEADLINE_EXCEEDED: the deadline passed before the step started
  StepCancelledError        CANCELLED: everybody who waited for the step has gone
  NotBuiltError             UNIMPLEMENTED: the rpc is part of the protocol but not of this worker
  EngineFaultError          INTERNAL: the engine failed while executing the step
SetupError                  ends the process before readiness, with one clear line
  SettingsError             a flag, an environment variable, or a combination of them
  CheckpointError           a model directory that can't be served as it is
FatalEngineError            raised on the engine thread when the device can't be used any more; ends the process
"""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is wrong with a request: the path of the field, e.g. `block_ids[17]`, and what was found and expected."""

    field: str
    description: str


class PreconditionReason(StrEnum):
    """Machine-readable reasons of FAILED_PRECONDITION (`google.rpc.ErrorInfo.reason`)."""

    KV_CACHE_LOST = "KV_CACHE_LOST"
    STEP_OUT_OF_ORDER = "STEP_OUT_OF_ORDER"
    WORKER_OWNED = "WORKER_OWNED"
    FENCING_REQUIRED = "FENCING_REQUIRED"
    FEEDBACK_MISMATCH = "FEEDBACK_MISMATCH"


class WorkerError(Exception):
    """Ends one call. Its text is meant for the client."""


class InvalidStepError(WorkerError):
    """The request is malformed. Nothing was executed and the KV cache is untouched."""

    def __init__(self, violations: list[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("; ".join(f"{violation.field}: {violation.description}" for violation in violations))


class PreconditionError(WorkerError):
    """The request does not fit the worker's state. `metadata` is for programs, e.g. the expected step id."""

    def __init__(self, reason: PreconditionReason, message: str, **metadata: str | int) -> None:
        self.reason = reason
        self.metadata = {key: str(value) for key, value in metadata.items()}
        super().__init__(message)


class OverloadedError(WorkerError):
    """The worker has no room for the call now."""

    def __init__(self, message: str, *, retry_after_ms: int) -> None:
        self.retry_after_ms = retry_after_ms
        super().__init__(message)


class UnavailableError(WorkerError):
    """The worker is starting or draining."""

    def __init__(self, message: str, *, retry_after_ms: int | None = None) -> None:
        self.retry_after_ms = retry_after_ms
        super().__init__(message)


class StepIdReusedError(WorkerError):
    """A step id came again with other content."""


class StepDeadlineError(WorkerError):
    """The deadline passed before the step started. It was not executed."""


class StepCancelledError(WorkerError):
    """Nobody waits for the step any more. It was not executed."""


class NotBuiltError(WorkerError):
    """The rpc is part of the protocol, but this worker does not implement it."""


class EngineFaultError(WorkerError):
    """The engine failed while executing the step. The details are in the worker's log, not in the answer."""


class SetupError(Exception):
    """Ends the process before readiness. Its text is one line that says what to do."""


class SettingsError(SetupError):
    """A flag, an environment variable, or a combination of them can't be used."""


class CheckpointError(SetupError):
    """A model directory can't be served as it is."""


class FatalEngineError(Exception):
    """The device can't be used any more: the current call fails, and the process has to end."""
