"""The books of the step queue: which items wait, which one runs, and which step a retry means."""

import time
from collections import deque
from collections.abc import Collection
from typing import Any

from modelworker.worker.batch import StepBatch
from modelworker.worker.ticket import Item, Step, Ticket


class Backlog:
    """Items from their admission to their end, in the order in which the engine takes them. Not thread-safe.

    Attributes:
        running: the item that the engine is on.
        num_steps: steps that wait or run.
        last_step_seconds: how long the last step that was executed has run.
    """

    def __init__(self) -> None:
        self.running: Item | None = None
        self.num_steps = 0
        self.last_step_seconds = 0.0
        self._waiting: deque[Item] = deque()
        self._running_since_ns = 0
        self._sequenced: dict[tuple[int, int, int], Step] = {}

    @property
    def num_waiting(self) -> int:
        """Items that wait for the engine."""
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._waiting and self.running is None

    @property
    def running_seconds(self) -> float:
        """How long the engine has been on its present item; 0 while it is idle."""
        return 0.0 if self.running is None else (time.monotonic_ns() - self._running_since_ns) / 1e9

    @property
    def waiting(self) -> list[Item]:
        """What waits, in order."""
        return list(self._waiting)

    def same_step(self, batch: StepBatch) -> Step | None:
        """Returns the sequenced step that waits or runs under the same epoch, router and id, if there is one."""
        return self._sequenced.get((batch.worker_epoch, batch.router_id, batch.step_id))

    def steps_after(self, batch: StepBatch) -> list[Step]:
        """Returns the sequenced steps that wait for their turn behind a sequenced one."""
        return [item for item in self._waiting if isinstance(item, Step) and item.batch.step_id > batch.step_id]

    def steps_of_epoch(self, worker_epoch: int) -> list[Step]:
        """Returns the steps that wait and expect an epoch."""
        return [item for item in self._waiting if isinstance(item, Step) and item.batch.worker_epoch == worker_epoch]

    def append(self, item: Item) -> None:
        """Adds an item behind all others."""
        if isinstance(item, Step):
            self.num_steps += 1
            if item.batch.is_sequenced:
                self._sequenced[item.key] = item
        self._waiting.append(item)

    def put_first(self, item: Item) -> None:
        """Adds an item that is no step in front of all others."""
        self._waiting.appendleft(item)

    def pop_first(self) -> Item:
        """Takes the first item from those that wait; `start` or `forget` has to follow."""
        item = self._waiting.popleft()
        item.is_queued = False
        return item

    def start(self, item: Item) -> None:
        """Notes that the engine is on an item."""
        self.running = item
        self._running_since_ns = time.monotonic_ns()

    def remove(self, items: Collection[Item]) -> None:
        """Takes items from those that wait; `forget` has to follow."""
        self._waiting = deque(item for item in self._waiting if item not in items)

    def forget(self, item: Item) -> list[Ticket[Any]]:
        """Takes an item that has ended out of the books. Returns who is to be told."""
        item.is_queued = False
        if item is self.running:
            self.running = None
        if isinstance(item, Step):
            self.num_steps -= 1
            self._sequenced.pop(item.key, None)
        tickets, item.tickets = item.tickets, []
        return tickets
