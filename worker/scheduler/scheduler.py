"""Sends steps to a worker and takes their answers.

    add -> waiting -> choose (batcher) -> send ... answer -> tokens -> finished
                         ^                            |
                         └── preempted, lost, tainted ┘

Steps are sent through a fenced session. One that takes several steps at a time is kept full: a step is then sent before the
tokens of the one before are known here, and stands for them with `FEEDBACK_TOKEN`. That a sequence has stopped is seen when it has
a row in the next step already: that row's token is dropped.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from modelworker.worker.client import (
    ExecuteStepRequest,
    InvalidRequestError,
    KvCacheLostError,
    StepAnswer,
    WorkerCallError,
    WorkerInfo,
)
from modelworker.worker.scheduler.batcher import Batch, Batcher
from modelworker.worker.scheduler.drafts import PromptLookup
from modelworker.worker.scheduler.message import build_request, rows_of
from modelworker.worker.scheduler.request_check import check_request
from modelworker.worker.scheduler.sequence import Row, Sequence, SharedPrefix
from modelworker.worker.scheduler.types import (
    Event,
    FinishReason,
    KvCacheRecomputed,
    Request,
    RequestError,
    RequestFinished,
    RequestPreempted,
    SchedulerSettings,
    StepExecuted,
    TokenLogprobs,
    TokenSampled,
    WorkerAnswerError,
    WorkerChangedError,
)

# A sequence that loses its KV cache this often without gaining a token is not tried again: it may be what breaks the worker.
_MAX_LOSSES = 3


class StepSession(Protocol):
    """A router's hold on one worker: steps in order, each executed once."""

    info: WorkerInfo

    @property
    def depth(self) -> int:
        """How many steps may be unanswered at once."""

    @property
    def is_pending(self) -> bool:
        """Whether a step was sent that is neither answered nor known not to be executed."""

    def send(self, request: ExecuteStepRequest) -> None:
        """Sends the next step, after those whose fate is not known; does not wait for its answer."""

    def receive(self) -> StepAnswer:
        """Waits for the answer to the oldest step. An error that leaves it unanswered may be tried again."""

    def renew(self) -> WorkerInfo:
        """Enters the worker's present epoch."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was sent."""

    batch: Batch
    finished_sequence_ids: list[int]
    sent: float


class Scheduler:
    """Drives one worker. Not thread-safe; deterministic for a given order of calls."""

    def __init__(self, session: StepSession, settings: SchedulerSettings | None = None) -> None:
        self._session = session
        self._settings = settings or SchedulerSettings()
        self._flights: deque[_Flight] = deque()
        self._num_requests = 0
        self.info = session.info
        self._batcher = Batcher(self._settings, session.info, names_sequences=session.depth > 1)

    # -- facts ---------------------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request is waiting or running and every step is answered."""
        return not (self._batcher.waiting or self._batcher.running or self._flights)

    @property
    def num_free_blocks(self) -> int:
        """KV cache blocks that nobody has."""
        return self._batcher.blocks.num_free

    @property
    def num_usable_blocks(self) -> int:
        """KV cache blocks that this scheduler may hand out."""
        return self._batcher.blocks.num_usable

    @property
    def max_sequences(self) -> int:
        """Rows of a step."""
        return self._batcher.max_sequences

    @property
    def max_tokens(self) -> int:
        """Tokens of a step."""
        return self._batcher.max_tokens

    @property
    def prefill_chunk(self) -> int:
        """Tokens of one prompt in a step."""
        return self._batcher.prefill_chunk

    # -- requests ------------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> int:
        """Queues a request, at any time. Returns its id.

        Raises:
            RequestError: this worker can't serve it.
        """
        return self.add_continuations(request, 1)[0]

    def add_continuations(self, request: Request, count: int) -> list[int]:
        """Queues a request several times, with the KV of its prompt in shared blocks. Returns the ids.

        A seed counts up from one to the next.

        Raises:
            RequestError: this worker can't serve it.
        """
        requests = [request.with_seed_offset(index) for index in range(count)]
        for each in requests:
            check_request(each, self.info, num_drafts=self._settings.num_drafts)
            if misfit := self._misfit(each):
                raise misfit
        shares = count > 1 and len(request.prompt_ids) > 1 and "block_copies" in self.info.capabilities
        prefix = SharedPrefix(len(request.prompt_ids) - 1) if shares else None
        return [self._queue(each, prefix) for each in requests]

    def _queue(self, request: Request, prefix: SharedPrefix | None) -> int:
        lookup = PromptLookup(request.prompt_ids) if self._settings.num_drafts else None
        sequence = Sequence(self._num_requests, request, list(request.prompt_ids), prefix=prefix, lookup=lookup)
        self._num_requests += 1
        self._batcher.waiting.append(sequence)
        return sequence.request_id

    def _misfit(self, request: Request) -> RequestError | None:
        """Says why the request could never have all the blocks that it may need; None: it could."""
        usable = self._batcher.blocks.num_usable
        num_tokens = len(request.prompt_ids)
        if (needed := self._batcher.num_blocks_for(num_tokens)) > usable:
            return RequestError(
                "prompt_ids", f"found {num_tokens} tokens, which need {needed} KV cache blocks, the worker has {usable}"
            )
        # The last token is sampled and never computed, so it needs no slot.
        num_tokens = min(num_tokens + request.max_tokens - 1, self.info.model.max_model_len)
        if (needed := self._batcher.num_blocks_for(num_tokens)) > usable:
            return RequestError("max_tokens", f"the request may need {needed} KV cache blocks, the worker has {usable}")
        return None

    def cancel(self, request_id: int) -> None:
        """Forgets a request; unknown and finished ids are no error."""
        for sequence in [*self._batcher.running, *self._batcher.waiting]:
            if sequence.request_id == request_id:
                self._batcher.leave(sequence)

    # -- steps ---------------------------------------------------------------------------------------------------------------

    def run_until_idle(self, on_event: Callable[[Event], None] | None = None) -> dict[int, RequestFinished]:
        """Steps until every request is over. Returns how each ended, by request id."""
        finished = {}
        while not self.is_idle:
            for event in self.step():
                if isinstance(event, RequestFinished):
                    finished[event.request_id] = event
                if on_event is not None:
                    on_event(event)
        return finished

    def step(self) -> list[Event]:
        """Sends as many steps as the session takes, and waits for one answer.

        Raises:
            WorkerCallError: the worker refuses a step or can't be reached.
        """
        events: list[Event] = []
        self._fill(events)
        if not self._flights:
            return events
        try:
            answer = self._session.receive()
        except KvCacheLostError:
            self._recompute_all(events)
        except InvalidRequestError as error:
            # Requests are checked before: worker and scheduler disagree, and the same step would be refused for ever.
            for row in self._undo_flights():
                if self._batcher.has(row.sequence):
                    events.append(self._finish(row.sequence, FinishReason.ERROR, str(error)))
        except WorkerCallError:
            if not self._session.is_pending:
                self._undo_flights()
            raise
        else:
            self._take(self._flights.popleft(), answer, events)
        return events

    def _fill(self, events: list[Event]) -> None:
        while len(self._flights) < self._session.depth:
            batch = self._batcher.choose(may_preempt=not self._flights)
            events += [RequestPreempted(request_id=sequence.request_id) for sequence in batch.preempted]
            if not batch.rows:
                return
            finished, self._batcher.left = self._batcher.left, []
            request = build_request(batch, finished_sequence_ids=finished, names_sequences=self._session.depth > 1)
            self._session.send(request)
            self._batcher.send(batch)
            self._flights.append(_Flight(batch, finished, time.perf_counter()))

    def _undo_flights(self) -> list[Row]:
        """Takes back all steps that were sent: none was executed. Returns the rows of the oldest."""
        rows = self._flights[0].batch.rows
        while self._flights:
            flight = self._flights.pop()
            self._batcher.undo(flight.batch)
            self._batcher.left += flight.finished_sequence_ids
        return rows

    def _take(self, flight: _Flight, answer: StepAnswer, events: list[Event]) -> None:
        """Takes what a step produced: sampled tokens, failed rows, tainted blocks."""
        events.append(_describe(answer, flight))
        failures = {error.index: error for error in answer.row_errors}
        for index, (row, sampled) in enumerate(rows_of(answer, flight.batch.rows)):
            num_expected = 0 if index in failures or not row.samples else 1
            if not num_expected <= len(sampled) <= num_expected * (1 + row.num_drafts):
                found = f"{len(sampled)} tokens, expected {num_expected}"
                raise WorkerAnswerError(f"step {answer.step_id}, row {index}: {found}")
            row.settle(len(sampled))
            self._batcher.vacate(row.residence)
            if row.is_stale:
                continue  # Ended by an earlier token or cancelled meanwhile.
            if index in failures:
                failure = failures[index]
                events.append(self._finish(row.sequence, FinishReason.ERROR, f"{failure.code.name}: {failure.message}"))
            for token_id, logprobs in sampled:
                if not row.is_stale:
                    self._append(row.sequence, token_id, logprobs, events)
        for sequence in self._batcher.distrust(set(answer.tainted_block_ids.tolist())):
            sequence.num_losses += 1
            events.append(RequestPreempted(request_id=sequence.request_id))
        self._give_up_on_losers(events)

    # -- tokens and ends -----------------------------------------------------------------------------------------------------

    def _append(self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None, events: list[Event]) -> None:
        """Appends a sampled token, and ends the request where it was the last one."""
        request_id, index = sequence.request_id, sequence.num_output
        sequence.append(token_id)
        reason = self._finish_reason(sequence)
        is_stop = reason is FinishReason.STOP
        events.append(TokenSampled(request_id=request_id, index=index, token_id=token_id, is_stop=is_stop, logprobs=logprobs))
        if reason is not None:
            events.append(self._finish(sequence, reason))

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        stop_token_ids = sequence.request.stop_token_ids
        if sequence.token_ids[-1] in (self.info.model.eos_token_ids if stop_token_ids is None else stop_token_ids):
            return FinishReason.STOP
        is_full = sequence.num_output >= sequence.request.max_tokens or len(sequence.token_ids) > self.info.model.max_model_len
        return FinishReason.LENGTH if is_full else None

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str = "") -> RequestFinished:
        self._batcher.leave(sequence)
        return RequestFinished(request_id=sequence.request_id, reason=reason, output_ids=sequence.output_ids, error=error)

    # -- losses --------------------------------------------------------------------------------------------------------------

    def _recompute_all(self, events: list[Event]) -> None:
        """Starts over in the worker's new epoch: whatever the KV cache held is gone, every sequence has its tokens."""
        before = self.info
        for row in self._undo_flights():
            row.sequence.num_losses += 1
        for sequence in list(self._batcher.running):
            self._batcher.send_back(sequence)
        self.info = self._session.renew()
        self._batcher.enter_epoch(self.info)
        if self.info.model != before.model:
            raise WorkerChangedError(f"the worker came back with the model {self.info.model.name} instead of {before.model.name}")
        events.append(KvCacheRecomputed(worker_epoch=self.info.worker_epoch))
        for sequence in list(self._batcher.waiting):
            if misfit := self._misfit(sequence.request):
                events.append(self._finish(sequence, FinishReason.ERROR, str(misfit)))
        self._give_up_on_losers(events)

    def _give_up_on_losers(self, events: list[Event]) -> None:
        for sequence in [each for each in self._batcher.waiting if each.num_losses >= _MAX_LOSSES]:
            error = f"its KV cache content was lost {_MAX_LOSSES} times without a token in between"
            events.append(self._finish(sequence, FinishReason.ERROR, error))


def _describe(answer: StepAnswer, flight: _Flight) -> StepExecuted:
    rows = flight.batch.rows
    num_drafts = sum(row.num_drafts for row in rows)
    return StepExecuted(
        step_id=answer.step_id,
        num_tokens=sum(row.query_len for row in rows),
        num_sequences=len(rows),
        num_decodes=sum(row.query_len == 1 + row.num_drafts and row.samples for row in rows),
        num_drafts=num_drafts,
        num_accepted=sum(max(count - 1, 0) for count in answer.sampled_counts.tolist()),
        mode=answer.mode.name,
        padded_tokens=answer.padded_tokens,
        round_trip_ms=(time.perf_counter() - flight.sent) * 1e3,
        worker_ms=answer.timings.total_ns / 1e6,
    )
