"""The queue in front of the engine thread, and who waits for what in it.

    event loop     admit ─── fence.admit ──┐                                     ┌──> Ticket.answer
                   call ───────────────────┴─> queued ─┬─> running ─┬─> finish ──┤
    engine thread                               take ──┘            ├─> fail ────┤
                                                       └─> drop <───┘ ───────────┘

Both threads change the queue, the fence and the tickets of an item, under one lock that is never held while the engine works.
Whoever ends items tells all their callers in one turn of the event loop.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from modelworker.worker.batch import StepBatch, StepResult
from modelworker.worker.errors import (
    EngineFaultError,
    OverloadedError,
    PreconditionError,
    StepCancelledError,
    StepDeadlineError,
    UnavailableError,
    WorkerError,
)
from modelworker.worker.fencing import NOBODY, Fence, FenceState
from modelworker.worker.settings import FencingSettings
from modelworker.worker.ticket import Answer, Control, Item, Outcomes, Step, Ticket

_MIN_RETRY_AFTER_MS = 5

T = TypeVar("T")


class CounterSink(Protocol):
    """Where the queue counts."""

    def increment(self, name: str, amount: int = 1, /, **labels: str) -> None:
        """Adds to a counter."""


class StepQueue:
    """Steps and other calls, in the order in which the engine takes them.

    Args:
        settings: order, ownership, retries and the in-flight limit.
        counters: where it counts.
        tell: has outcomes delivered on the event loop; called on both threads.
        clear_kv_cache: called on the engine thread before the first step of an epoch that began by a fault or a takeover.
    """

    def __init__(
        self,
        settings: FencingSettings,
        counters: CounterSink,
        *,
        tell: Callable[[Outcomes], None],
        clear_kv_cache: Callable[[], None],
    ) -> None:
        self._max_in_flight = settings.max_steps_in_flight
        self._counters = counters
        self._tell = tell
        self._clear_kv_cache = clear_kv_cache
        self._work = threading.Condition()
        self._fence: Fence[Answer] = Fence(
            require_fencing=settings.require_fencing,
            lease_idle_seconds=settings.lease_idle_seconds,
            max_replays=settings.max_replays,
            max_replay_bytes=settings.max_replay_memory,
            clock=time.monotonic,
        )
        self._queue: deque[Item] = deque()
        self._running: Item | None = None
        self._running_since_ns = 0
        self._last_step_ns = 0
        self._num_steps = 0
        self._sequenced: dict[tuple[int, int, int], Step] = {}
        self._is_draining = False
        self._is_closed = False

    # -- facts, for any thread --

    @property
    def state(self) -> FenceState:
        """Epoch, expected step id and lease."""
        with self._work:
            return self._fence.state

    @property
    def num_queued(self) -> int:
        """Items that wait for the engine."""
        return len(self._queue)

    @property
    def num_steps_in_flight(self) -> int:
        """Steps queued or running."""
        return self._num_steps

    @property
    def is_draining(self) -> bool:
        """Whether new work is refused."""
        return self._is_draining

    @property
    def is_closed(self) -> bool:
        """Whether everything is refused."""
        return self._is_closed

    @property
    def is_drained(self) -> bool:
        """Whether new work is refused and all accepted work has ended."""
        with self._work:
            return self._is_draining and not self._queue and self._running is None

    @property
    def running(self) -> Item | None:
        """The item that the engine is on."""
        return self._running

    @property
    def running_seconds(self) -> float:
        """How long the engine has been on its present item; 0 while it is idle."""
        with self._work:
            return 0.0 if self._running is None else (time.monotonic_ns() - self._running_since_ns) / 1e9

    # -- event loop --

    def admit(self, batch: StepBatch) -> Ticket[Answer]:
        """Queues a step, joins it to the same one in flight, or answers it from the kept answers.

        Raises:
            WorkerError: it is refused.
        """
        with self._work:
            self._check_open()
            answer = self._fence.recall(batch)
            if answer is not None:
                return self._replay(answer)
            if batch.deadline_ns is not None and time.monotonic_ns() >= batch.deadline_ns:
                raise StepDeadlineError("the deadline passed before the step was admitted")
            step = self._sequenced.get((batch.worker_epoch, batch.router_id, batch.step_id))
            if step is not None:
                return self._join(step, batch)
            self._check_not_draining()
            self._check_room(self._num_steps, "steps are in flight", self._max_in_flight)
            if self._fence.take_over(batch):
                self._counters.increment("kv_cache_resets_total", reason="takeover")
                self._push(Control(self._clear_kv_cache))
            self._fence.admit(batch)
            return self._add(Step(batch))

    def call(self, action: Callable[[], T]) -> Ticket[T]:
        """Has `action` called on the engine thread, after what is queued.

        Raises:
            WorkerError: it is refused.
        """
        with self._work:
            self._check_open()
            self._check_not_draining()
            self._check_room(len(self._queue), "steps and calls are queued", 2 * self._max_in_flight)
            control = Control(action)
            self._push(control)
            return self._ticket(control, None)

    def begin_drain(self) -> None:
        """Refuses new work from now on; steps in flight can still be joined, and kept answers are given."""
        with self._work:
            self._is_draining = True

    def _replay(self, answer: Answer) -> Ticket[Answer]:
        self._counters.increment("steps_replayed_total")
        ticket: Ticket[Answer] = Ticket(lambda _: None, lambda _: None)
        ticket.resolve(replace(answer, replayed=True))
        return ticket

    def _join(self, step: Step, batch: StepBatch) -> Ticket[Answer]:
        self._check_room(len(step.tickets), f"callers wait for {step.name}", self._max_in_flight)
        self._counters.increment("steps_joined_total")
        return self._ticket(step, batch.deadline_ns)

    def _add(self, step: Step) -> Ticket[Answer]:
        self._num_steps += 1
        if step.batch.is_sequenced:
            self._sequenced[step.key] = step
        self._push(step)
        return self._ticket(step, step.batch.deadline_ns)

    def _ticket(self, item: Item, deadline_ns: int | None) -> Ticket[Any]:
        ticket: Ticket[Any] = Ticket(
            lambda ticket: self._withdraw(item, ticket), lambda ticket: self._expire(item, ticket), deadline_ns
        )
        item.tickets.append(ticket)
        return ticket

    def _withdraw(self, item: Item, ticket: Ticket[Any]) -> None:
        self._leave(item, ticket, StepCancelledError(f"nobody waits for {item.name} any more: it was not executed"), "cancelled")

    def _expire(self, item: Item, ticket: Ticket[Any]) -> None:
        with self._work:
            if item.is_queued:  # what runs already is answered, late or not
                self._leave(item, ticket, StepDeadlineError(f"the deadline passed before {item.name} started"), "late")

    def _leave(self, item: Item, ticket: Ticket[Any], error: WorkerError, reason: str) -> None:
        """Ends a caller's interest. The last one to leave a queued item takes it along; a running item goes on."""
        with self._work:
            if ticket not in item.tickets:
                return
            item.tickets.remove(ticket)
            outcomes: Outcomes = [([ticket], error)]
            if item.is_queued and not item.tickets:
                outcomes += self._drop(item, error, reason)
            self._tell(outcomes)

    def _check_open(self) -> None:
        if self._is_closed:
            raise UnavailableError("the worker has stopped")

    def _check_not_draining(self) -> None:
        if self._is_draining:
            raise UnavailableError("the worker is draining: it takes no new work")

    def _check_room(self, count: int, what: str, limit: int) -> None:
        if count >= limit:
            # A place becomes free when the running item ends.
            wait_ms = math.ceil(max(self._last_step_ns / 1e6, self.running_seconds * 1e3))
            raise OverloadedError(f"{count} {what}, the limit is {limit}", retry_after_ms=max(_MIN_RETRY_AFTER_MS, wait_ms))

    def _push(self, item: Item) -> None:
        self._queue.append(item)
        self._work.notify()

    # -- engine thread --

    def take(self) -> Item | None:
        """Waits for an item that may start now, and makes it the running one. Returns None once the queue is closed."""
        with self._work:
            while not self._is_closed:
                if not self._queue:
                    self._work.wait()
                    continue
                item = self._queue.popleft()
                item.is_queued = False
                if isinstance(item, Control) or self._may_start(item):
                    self._running = item
                    self._running_since_ns = time.monotonic_ns()
                    return item
        return None

    def finish(self, step: Step, result: StepResult) -> None:
        """Answers an executed step, and keeps the answer for retries."""
        answer = Answer(result=result, worker_epoch=step.started_epoch)
        num_bytes = result.num_bytes
        self._count(step.batch, result)  # First: who reads an answer finds it counted.
        with self._work:
            self._fence.finish(step.batch, answer, num_bytes)
            self._last_step_ns = time.monotonic_ns() - self._running_since_ns
            self._tell([(self._forget(step), answer)])

    def _count(self, batch: StepBatch, result: StepResult) -> None:
        self._counters.increment("steps_executed_total", sequenced=str(batch.is_sequenced).lower())
        self._counters.increment("graph_executions_total", mode=result.graph.mode.name, fallback=result.graph.fallback_reason)
        self._counters.increment("tokens_total", batch.num_tokens)
        self._counters.increment("sampled_tokens_total", len(result.sampled_ids))
        self._counters.increment("kv_blocks_zeroed_total", len(batch.zero_block_ids))
        self._counters.increment("kv_blocks_copied_total", len(batch.copy_destination_ids))
        for failure in result.sequence_errors:
            self._counters.increment("sequence_errors_total", code=failure.code.name)

    def answer(self, control: Control, outcome: object) -> None:
        """Answers a call that is no step."""
        with self._work:
            self._tell([(self._forget(control), outcome)])

    def refuse(self, step: Step, refusal: WorkerError) -> None:
        """Ends a running step that the engine has refused before executing anything of it."""
        with self._work:
            self._tell(self._drop(step, refusal, "refused"))

    def fail(self, step: Step, error: EngineFaultError) -> None:
        """Ends a running step that has failed after launch: what the KV cache holds is unknown, so that a new epoch begins."""
        with self._work:
            self._counters.increment("engine_faults_total")
            outcomes: Outcomes = [(self._forget(step), error)]
            outcomes += self._begin_epoch(self._fence.holder, "fault")
            self._queue.appendleft(Control(self._clear_kv_cache))
            self._tell(outcomes)

    def reset(self, expected_epoch: int) -> int:
        """Starts a new epoch, without a lease. Returns it.

        Raises:
            PreconditionError: `expected_epoch` is not the worker's.
        """
        with self._work:
            self._fence.check_epoch(expected_epoch)
            self._tell(self._begin_epoch(NOBODY, "request"))
            return self._fence.epoch

    def check_caller(self, worker_epoch: int, router_id: int) -> None:
        """Checks that a call that is no step comes from this epoch and from the worker's owner.

        Raises:
            PreconditionError: it does not.
        """
        with self._work:
            self._fence.check_epoch(worker_epoch)
            self._fence.check_router(router_id)

    def close(self, *, running_error: WorkerError | None = None) -> None:
        """Refuses everything from now on, and what is queued. `take` returns None.

        Args:
            running_error: told to the callers of the running item, which will never end. None: it will end by itself.
        """
        with self._work:
            self._is_closed = True
            outcomes: Outcomes = []
            if running_error is not None and self._running is not None:
                outcomes.append((self._forget(self._running), running_error))
            error = UnavailableError("the worker has stopped: the step was not executed")
            self._tell(outcomes + self._drop_all(self._queue, error, "closed"))
            self._work.notify()

    def _may_start(self, step: Step) -> bool:
        """Checks what may have changed while the step was queued; drops it if it must not start."""
        now_ns = time.monotonic_ns()
        late = [ticket for ticket in step.tickets if ticket.is_late(now_ns)]
        if late:
            error = StepDeadlineError(f"the deadline passed before {step.name} started")
            step.tickets = [ticket for ticket in step.tickets if ticket not in late]
            self._tell([(late, error)])
            if not step.tickets:
                self._tell(self._drop(step, error, "late"))
                return False
        try:
            self._fence.confirm(step.batch)
        except PreconditionError as refusal:
            self._tell(self._drop(step, refusal, "refused"))
            return False
        step.started_epoch = self._fence.epoch
        return True

    # -- both threads, with the lock held --

    def _drop(self, item: Item, error: WorkerError, reason: str) -> Outcomes:
        """Ends an item that was not executed, and the sequenced steps behind it, whose turn can't come any more."""
        dropped = [item]
        if isinstance(item, Step) and item.batch.is_sequenced:
            self._fence.drop(item.batch)
            first_id = item.batch.step_id
            dropped += [other for other in self._queue if isinstance(other, Step) and other.batch.step_id > first_id]
        return self._drop_all(dropped, error, reason)

    def _drop_all(self, items: Iterable[Item], error: WorkerError, reason: str) -> Outcomes:
        dropped = list(items)
        self._queue = deque(item for item in self._queue if item not in dropped)
        self._counters.increment("steps_dropped_total", sum(isinstance(item, Step) for item in dropped), reason=reason)
        return [(self._forget(item), error) for item in dropped]

    def _begin_epoch(self, holder: int, reason: str) -> Outcomes:
        old_epoch = self._fence.epoch
        self._fence.begin_epoch(holder=holder)
        self._counters.increment("kv_cache_resets_total", reason=reason)
        stale = [item for item in self._queue if isinstance(item, Step) and item.batch.worker_epoch == old_epoch]
        return self._drop_all(stale, self._fence.lost(old_epoch), "kv_cache_lost")

    def _forget(self, item: Item) -> list[Ticket[Any]]:
        """Takes an item that has ended out of the books. Returns who is to be told."""
        item.is_queued = False
        if item is self._running:
            self._running = None
        if isinstance(item, Step):
            self._num_steps -= 1
            self._sequenced.pop(item.key, None)
        tickets, item.tickets = item.tickets, []
        return tickets
