"""The reference router: continuous batching over a worker, small enough to read in one sitting.

Every call of `Scheduler.step` does four things: choose the rows (sequences that decode first, then chunks of prompts, in order
of arrival), give them KV cache blocks (when none are left, the youngest sequence is sent back to the queue and recomputed
later), execute the step through a fenced session, and take the sampled tokens. The worker keeps no state of a sequence but the
KV cache content, so a sequence is fully described by its tokens, its block table and how many tokens are computed.

Why blocks can be reused as they are, tainted ones too: a row reads the KV of positions 0 .. context_len + query_len - 1 and of
no other, and each of those slots was written by the sequence itself, in this step or after it got the block. What an earlier
owner left behind is therefore never read. A *living* sequence that holds a tainted block is recomputed from its tokens.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from modelworker.worker.client import (
    ExecuteStepRequest,
    InvalidRequestError,
    KvCacheLostError,
    StepAnswer,
    StepSampling,
    WorkerCallError,
    WorkerInfo,
    build_step,
)
from modelworker.worker.client.session import FencedSession
from modelworker.worker.scheduler_types import (
    BlockOrder,
    Event,
    FinishReason,
    KvCacheRecomputed,
    Request,
    RequestError,
    RequestFinished,
    RequestPreempted,
    Sampling,
    SchedulerSettings,
    StepExecuted,
    TokenLogprobs,
    TokenSampled,
    WorkerAnswerError,
    WorkerChangedError,
)

# A sequence that loses its KV cache this often without gaining a token is not tried again: it may be what breaks the worker.
_MAX_LOSSES = 3


class BlockAllocator:
    """The free KV cache blocks. Block 0, the null block, is never given out."""

    def __init__(self, num_blocks: int, order: BlockOrder = "ascending") -> None:
        ids = list(range(1, num_blocks))
        if order == "reversed":
            ids.reverse()
        elif order == "interleaved":
            ids = ids[::2] + ids[1::2]
        self.num_usable = len(ids)
        self._free = deque(ids)

    @property
    def num_free(self) -> int:
        """Blocks that can be given out now."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Gives out `count` blocks; the caller has checked that there are as many."""
        return [self._free.popleft() for _ in range(count)]

    def give_back(self, block_ids: list[int]) -> None:
        """Takes blocks back."""
        self._free.extend(block_ids)


@dataclass(eq=False, slots=True)
class _Sequence:
    """A request under way: its tokens so far, its blocks, and how many of its tokens have their KV in them."""

    request_id: int
    request: Request
    token_ids: list[int]
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_losses: int = 0

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is not computed yet; 1: the sequence decodes."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def output_ids(self) -> tuple[int, ...]:
        return tuple(self.token_ids[len(self.request.prompt_ids) :])


@dataclass(frozen=True, slots=True)
class _Row:
    """A sequence's part in a step; `samples` where its last token is the sequence's last, so that the next one is sampled."""

    sequence: _Sequence
    query_len: int
    samples: bool


class Scheduler:
    """Drives one worker. Not thread-safe; deterministic for a given order of calls.

    `waiting` and `running` are both kept in order of arrival.
    """

    def __init__(self, session: FencedSession, settings: SchedulerSettings | None = None) -> None:
        self._session = session
        self._settings = settings or SchedulerSettings()
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._unsettled: list[_Row] = []
        self._num_requests = 0
        self._enter_epoch(session.info)

    def _enter_epoch(self, info: WorkerInfo) -> None:
        """Takes the worker's limits and starts with all blocks free."""
        settings = self._settings
        self.info = info
        self.max_sequences = min(settings.max_sequences or info.limits.max_sequences, info.limits.max_sequences)
        self.max_tokens = min(settings.max_tokens_per_step or info.limits.max_tokens_per_step, info.limits.max_tokens_per_step)
        self.prefill_chunk = min(settings.prefill_chunk or self.max_tokens, self.max_tokens)
        num_blocks = info.kv_cache.num_blocks
        if settings.max_blocks is not None:
            num_blocks = min(num_blocks, settings.max_blocks + 1)
        self._blocks = BlockAllocator(num_blocks, settings.block_order)

    @property
    def is_idle(self) -> bool:
        """Whether no request is waiting or running."""
        return not self._waiting and not self._running

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with blocks."""
        return len(self._running)

    @property
    def num_free_blocks(self) -> int:
        """KV cache blocks that no sequence has."""
        return self._blocks.num_free

    @property
    def num_usable_blocks(self) -> int:
        """KV cache blocks that this scheduler may hand out."""
        return self._blocks.num_usable

    def add(self, request: Request) -> int:
        """Queues a request, at any time. Returns its id.

        Raises:
            RequestError: this worker can't serve it.
        """
        self._check(request)
        sequence = _Sequence(self._num_requests, request, list(request.prompt_ids))
        self._num_requests += 1
        self._waiting.append(sequence)
        return sequence.request_id

    def _check(self, request: Request) -> None:
        request.sampling.check()
        request.sampling.check_capabilities(self.info.capabilities)
        vocab_size, max_model_len = self.info.model.vocab_size, self.info.model.max_model_len
        if not request.prompt_ids:
            raise RequestError("prompt_ids: found no token, expected at least 1")
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens: found {request.max_tokens}, expected at least 1")
        for position, token_id in enumerate(request.prompt_ids):
            if not 0 <= token_id < vocab_size:
                raise RequestError(f"prompt_ids[{position}]: found {token_id}, expected 0 .. {vocab_size - 1}")
        if len(request.prompt_ids) > max_model_len:
            raise RequestError(f"prompt_ids: found {len(request.prompt_ids)} tokens, the model takes {max_model_len}")
        if misfit := self._misfit(request):
            raise RequestError(misfit)

    def _misfit(self, request: Request) -> str:
        """Says why the request could never have all the blocks that it may need, or "" if it could."""
        # The last token is sampled and never computed, so it needs no slot.
        needed = self._num_blocks_for(min(len(request.prompt_ids) + request.max_tokens - 1, self.info.model.max_model_len))
        usable = self._blocks.num_usable
        return f"the request may need {needed} KV cache blocks, the worker has {usable}" if needed > usable else ""

    def cancel(self, request_id: int) -> None:
        """Forgets a request; unknown and finished ids are no error."""
        for sequence in [*self._running, *self._waiting]:
            if sequence.request_id == request_id:
                self._drop(sequence)

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
        """Executes one step, if there is anything to do.

        Raises:
            WorkerCallError: the worker refuses the step or can't be reached.
        """
        events: list[Event] = []
        rows = self._unsettled or self._choose_rows(events)
        if not rows:
            return events
        started = time.perf_counter()
        try:
            answer = self._session.resume() if self._session.is_pending else self._session.execute(self._build(rows))
        except KvCacheLostError:
            self._unsettled = []
            self._recompute_all(rows, events)
            return events
        except InvalidRequestError as error:
            # Requests are checked before: worker and scheduler disagree, and the same step would be refused for ever.
            for row in rows:
                events.append(self._finish(row.sequence, FinishReason.ERROR, str(error)))
            return events
        except WorkerCallError:
            # Nobody knows whether the step was executed: it has to be sent again before another one.
            self._unsettled = rows if self._session.is_pending else []
            raise
        self._unsettled = []
        events.append(_describe(answer, rows, (time.perf_counter() - started) * 1e3))
        self._take(rows, answer, events)
        return events

    # -- choosing rows -------------------------------------------------------------------------------------------------------

    def _choose_rows(self, events: list[Event]) -> list[_Row]:
        """Chooses the next step, with blocks for all its tokens."""
        chosen: dict[int, _Row] = {}
        preempted = False
        # Decodes first: a chunk of a long prompt fills what they leave of the step.
        for sequence in sorted(self._running, key=lambda each: each.num_pending > 1):
            query_len = min(sequence.num_pending, self.prefill_chunk, self.max_tokens - _num_tokens(chosen.values()))
            if query_len < 1 or sequence not in self._running:
                continue
            while not self._grow(sequence, query_len):
                victim = self._running[-1]
                chosen.pop(victim.request_id, None)
                self._send_back(victim)
                events.append(RequestPreempted(request_id=victim.request_id))
                preempted = True
                if victim is sequence:
                    break
            else:
                chosen[sequence.request_id] = _Row(sequence, query_len, query_len == sequence.num_pending)
        if not preempted:
            self._admit(chosen)
        return list(chosen.values())

    def _admit(self, chosen: dict[int, _Row]) -> None:
        """Starts waiting sequences, in order, while the step has room and the blocks suffice for all their tokens."""
        limit = min(self.max_sequences, self.max_tokens)
        while self._waiting and len(self._running) < limit:
            sequence = self._waiting[0]
            query_len = min(sequence.num_pending, self.prefill_chunk, self.max_tokens - _num_tokens(chosen.values()))
            if query_len < 1 or self._num_blocks_for(len(sequence.token_ids)) > self._blocks.num_free:
                return
            self._waiting.popleft()
            self._running = _by_arrival([*self._running, sequence])
            self._grow(sequence, query_len)
            chosen[sequence.request_id] = _Row(sequence, query_len, query_len == sequence.num_pending)

    def _grow(self, sequence: _Sequence, query_len: int) -> bool:
        """Gives the sequence blocks for its next tokens; False when there are not enough."""
        missing = self._num_blocks_for(sequence.num_computed + query_len) - len(sequence.block_ids)
        if missing > self._blocks.num_free:
            return False
        sequence.block_ids += self._blocks.take(missing)
        return True

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.info.kv_cache.block_size)

    # -- leaving -------------------------------------------------------------------------------------------------------------

    def _drop(self, sequence: _Sequence) -> None:
        """Takes a sequence out and its blocks back."""
        (self._running if sequence in self._running else self._waiting).remove(sequence)
        self._blocks.give_back(sequence.block_ids)
        sequence.block_ids = []
        sequence.num_computed = 0

    def _send_back(self, sequence: _Sequence) -> None:
        """Puts a running sequence back into the queue, at its place by arrival; it is recomputed from its tokens."""
        self._drop(sequence)
        self._waiting = deque(_by_arrival([*self._waiting, sequence]))

    def _finish(self, sequence: _Sequence, reason: FinishReason, error: str = "") -> RequestFinished:
        self._drop(sequence)
        return RequestFinished(request_id=sequence.request_id, reason=reason, output_ids=sequence.output_ids, error=error)

    # -- the step ------------------------------------------------------------------------------------------------------------

    def _build(self, rows: list[_Row]) -> ExecuteStepRequest:
        sequences = [row.sequence for row in rows]
        samplings = [sequence.request.sampling for sequence in sequences]
        token_ids: list[int] = []
        for row in rows:
            start = row.sequence.num_computed
            token_ids += row.sequence.token_ids[start : start + row.query_len]
        return build_step(
            query_lens=[row.query_len for row in rows],
            context_lens=[sequence.num_computed for sequence in sequences],
            token_ids=token_ids,
            block_counts=[len(sequence.block_ids) for sequence in sequences],
            block_ids=[block_id for sequence in sequences for block_id in sequence.block_ids],
            sample=None if all(row.samples for row in rows) else [row.samples for row in rows],
            sampling=None
            if all(sampling == Sampling() for sampling in samplings)
            else StepSampling(
                temperature=[sampling.temperature for sampling in samplings],
                top_k=[sampling.top_k for sampling in samplings],
                top_p=[sampling.top_p for sampling in samplings],
                min_p=[sampling.min_p for sampling in samplings],
                seed=[sampling.seed or 0 for sampling in samplings],
                has_seed=[sampling.seed is not None for sampling in samplings],
                num_logprobs=[sampling.num_logprobs for sampling in samplings],
            ),
        )

    def _take(self, rows: list[_Row], answer: StepAnswer, events: list[Event]) -> None:
        """Takes what a step produced: sampled tokens, failed rows, tainted blocks."""
        failures = {error.index: error for error in answer.row_errors}
        logprobs = _logprobs_of_tokens(answer)
        for index, (row, sampled) in enumerate(zip(rows, answer.tokens_of_rows, strict=True)):
            sequence = row.sequence
            token_logprobs = [next(logprobs, None) for _ in sampled]
            if sequence not in self._running:
                continue  # Cancelled while nobody knew whether the step was executed.
            if index in failures:
                failure = failures[index]
                events.append(self._finish(sequence, FinishReason.ERROR, f"{failure.code.name}: {failure.message}"))
                continue
            if len(sampled) != row.samples:
                raise WorkerAnswerError(f"step {answer.step_id}, row {index}: {len(sampled)} tokens, expected {int(row.samples)}")
            sequence.num_computed += row.query_len
            if row.samples:
                self._append(sequence, sampled[0], token_logprobs[0], events)
        tainted = set(answer.tainted_block_ids.tolist())
        for sequence in [each for each in self._running if not tainted.isdisjoint(each.block_ids)]:
            self._send_back(sequence)
            sequence.num_losses += 1
            events.append(RequestPreempted(request_id=sequence.request_id))
        self._give_up_on_losers(events)

    def _append(self, sequence: _Sequence, token_id: int, logprobs: TokenLogprobs | None, events: list[Event]) -> None:
        """Appends a sampled token, and ends the request where it was the last one."""
        request_id, index = sequence.request_id, sequence.num_output
        sequence.token_ids.append(token_id)
        sequence.num_losses = 0
        reason = self._finish_reason(sequence)
        is_stop = reason is FinishReason.STOP
        events.append(TokenSampled(request_id=request_id, index=index, token_id=token_id, is_stop=is_stop, logprobs=logprobs))
        if reason is not None:
            events.append(self._finish(sequence, reason))

    def _finish_reason(self, sequence: _Sequence) -> FinishReason | None:
        stop_token_ids = sequence.request.stop_token_ids
        if sequence.token_ids[-1] in (self.info.model.eos_token_ids if stop_token_ids is None else stop_token_ids):
            return FinishReason.STOP
        is_full = sequence.num_output >= sequence.request.max_tokens or len(sequence.token_ids) > self.info.model.max_model_len
        return FinishReason.LENGTH if is_full else None

    def _recompute_all(self, rows: list[_Row], events: list[Event]) -> None:
        """Starts over in the worker's new epoch: whatever the KV cache held is gone, every sequence has its tokens."""
        before = self.info
        for row in rows:
            row.sequence.num_losses += 1
        for sequence in list(self._running):
            self._send_back(sequence)
        self._enter_epoch(self._session.renew())
        if self.info.model != before.model:
            raise WorkerChangedError(f"the worker came back with the model {self.info.model.name} instead of {before.model.name}")
        events.append(KvCacheRecomputed(worker_epoch=self.info.worker_epoch))
        for sequence in list(self._waiting):
            if misfit := self._misfit(sequence.request):
                events.append(self._finish(sequence, FinishReason.ERROR, misfit))
        self._give_up_on_losers(events)

    def _give_up_on_losers(self, events: list[Event]) -> None:
        for sequence in [each for each in self._waiting if each.num_losses >= _MAX_LOSSES]:
            error = f"its KV cache content was lost {_MAX_LOSSES} times without a token in between"
            events.append(self._finish(sequence, FinishReason.ERROR, error))


def _by_arrival(sequences: Iterable[_Sequence]) -> list[_Sequence]:
    return sorted(sequences, key=lambda each: each.request_id)


def _num_tokens(rows: Iterable[_Row]) -> int:
    return sum(row.query_len for row in rows)


def _describe(answer: StepAnswer, rows: list[_Row], round_trip_ms: float) -> StepExecuted:
    return StepExecuted(
        step_id=answer.step_id,
        num_tokens=_num_tokens(rows),
        num_sequences=len(rows),
        num_decodes=sum(row.query_len == 1 and row.samples for row in rows),
        mode=answer.mode.name,
        padded_tokens=answer.padded_tokens,
        round_trip_ms=round_trip_ms,
        worker_ms=answer.timings.total_ns / 1e6,
    )


def _logprobs_of_tokens(answer: StepAnswer) -> Iterator[TokenLogprobs | None]:
    for token_ids, values, ranks in answer.logprobs_of_tokens():
        if len(token_ids) == 0:
            yield None
        else:
            top = tuple(zip(token_ids[1:].tolist(), values[1:].tolist(), strict=True))
            yield TokenLogprobs(logprob=float(values[0]), rank=int(ranks[0]), top=top)
