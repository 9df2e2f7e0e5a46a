r"""Which steps may run, and which were executed already: epoch, order, ownership and safe retries.

A pure state machine after "fencing" in the protocol: it has no threads, no queue and no clock of its own. A step's life:

    recall ── kept answer (a retry of an executed step)
       │
    take_over ── somebody else comes after the lease has expired: a new epoch
       │
    admit ──> queued ──> confirm ──> executing ──> finish ── its answer is kept
                 └───────────┴───────────┴──> drop ── ended without executing: its id is expected again

`begin_epoch` ends all of it at once. Ids of a running epoch: 1 .. last executed | last executed + 1 .. last admitted (in flight).
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from modelworker.worker.errors import PreconditionError, PreconditionReason, StepIdReusedError
from modelworker.worker.replay_table import KeptAnswer, ReplayTable

NOBODY = 0
"""Lease holder while there is no lease."""

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, kw_only=True, slots=True)
class FenceState:
    """What a router has to know to send its next step.

    Attributes:
        worker_epoch: random, never 0.
        next_step_id: the id that a new sequenced step must have.
        last_executed_step_id: id of the last sequenced step whose execution has ended; 0 = none in this epoch.
        lease_holder: router id; 0 = nobody.
    """

    worker_epoch: int
    next_step_id: int
    last_executed_step_id: int
    lease_holder: int


class FencedStep(Protocol):
    """What fencing reads of a `StepBatch`."""

    @property
    def step_id(self) -> int: ...  # noqa: D102
    @property
    def worker_epoch(self) -> int: ...  # noqa: D102
    @property
    def router_id(self) -> int: ...  # noqa: D102
    @property
    def digest(self) -> bytes: ...  # noqa: D102
    @property
    def is_sequenced(self) -> bool: ...  # noqa: D102


class Fence(Generic[AnswerT]):
    """Epoch, expected step id, lease and replays of one worker. Not thread-safe.

    Args:
        require_fencing: refuse unsequenced steps.
        lease_idle_seconds: how long the holder may be silent, with nothing in flight, before somebody else may take over.
        max_replays: answers kept for retries.
        max_replay_bytes: memory of those answers.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        require_fencing: bool,
        lease_idle_seconds: float,
        max_replays: int,
        max_replay_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._require_fencing = require_fencing
        self._lease_idle_seconds = lease_idle_seconds
        self._clock = clock
        self._replays: ReplayTable[AnswerT] = ReplayTable(max_answers=max_replays, max_bytes=max_replay_bytes)
        self._in_flight: dict[int, bytes] = {}  # step id -> digest
        self._last_executed = 0
        self._epoch = 0
        self.begin_epoch(holder=NOBODY)

    @property
    def epoch(self) -> int:
        """The worker's epoch."""
        return self._epoch

    @property
    def state(self) -> FenceState:
        """A snapshot for WorkerInfo."""
        return FenceState(
            worker_epoch=self._epoch,
            next_step_id=self._expected_id,
            last_executed_step_id=self._last_executed,
            lease_holder=self._holder,
        )

    def recall(self, step: FencedStep) -> AnswerT | None:
        """Returns the kept answer of a step that was executed already, else None (new, in flight, or forgotten).

        Raises:
            StepIdReusedError: the id is in flight, or its answer is kept, with other content.
        """
        if not step.is_sequenced or step.worker_epoch != self._epoch or step.router_id != self._holder:
            return None
        kept = self._replays.get(step.step_id)
        digest = kept.digest if kept else self._in_flight.get(step.step_id)
        if digest is None:
            return None
        if digest != step.digest:
            raise StepIdReusedError(f"step {step.step_id} of epoch {self._epoch} came before with other content")
        self._last_used = self._clock()
        return kept.answer if kept else None

    def take_over(self, step: FencedStep) -> bool:
        """Ends the epoch if `step` comes from somebody else than a holder whose lease has expired. Returns whether it did.

        The holder may come back and believe in its KV: only a new epoch tells it. A sequenced step hands the lease to its router
        (and is refused by `admit`, because it still names the old epoch); an unsequenced one leaves it free.
        """
        may_run = step.worker_epoch == self._epoch if step.is_sequenced else self._runs_unsequenced(step)
        if not may_run or self._is_holder(step) or self._lease_seconds_left() > 0:
            return False
        self.begin_epoch(holder=step.router_id if step.is_sequenced else NOBODY)
        return True

    def admit(self, step: FencedStep) -> None:
        """Lets a step into the queue. The first sequenced step takes the lease.

        Raises:
            PreconditionError: it doesn't fit the epoch, the lease, the order, or `require_fencing`.
        """
        self._check_epoch_of(step)
        if not step.is_sequenced and self._require_fencing:
            raise PreconditionError(
                PreconditionReason.FENCING_REQUIRED, "step_id is 0: this worker executes sequenced steps only (--require-fencing)"
            )
        self._check_owner(step)
        if not step.is_sequenced:
            return
        self._check_order(step, self._expected_id)
        self._in_flight[step.step_id] = step.digest
        self._holder = step.router_id
        self._last_used = self._clock()

    def confirm(self, step: FencedStep) -> None:
        """Checks an admitted step once more, right before it is executed.

        An unsequenced step was admitted before there was a lease, and runs before the first step of its holder.

        Raises:
            PreconditionError: the epoch, the lease or the order has changed since.
        """
        self._check_epoch_of(step)
        if step.is_sequenced:
            self._check_owner(step)
            self._check_order(step, self._last_executed + 1)

    def finish(self, step: FencedStep, answer: AnswerT, num_bytes: int) -> None:
        """Records that a step was executed, and keeps the answer of a sequenced one."""
        if step.is_sequenced:
            self._last_executed = step.step_id
            self._replays.keep(step.step_id, KeptAnswer(self._in_flight.pop(step.step_id), answer, num_bytes))
            self._last_used = self._clock()

    def drop(self, step: FencedStep) -> None:
        """Takes back the admission of a step that was not executed, and of those after it: its id is expected again."""
        if step.is_sequenced:
            for step_id in range(step.step_id, self._expected_id):
                del self._in_flight[step_id]

    def begin_epoch(self, *, holder: int) -> None:
        """Ends the epoch: the KV content counts as lost, nothing is in flight, kept answers are dropped, ids start at 1."""
        self._epoch = _new_epoch(self._epoch)
        self._in_flight.clear()
        self._replays.clear()
        self._last_executed = 0
        self._holder = holder
        self._last_used = self._clock()

    @property
    def holder(self) -> int:
        """Router id of the lease holder, or `NOBODY`."""
        return self._holder

    def check_epoch(self, expected: int) -> None:
        """Checks that a caller means this epoch.

        Raises:
            PreconditionError: KV_CACHE_LOST, it doesn't.
        """
        if expected != self._epoch:
            raise self.lost(expected)

    def check_router(self, router_id: int) -> None:
        """Checks that a router owns the worker, or nobody does.

        Raises:
            PreconditionError: WORKER_OWNED, another one does.
        """
        if self._holder not in (NOBODY, router_id):
            raise self._owned(f"router_id is {router_id}")

    def lost(self, expected: int) -> PreconditionError:
        """Returns what a caller is told who means another epoch."""
        return PreconditionError(
            PreconditionReason.KV_CACHE_LOST,
            f"worker_epoch is {expected}, expected {self._epoch}: the KV cache content of another epoch is lost",
            worker_epoch=self._epoch,
            expected_step_id=self._expected_id,
        )

    @property
    def _expected_id(self) -> int:
        return self._last_executed + len(self._in_flight) + 1

    def _runs_unsequenced(self, step: FencedStep) -> bool:
        return not self._require_fencing and step.worker_epoch in (0, self._epoch)

    def _is_holder(self, step: FencedStep) -> bool:
        return self._holder in (NOBODY, step.router_id) if step.is_sequenced else self._holder == NOBODY

    def _lease_seconds_left(self) -> float:
        if self._in_flight:
            return self._lease_idle_seconds
        return self._last_used + self._lease_idle_seconds - self._clock()

    def _check_epoch_of(self, step: FencedStep) -> None:
        if step.is_sequenced or step.worker_epoch != 0:
            self.check_epoch(step.worker_epoch)

    def _check_owner(self, step: FencedStep) -> None:
        if not self._is_holder(step):
            raise self._owned(f"router_id is {step.router_id}" if step.is_sequenced else "step_id is 0")

    def _owned(self, who: str) -> PreconditionError:
        return PreconditionError(
            PreconditionReason.WORKER_OWNED,
            f"{who}: router {self._holder} owns this worker's KV cache, until ResetKvCache or "
            f"{self._lease_idle_seconds:g} s without a step of its own",
            lease_holder=self._holder,
            expires_in_ms=max(0, math.ceil(self._lease_seconds_left() * 1000)),
        )

    def _check_order(self, step: FencedStep, expected: int) -> None:
        if step.step_id != expected:
            raise PreconditionError(
                PreconditionReason.STEP_OUT_OF_ORDER,
                f"step_id is {step.step_id}, expected {expected}",
                expected_step_id=expected,
            )


def _new_epoch(current: int) -> int:
    """Returns a random 64-bit number that is neither 0 nor the current epoch."""
    while (epoch := secrets.randbits(64)) in (0, current):
        pass
    return epoch
