"""The scheduler against a small worker that holds it to the protocol.

The "model" of this worker is a hash chain over the tokens that it finds in its KV cache: a wrong block, a wrong context length or
a stale slot changes every later token. The oracle computes the same chain from the tokens alone.
"""

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import grpc
import numpy as np
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelworker.proto import model_worker_pb2 as pb
from modelworker.proto.model_worker_pb2_grpc import ModelWorkerServicer, add_ModelWorkerServicer_to_server
from modelworker.worker.client import Client, StepSampling, WorkerCallError, build_step
from modelworker.worker.client.session import FencedSession
from modelworker.worker.client.stream_session import StreamSession
from modelworker.worker.scheduler import (
    BlockPool,
    Event,
    FinishReason,
    KvCacheRecomputed,
    Request,
    RequestError,
    RequestFinished,
    RequestPreempted,
    Sampling,
    Scheduler,
    SchedulerSettings,
    StepExecuted,
    TokenSampled,
    WorkerChangedError,
)
from modelworker.worker.scheduler.batcher import Batcher
from modelworker.worker.scheduler.drafts import PromptLookup
from modelworker.worker.scheduler.sequence import Sequence as SchedulerSequence

VOCAB_SIZE = 50
EOS = 0
POISON = 49  # A row that computes this token fails, as one with NaN in its logits does. It is never sampled.
FEEDBACK = -1
FAILED = -2
Chain = int


def rows(values: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    flat = iter(values)
    return [[next(flat) for _ in range(count)] for count in counts]


def extend(chain: Chain, token_id: int) -> Chain:
    return int.from_bytes(hashlib.blake2b(f"{chain}:{token_id}".encode(), digest_size=8).digest(), "little")


def sample(chain: Chain, position: int, seed: int | None) -> int:
    drawn = chain if seed is None else extend(extend(chain, seed), position)
    return drawn % POISON


def chain_of(token_ids: Sequence[int]) -> Chain:
    chain = 1
    for token_id in token_ids:
        chain = extend(chain, token_id)
    return chain


def expected_output(request: Request, max_model_len: int) -> tuple[tuple[int, ...], FinishReason]:
    """The oracle: no blocks, no batches, no steps."""
    tokens = list(request.prompt_ids)
    stops = {EOS} if request.stop_token_ids is None else request.stop_token_ids
    seed = request.sampling.seed if request.sampling.temperature > 0 else None
    if POISON in tokens:
        return (), FinishReason.ERROR
    while True:
        tokens.append(sample(chain_of(tokens), len(tokens), seed))
        output = tuple(tokens[len(request.prompt_ids) :])
        if tokens[-1] in stops:
            return output, FinishReason.STOP
        if len(output) == request.max_tokens or len(tokens) > max_model_len:
            return output, FinishReason.LENGTH


class RefusedError(Exception):
    def __init__(self, code: grpc.StatusCode, message: str, *, reason: str = "", retry_ms: int | None = None) -> None:
        super().__init__(message)
        self.status = status_pb2.Status(code=code.value[0], message=message)
        self.code = code
        if reason:
            self._add(error_details_pb2.ErrorInfo(reason=reason))
        if retry_ms is not None:
            delay = error_details_pb2.RetryInfo()
            delay.retry_delay.FromMilliseconds(retry_ms)
            self._add(delay)

    def _add(self, detail: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> None:
        packed = any_pb2.Any()
        packed.Pack(detail)
        self.status.details.append(packed)


@dataclass
class Slot:
    position: int = -1
    token_id: int = -1
    chain: Chain = -1


TAINTED = Slot(position=-2)


@dataclass
class ChainWorker(ModelWorkerServicer):
    """Executes steps on a dictionary of slots, keeps the last answers for retries, and notes every breach of the protocol.

    `faults` names what goes wrong at the calls of ExecuteStep to come: "" nothing, "busy" refused with RetryInfo, "refused" as
    malformed, "lost answer"
    executed but answered UNAVAILABLE, "not executed" UNAVAILABLE at once, "lost KV" a new epoch before the step, "fault" a new
    epoch after it and INTERNAL, "taint" a living row's block is reported as tainted.
    """

    block_size: int = 4
    num_blocks: int = 33
    max_model_len: int = 64
    max_sequences: int = 8
    max_tokens_per_step: int = 32
    max_feedback_sequences: int = 8
    model_name: str = "chain"
    faults: list[str] = field(default_factory=list)
    breaches: list[str] = field(default_factory=list)
    epoch: int = 1000
    slots: dict[int, Slot] = field(default_factory=dict)
    answers: dict[int, tuple[bytes, pb.ExecuteStepResponse]] = field(default_factory=dict)
    lease_holder: int = 0
    num_executed: int = 0
    num_copies: int = 0
    num_feedback_tokens: int = 0
    kept: dict[int, tuple[int, int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def next_step_id(self) -> int:
        return len(self.answers) + 1

    def new_epoch(self) -> None:
        self.epoch += 1
        self.slots = {}
        self.answers = {}
        self.kept = {}

    def GetWorkerInfo(self, request: pb.GetWorkerInfoRequest, context: grpc.ServicerContext) -> pb.WorkerInfo:  # noqa: N802
        del request, context
        info = pb.WorkerInfo(worker_epoch=self.epoch, next_step_id=self.next_step_id, lease_holder=self.lease_holder)
        info.model.name, info.model.vocab_size, info.model.max_model_len = self.model_name, VOCAB_SIZE, self.max_model_len
        info.model.eos_token_ids.append(EOS)
        info.kv_cache.block_size, info.kv_cache.num_blocks = self.block_size, self.num_blocks
        info.limits.max_sequences, info.limits.max_tokens_per_step = self.max_sequences, self.max_tokens_per_step
        info.limits.max_steps_in_flight, info.limits.max_feedback_sequences = 8, self.max_feedback_sequences
        info.capabilities.extend(["history", "ExecuteSteps", "sequence_ids", "finished_sequence_ids", "draft_lens", "block_copies"])
        return info

    def ResetKvCache(  # noqa: N802
        self, request: pb.ResetKvCacheRequest, context: grpc.ServicerContext
    ) -> pb.ResetKvCacheResponse:
        del request, context
        self.new_epoch()
        self.lease_holder = 0
        return pb.ResetKvCacheResponse(worker_epoch=self.epoch)

    def ExecuteStep(  # noqa: N802
        self, request: pb.ExecuteStepRequest, context: grpc.ServicerContext
    ) -> pb.ExecuteStepResponse:
        with self.lock:
            try:
                return self.answer(request)
            except RefusedError as refusal:
                context.set_trailing_metadata((("grpc-status-details-bin", refusal.status.SerializeToString()),))
                context.abort(refusal.code, str(refusal))
        raise AssertionError

    def ExecuteSteps(  # noqa: N802
        self, request_iterator: Iterator[pb.ExecuteStepRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ExecuteStepsResponse]:
        for request in request_iterator:
            response = pb.ExecuteStepsResponse(step_id=request.step_id, client_tag=request.client_tag)
            with self.lock:
                try:
                    response.ok.CopyFrom(self.answer(request))
                except RefusedError as refusal:
                    if refusal.code is grpc.StatusCode.UNAVAILABLE:
                        context.abort(refusal.code, str(refusal))
                    response.error.ParseFromString(refusal.status.SerializeToString())
            yield response

    def answer(self, request: pb.ExecuteStepRequest) -> pb.ExecuteStepResponse:
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "busy":
            raise RefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", retry_ms=1)
        if fault == "refused":
            raise RefusedError(grpc.StatusCode.INVALID_ARGUMENT, "malformed")
        if fault == "not executed":
            raise RefusedError(grpc.StatusCode.UNAVAILABLE, "gone")
        if fault == "lost KV":
            self.new_epoch()
        if request.worker_epoch != self.epoch:
            raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, "another epoch", reason="KV_CACHE_LOST")
        content = request.SerializeToString(deterministic=True)
        if request.step_id in self.answers:
            before, response = self.answers[request.step_id]
            if before != content:
                self.breaches.append(f"step {request.step_id} came again with other content")
            return response
        if request.step_id > self.next_step_id:
            # In a pipeline: the one before it was refused.
            raise RefusedError(grpc.StatusCode.FAILED_PRECONDITION, "too early", reason="STEP_OUT_OF_ORDER")
        response = self.execute(request, taint=fault == "taint")
        self.answers[request.step_id] = (content, response)
        self.lease_holder = request.router_id
        if fault == "fault":
            self.new_epoch()
            raise RefusedError(grpc.StatusCode.INTERNAL, "the engine failed")
        if fault == "lost answer":
            raise RefusedError(grpc.StatusCode.UNAVAILABLE, "connection reset")
        return response

    def execute(self, request: pb.ExecuteStepRequest, *, taint: bool) -> pb.ExecuteStepResponse:
        self.num_executed += 1
        query_lens, context_lens = list(request.query_lens), list(request.context_lens)
        counts, samples = list(request.block_counts), list(request.sample) or [True] * len(query_lens)
        draft_lens = list(request.draft_lens) or [0] * len(query_lens)
        self.check(request, samples, draft_lens)
        for sequence_id in request.finished_sequence_ids:
            self.kept.pop(sequence_id, None)
        if len(self.kept.keys() | set(request.sequence_ids)) > self.max_feedback_sequences:
            self.breaches.append(f"{len(self.kept)} sequences are kept, and {list(request.sequence_ids)} are named")
        self.copy_blocks(request.block_copies)
        response = pb.ExecuteStepResponse(worker_epoch=self.epoch, step_id=request.step_id)
        response.graph.padded_tokens = sum(query_lens)
        tokens, blocks = iter(request.token_ids), iter(request.block_ids)
        tainted: set[int] = set()
        for row, (query_len, context_len, count) in enumerate(zip(query_lens, context_lens, counts, strict=True)):
            table = [next(blocks) for _ in range(count)]
            new = [next(tokens) for _ in range(query_len)]
            written = {table[position // self.block_size] for position in range(context_len, context_len + query_len)}
            if new[0] == FEEDBACK and (token_id := self.last_token(request, row)) == FAILED:
                response.sequence_errors.add(index=row, code=pb.FEEDBACK_SOURCE_FAILED, message="no token")
                response.sampled_counts.append(0)
                self.kept[request.sequence_ids[row]] = (FAILED, context_len + 1)
                tainted |= written
                continue
            new[0] = token_id if new[0] == FEEDBACK else new[0]
            chains = [self.read_context(row, table, context_len)]
            self.check_history(request, row, table, new)
            for position, token_id in enumerate(new, context_len):
                chains.append(extend(chains[-1], token_id))
                self.slots[self.slot(table, position)] = Slot(position, token_id, chains[-1])
            failed = POISON in new or self.reads_tainted(table, context_len)
            if failed:
                if request.sequence_ids:
                    self.kept[request.sequence_ids[row]] = (FAILED, context_len + query_len)
                response.sequence_errors.add(index=row, code=pb.NON_FINITE_LOGITS, message="not finite")
                tainted |= written
            sampled = self.verify(request, row, chains, new, draft_lens[row]) if samples[row] and not failed else []
            response.sampled_counts.append(len(sampled))
            response.sampled_ids.extend(sampled)
            if sampled and request.sequence_ids:
                end = context_len + query_len - (1 + draft_lens[row] - len(sampled))
                self.kept[request.sequence_ids[row]] = (sampled[-1], end)
            if taint and row == 0:
                tainted |= written
        for block_id in tainted:
            for offset in range(self.block_size):
                self.slots[block_id * self.block_size + offset] = TAINTED
        response.tainted_block_ids.extend(sorted(tainted))
        return response

    def verify(self, request: pb.ExecuteStepRequest, row: int, chains: list[Chain], new: list[int], num_drafts: int) -> list[int]:
        """Samples after the last token that is no draft, and goes on while the next draft is what was sampled."""
        sampled = []
        first = len(new) - num_drafts
        for index in range(first, len(new) + 1):
            sampled.append(self.draw(request, row, chains[index], request.context_lens[row] + index))
            if index == len(new) or new[index] != sampled[-1]:
                break
        return sampled

    def last_token(self, request: pb.ExecuteStepRequest, row: int) -> int:
        self.num_feedback_tokens += 1
        token_id, position = self.kept.get(request.sequence_ids[row], (1, -1))
        if position != request.context_lens[row]:
            self.breaches.append(f"row {row} wants the token at {request.context_lens[row]}, the last one is at {position}")
        return token_id

    def copy_blocks(self, copies: pb.BlockCopies) -> None:
        contents = [
            [self.slots.get(source * self.block_size + offset, Slot()) for offset in range(self.block_size)]
            for source in copies.source_ids
        ]
        for destination, content in zip(copies.destination_ids, contents, strict=True):
            for offset, slot in enumerate(content):
                self.slots[destination * self.block_size + offset] = slot
        self.num_copies += len(contents)

    def draw(self, request: pb.ExecuteStepRequest, row: int, chain: Chain, position: int) -> int:
        sampling = request.sampling
        seeded = request.HasField("sampling") and sampling.temperature[row] > 0 and sampling.has_seed[row]
        return sample(chain, position, sampling.seed[row] if seeded else None)

    def slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def reads_tainted(self, table: list[int], context_len: int) -> bool:
        return any(self.slots.get(self.slot(table, position)) is TAINTED for position in range(context_len))

    def read_context(self, row: int, table: list[int], context_len: int) -> Chain:
        chain = 1
        for position in range(context_len):
            slot = self.slots.get(self.slot(table, position), Slot())
            chain = extend(chain, slot.token_id)
            if slot is TAINTED:
                return chain  # The row fails.
            if slot.position != position or slot.chain != chain:
                self.breaches.append(f"row {row} reads position {position} from a slot that holds position {slot.position}")
        return chain

    def check(self, request: pb.ExecuteStepRequest, samples: list[bool], draft_lens: list[int]) -> None:
        query_lens, context_lens, counts = list(request.query_lens), list(request.context_lens), list(request.block_counts)
        num_rows = len(query_lens)
        used = np.array(request.block_ids)
        rules = {
            "an empty step": num_rows > 0,
            "lengths of arrays": len(context_lens) == len(counts) == len(samples) == num_rows,
            "number of tokens": len(request.token_ids) == sum(query_lens),
            "number of blocks": len(used) == sum(counts),
            "a query length": min(query_lens) >= 1,
            "max_sequences": num_rows <= self.max_sequences,
            "max_tokens_per_step": sum(query_lens) <= self.max_tokens_per_step,
            "a block id out of range": used.min() >= 1 and used.max() < self.num_blocks,
            "a block that is written and read by another row": self.owners_are_clear(request),
            "drafts": all(not d or (samples[r] and query_lens[r] == 1 + d) for r, d in enumerate(draft_lens)),
            "feedback": all(
                new[0] != FEEDBACK or query_lens[r] == 1 + draft_lens[r]
                for r, new in enumerate(rows(request.token_ids, query_lens))
            ),
            "a router id": request.router_id != 0,
            "max_model_len": all(q + c <= self.max_model_len for q, c in zip(query_lens, context_lens, strict=True)),
            "a table that is too short": all(
                n * self.block_size >= q + c for n, q, c in zip(counts, query_lens, context_lens, strict=True)
            ),
        }
        self.breaches.extend(rule for rule, is_kept in rules.items() if not is_kept)

    def check_history(self, request: pb.ExecuteStepRequest, row: int, table: list[int], new: list[int]) -> None:
        """Penalties need the sequence's tokens: what is sent has to be right, and what is missing known to the worker."""
        if not request.HasField("sampling") or request.sampling.presence[row] == 0 or not (request.sample or [True] * 99)[row]:
            return
        history = request.history
        lengths = [prompt + output for prompt, output in zip(history.prompt_lens, history.output_lens, strict=True)]
        sent = rows(history.token_ids, lengths)[row]
        context_len = request.context_lens[row]
        tokens = [self.slots.get(self.slot(table, position), Slot()).token_id for position in range(context_len)] + new
        if sent != tokens[: len(sent)]:
            self.breaches.append(f"row {row}: the history is {sent}, the tokens are {tokens}")
        if len(sent) < context_len and (not request.sequence_ids or context_len - len(sent) > 8):
            self.breaches.append(f"row {row}: the history ends at {len(sent)}, the context at {context_len}")

    def owners_are_clear(self, request: pb.ExecuteStepRequest) -> bool:
        tables = rows(request.block_ids, request.block_counts)
        holders = Counter(block_id for table in tables for block_id in table)
        written = [
            table[position // self.block_size]
            for table, context_len, query_len in zip(tables, request.context_lens, request.query_lens, strict=True)
            for position in range(context_len, context_len + query_len)
        ]
        return all(holders[block_id] == 1 for block_id in written)


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[list[ChainWorker], Client]]:
    """A server whose worker can be exchanged between examples, and a client of it."""
    current = [ChainWorker()]

    class Front(ModelWorkerServicer):
        def GetWorkerInfo(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
            return current[0].GetWorkerInfo(request, context)

        def ExecuteStep(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
            return current[0].ExecuteStep(request, context)

        def ExecuteSteps(self, request_iterator, context):  # type: ignore[no-untyped-def]  # noqa: N802
            return current[0].ExecuteSteps(request_iterator, context)

        def ResetKvCache(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
            return current[0].ResetKvCache(request, context)

    server = grpc.server(ThreadPoolExecutor(4), options=[("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0)])
    add_ModelWorkerServicer_to_server(Front(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with Client(f"127.0.0.1:{port}") as client:
        yield current, client
    server.stop(0).wait()


Served = tuple[list[ChainWorker], Client]


@contextmanager
def session_of(client: Client, depth: int) -> Iterator[FencedSession]:
    """Steps that are sent one by one, or over a stream that takes several."""
    if depth == 0:
        yield FencedSession(client)
        return
    session = StreamSession(client, max_unanswered=depth)
    try:
        yield session
    finally:
        session.close()


def run(
    served: Served,
    worker: ChainWorker,
    scheduling: SchedulerSettings,
    arrivals: Sequence[tuple[int, Request]],
    depth: int = 0,
) -> tuple[dict[int, RequestFinished], list[Event]]:
    """Drives requests that arrive before the given steps; checks what must hold at every step."""
    served[0][0] = worker
    with session_of(served[1], depth) as session:
        return drive(worker, Scheduler(session, scheduling), arrivals)


def drive(
    worker: ChainWorker, scheduler: Scheduler, arrivals: Sequence[tuple[int, Request]]
) -> tuple[dict[int, RequestFinished], list[Event]]:
    queue = sorted(enumerate(arrivals), key=lambda each: each[1][0])
    ids: dict[int, int] = {}
    events: list[Event] = []
    step = 0
    while queue or not scheduler.is_idle:
        while queue and (queue[0][1][0] <= step or scheduler.is_idle):
            position, (_, request) = queue.pop(0)
            ids[scheduler.add(request)] = position
        new_events = scheduler.step()
        for event in new_events:
            if isinstance(event, StepExecuted):
                assert event.num_sequences <= scheduler.max_sequences
                assert event.num_tokens <= min(scheduler.max_tokens, event.num_sequences * scheduler.prefill_chunk)
        events += new_events
        step += 1
        assert step < 5_000, "no progress"
    assert worker.breaches == []
    assert scheduler.num_free_blocks == scheduler.num_usable_blocks
    finished = {ids[event.request_id]: event for event in events if isinstance(event, RequestFinished)}
    for position, event in finished.items():
        sampled = [each for each in events if isinstance(each, TokenSampled) and ids[each.request_id] == position]
        assert tuple(each.token_id for each in sampled) == event.output_ids
        assert [each.index for each in sampled] == list(range(len(sampled)))
        assert [each.is_stop for each in sampled[:-1]] == [False] * (len(sampled) - 1)
        assert not sampled or sampled[-1].is_stop == (event.reason is FinishReason.STOP)
    assert len(finished) == len(arrivals)
    return finished, events


tokens = st.integers(1, POISON - 1)
requests = st.builds(
    lambda prompt_ids, max_tokens, seed, presence, ignore_eos: Request(
        prompt_ids=tuple(prompt_ids),
        max_tokens=max_tokens,
        sampling=Sampling(presence=presence) if seed is None else Sampling(temperature=0.7, seed=seed, presence=presence),
        stop_token_ids=frozenset() if ignore_eos else None,
    ),
    st.lists(st.one_of(tokens, tokens, tokens, tokens, st.integers(1, POISON)), min_size=1, max_size=40),
    st.integers(1, 30),
    st.none() | st.integers(0, 2**64 - 1),
    st.sampled_from([0.0, 0.0, 1.5]),
    st.booleans(),
)
schedulings = st.builds(
    SchedulerSettings,
    prefill_chunk=st.none() | st.integers(1, 12),
    max_sequences=st.none() | st.integers(1, 8),
    max_tokens_per_step=st.none() | st.integers(1, 32),
    max_blocks=st.none() | st.integers(18, 40),
    block_order=st.sampled_from(["ascending", "reversed", "interleaved"]),
    num_drafts=st.sampled_from([0, 0, 1, 4]),
)
depths = st.sampled_from([0, 1, 2, 4])
faults = st.lists(
    st.sampled_from(["", "", "", "", "busy", "lost answer", "not executed", "lost KV", "fault", "taint"]), max_size=40
)
examples = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def assert_as_expected(worker: ChainWorker, finished: dict[int, RequestFinished], arrivals: Sequence[tuple[int, Request]]) -> None:
    for position, (_, request) in enumerate(arrivals):
        output, reason = expected_output(request, worker.max_model_len)
        assert (finished[position].output_ids, finished[position].reason) == (output, reason), position


@examples
@given(st.lists(st.tuples(st.integers(0, 30), requests), min_size=1, max_size=12), schedulings, depths)
def test_outputs_depend_on_the_request_alone_and_never_on_how_it_is_scheduled(
    served: Served, arrivals: list[tuple[int, Request]], scheduling: SchedulerSettings, depth: int
) -> None:
    worker = ChainWorker()
    finished, _ = run(served, worker, scheduling, arrivals, depth)
    assert_as_expected(worker, finished, arrivals)


@examples
@given(st.lists(st.tuples(st.integers(0, 20), requests), min_size=1, max_size=8), schedulings, faults, depths)
def test_outputs_survive_lost_answers_lost_caches_busy_workers_and_tainted_blocks(
    served: Served, arrivals: list[tuple[int, Request]], scheduling: SchedulerSettings, faults: list[str], depth: int
) -> None:
    worker = ChainWorker(faults=list(faults))
    finished, _ = run(served, worker, scheduling, arrivals, depth)
    for position, (_, request) in enumerate(arrivals):
        output, reason = expected_output(request, worker.max_model_len)
        got = finished[position]
        if got.reason is FinishReason.ERROR and "was lost" in got.error:
            assert got.output_ids == output[: len(got.output_ids)]
            assert sum(fault in ("lost KV", "fault", "taint") for fault in faults) >= 3
        else:
            assert (got.output_ids, got.reason) == (output, reason)


def prompt(length: int, start: int = 1) -> tuple[int, ...]:
    return tuple((start + 7 * position) % (POISON - 1) + 1 for position in range(length))


def endless(length: int, max_tokens: int, start: int = 1) -> Request:
    return Request(prompt_ids=prompt(length, start), max_tokens=max_tokens, stop_token_ids=frozenset())


def test_sequences_are_preempted_when_blocks_run_out_youngest_first_and_end_as_if_nothing_had_happened(served: Served) -> None:
    worker = ChainWorker()
    arrivals = [(0, endless(20, 30, start)) for start in range(6)]
    finished, events = run(served, worker, SchedulerSettings(max_blocks=16), arrivals)
    assert_as_expected(worker, finished, arrivals)
    preempted = [event.request_id for event in events if isinstance(event, RequestPreempted)]
    assert preempted
    assert 0 not in preempted
    order = [event.request_id for event in events if isinstance(event, RequestFinished)]
    assert order[0] == 0


@pytest.mark.parametrize("max_blocks", [15, 16, 17])
def test_a_young_sequence_chosen_to_decode_gives_way_to_the_prompt_of_an_older_one(served: Served, max_blocks: int) -> None:
    worker = ChainWorker()
    arrivals = [(0, endless(40, 5)), (0, endless(3, 40, 3))]
    finished, events = run(served, worker, SchedulerSettings(max_blocks=max_blocks, prefill_chunk=1), arrivals)
    assert_as_expected(worker, finished, arrivals)
    assert 1 in [event.request_id for event in events if isinstance(event, RequestPreempted)]


def test_a_long_prompt_is_prefilled_in_chunks_beside_sequences_that_decode(served: Served) -> None:
    worker = ChainWorker()
    arrivals = [(0, endless(3, 20)), (0, endless(4, 20)), (3, endless(40, 5))]
    finished, events = run(served, worker, SchedulerSettings(prefill_chunk=8), arrivals)
    assert_as_expected(worker, finished, arrivals)
    mixed = [event for event in events if isinstance(event, StepExecuted) and event.num_decodes == 2 and event.num_tokens == 10]
    assert len(mixed) == 5
    assert all(event.num_sequences == 3 for event in mixed)


def test_a_failed_row_ends_its_request_and_no_other(served: Served) -> None:
    worker = ChainWorker()
    bad = Request(prompt_ids=(*prompt(9), POISON, 3), max_tokens=5)
    arrivals = [(0, endless(5, 12)), (1, bad), (1, endless(7, 12, 3))]
    finished, _ = run(served, worker, SchedulerSettings(), arrivals)
    assert_as_expected(worker, finished, arrivals)
    assert finished[1].error == "NON_FINITE_LOGITS: not finite"


def test_a_lost_kv_cache_is_recomputed_and_said_so(served: Served) -> None:
    worker = ChainWorker(faults=["", "", "", "lost KV"])
    arrivals = [(0, endless(5, 12)), (0, endless(9, 12, 3))]
    finished, events = run(served, worker, SchedulerSettings(), arrivals)
    assert_as_expected(worker, finished, arrivals)
    assert [event for event in events if isinstance(event, KvCacheRecomputed)] == [KvCacheRecomputed(worker_epoch=1001)]


def test_a_step_whose_answer_is_lost_is_executed_once(served: Served) -> None:
    quiet, shaky = ChainWorker(), ChainWorker(faults=["lost answer", "", "not executed", "lost answer"] * 3)
    arrivals = [(0, endless(5, 12)), (2, endless(9, 12, 3))]
    for worker in (quiet, shaky):
        finished, _ = run(served, worker, SchedulerSettings(), arrivals)
        assert_as_expected(worker, finished, arrivals)
    assert shaky.num_executed == quiet.num_executed


def test_a_step_that_the_worker_refuses_ends_its_requests_with_the_reason_and_the_others_go_on(served: Served) -> None:
    request = Request(prompt_ids=(5, 6, 7), max_tokens=4, stop_token_ids=frozenset())
    finished, _ = run(served, ChainWorker(faults=["", "refused"]), SchedulerSettings(), [(0, request), (2, request)])
    assert finished[0].reason is FinishReason.ERROR
    assert "malformed" in finished[0].error
    assert finished[1].reason is FinishReason.LENGTH


def test_a_request_that_breaks_the_worker_again_and_again_is_given_up(served: Served) -> None:
    worker = ChainWorker(faults=["fault"] * 20)
    served[0][0] = worker
    scheduler = Scheduler(FencedSession(served[1]))
    request_id = scheduler.add(endless(5, 12))
    finished = scheduler.run_until_idle()
    assert finished[request_id].reason is FinishReason.ERROR
    assert "lost 3 times" in finished[request_id].error


def test_a_smaller_cache_after_a_restart_ends_requests_that_no_longer_fit(served: Served) -> None:
    worker = ChainWorker()
    served[0][0] = worker
    scheduler = Scheduler(FencedSession(served[1]))
    small, large = scheduler.add(endless(3, 5)), scheduler.add(endless(30, 20))
    scheduler.step()
    worker.num_blocks = 6
    worker.new_epoch()
    finished = scheduler.run_until_idle()
    assert finished[large].error == "the request may need 13 KV cache blocks, the worker has 5"
    assert finished[small].output_ids == expected_output(endless(3, 5), 64)[0]
    assert worker.breaches == []


def test_a_worker_that_returns_with_another_model_ends_the_run(served: Served) -> None:
    worker = ChainWorker()
    served[0][0] = worker
    scheduler = Scheduler(FencedSession(served[1]))
    scheduler.add(endless(3, 5))
    scheduler.step()
    worker.model_name = "other"
    worker.new_epoch()
    with pytest.raises(WorkerChangedError, match="model other instead of chain"):
        scheduler.step()


def test_a_step_without_an_answer_is_settled_before_the_next_one(served: Served) -> None:
    worker = ChainWorker(faults=["", "", "lost answer", "not executed", "not executed", "not executed", "not executed"])
    served[0][0] = worker
    scheduler = Scheduler(FencedSession(served[1], patience=0.1))
    kept, cancelled = scheduler.add(endless(5, 8)), scheduler.add(endless(6, 8, 3))
    scheduler.step()
    scheduler.step()
    with pytest.raises(WorkerCallError):
        scheduler.step()
    scheduler.cancel(cancelled)
    worker.faults.clear()
    finished = scheduler.run_until_idle()
    assert finished.keys() == {kept}
    assert finished[kept].output_ids == expected_output(endless(5, 8), 64)[0]
    assert worker.breaches == []
    assert scheduler.num_free_blocks == scheduler.num_usable_blocks


def test_a_sequence_ends_at_the_models_maximum_length(served: Served) -> None:
    worker = ChainWorker(max_model_len=20)
    arrivals = [(0, endless(20, 50)), (0, endless(15, 50))]
    finished, _ = run(served, worker, SchedulerSettings(), arrivals)
    assert [len(finished[position].output_ids) for position in (0, 1)] == [1, 6]


def test_a_session_gives_its_lease_back_and_leaves_that_of_others_alone(served: Served) -> None:
    worker = ChainWorker()
    served[0][0] = worker
    ours, theirs = FencedSession(served[1], router_id=1), FencedSession(served[1], router_id=2)
    scheduler = Scheduler(ours)
    scheduler.add(endless(3, 2))
    scheduler.run_until_idle()
    epoch = worker.epoch
    theirs.release()
    assert worker.epoch == epoch
    ours.release()
    assert worker.epoch != epoch
    assert worker.lease_holder == 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(prompt_ids=(), max_tokens=1), "prompt_ids: found no token"),
        (Request(prompt_ids=(1, 50), max_tokens=1), r"prompt_ids\[1\]: found 50, expected 0 .. 49"),
        (Request(prompt_ids=(-1,), max_tokens=1), r"prompt_ids\[0\]: found -1"),
        (Request(prompt_ids=(1,) * 65, max_tokens=1), "found 65 tokens, the model takes 64"),
        (Request(prompt_ids=(1,), max_tokens=0), "max_tokens: found 0"),
        (Request(prompt_ids=(1,), max_tokens=1, sampling=Sampling(temperature=1e-9)), "temperature: found 1e-09"),
        (Request(prompt_ids=(1,), max_tokens=1, sampling=Sampling(temperature=float("nan"))), "temperature: found nan"),
        (Request(prompt_ids=(1,), max_tokens=1, sampling=Sampling(top_k=-1)), "top_k"),
        (Request(prompt_ids=(1,), max_tokens=1, sampling=Sampling(top_p=0.0)), "top_p"),
        (Request(prompt_ids=(1,), max_tokens=1, sampling=Sampling(min_p=1.0)), "min_p"),
        (Request(prompt_ids=(1,), max_tokens=1, sampling=Sampling(seed=2**64)), "seed"),
        (Request(prompt_ids=(1,), max_tokens=1, sampling=Sampling(num_logprobs=21)), "num_logprobs"),
    ],
)
def test_a_request_that_the_worker_would_refuse_is_refused_before_it_joins_a_batch(
    served: Served, request_: Request, message: str
) -> None:
    served[0][0] = ChainWorker()
    with pytest.raises(RequestError, match=message):
        Scheduler(FencedSession(served[1])).add(request_)


def test_a_request_that_can_never_have_enough_blocks_is_refused(served: Served) -> None:
    served[0][0] = ChainWorker()
    scheduler = Scheduler(FencedSession(served[1]), SchedulerSettings(max_blocks=4))
    scheduler.add(endless(10, 7))
    with pytest.raises(RequestError, match="may need 5 KV cache blocks, the worker has 4"):
        scheduler.add(endless(10, 8))


@pytest.mark.parametrize("order", ["ascending", "reversed", "interleaved"])
def test_every_block_but_the_null_block_is_handed_out_once(order: str) -> None:
    allocator = BlockPool(10, order)  # type: ignore[arg-type]
    assert sorted(allocator.take(9)) == list(range(1, 10))
    assert allocator.num_free == 0
    allocator.give_back([3, 7])
    assert allocator.take(2) == [3, 7]


def test_settings_beyond_the_workers_limits_do_not_exceed_them(served: Served) -> None:
    worker = ChainWorker(max_sequences=3, max_tokens_per_step=6)
    arrivals = [(0, endless(9, 30, start)) for start in range(7)]
    generous = SchedulerSettings(prefill_chunk=99, max_sequences=99, max_tokens_per_step=99, max_blocks=99)
    finished, _ = run(served, worker, generous, arrivals)
    assert_as_expected(worker, finished, arrivals)


@examples
@given(st.lists(st.tuples(st.integers(0, 20), requests, st.integers(2, 5)), min_size=1, max_size=5), schedulings, faults, depths)
def test_continuations_of_one_prompt_get_what_each_alone_would_get(
    served: Served, arrivals: list[tuple[int, Request, int]], scheduling: SchedulerSettings, faults: list[str], depth: int
) -> None:
    worker = ChainWorker(faults=[fault for fault in faults if fault not in ("lost KV", "fault", "taint")])
    served[0][0] = worker
    wanted: dict[int, Request] = {}
    finished: dict[int, RequestFinished] = {}
    with session_of(served[1], depth) as session:
        scheduler = Scheduler(session, scheduling)
        for step, request, count in sorted(arrivals, key=lambda each: each[0]):
            for _ in range(step):
                finished |= {each.request_id: each for each in scheduler.step() if isinstance(each, RequestFinished)}
            for index, request_id in enumerate(scheduler.add_continuations(request, count)):
                wanted[request_id] = request.with_seed_offset(index)
        finished |= scheduler.run_until_idle()
    for request_id, request in wanted.items():
        assert (finished[request_id].output_ids, finished[request_id].reason) == expected_output(request, worker.max_model_len)
    assert worker.breaches == []
    assert scheduler.num_free_blocks == scheduler.num_usable_blocks


def test_continuations_compute_their_prompt_once_and_copy_the_block_that_they_go_on_writing(served: Served) -> None:
    worker = ChainWorker()
    served[0][0] = worker
    scheduler = Scheduler(FencedSession(served[1]))
    request = Request(
        prompt_ids=prompt(19), max_tokens=5, sampling=Sampling(temperature=1.0, seed=2**64 - 2), stop_token_ids=frozenset()
    )
    ids = scheduler.add_continuations(request, 4)
    events: list[Event] = []
    finished = scheduler.run_until_idle(events.append)
    assert len({finished[request_id].output_ids for request_id in ids}) == 4
    steps = [event.num_tokens for event in events if isinstance(event, StepExecuted)]
    assert steps == [19, 4, 4, 4, 4, 3]
    assert worker.num_copies == 3


def test_a_pipeline_has_no_more_sequences_than_the_worker_keeps_tokens_of(served: Served) -> None:
    worker = ChainWorker(max_feedback_sequences=3)
    arrivals = [(0, endless(5, 12, start)) for start in range(9)]
    # Some stop, which is seen when they have a row in the next step already.
    outputs = [expected_output(request, worker.max_model_len)[0] for _, request in arrivals]
    arrivals = [
        (step, replace(request, stop_token_ids=frozenset(output[3:4] if index % 2 else ())))
        for index, ((step, request), output) in enumerate(zip(arrivals, outputs, strict=True))
    ]
    finished, events = run(served, worker, SchedulerSettings(), arrivals, depth=3)
    assert_as_expected(worker, finished, arrivals)
    assert max(event.num_sequences for event in events if isinstance(event, StepExecuted)) <= 3


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_pipeline_sends_steps_before_their_tokens_are_known_and_drops_those_that_come_after_a_stop(
    served: Served, depth: int
) -> None:
    worker = ChainWorker()
    stopping = Request(prompt_ids=prompt(6), max_tokens=20, stop_token_ids=frozenset())
    output, _ = expected_output(stopping, worker.max_model_len)
    stopping = replace(stopping, stop_token_ids=frozenset({output[5]}))
    number = output.index(output[5]) + 1
    finished, _ = run(served, worker, SchedulerSettings(), [(0, stopping)], depth)
    assert_as_expected(worker, finished, [(0, stopping)])
    # Until the stop is seen, as many steps more as are in flight.
    assert worker.num_executed == number + depth - 1
    assert worker.num_feedback_tokens == (worker.num_executed - 1 if depth > 1 else 0)


@pytest.mark.parametrize("seeded", [None, [True, False]])
def test_a_seed_counts_unless_it_is_said_not_to(seeded: list[bool] | None) -> None:
    sampling = StepSampling(temperature=[1.0, 1.0], seed=[3, 4], has_seed=seeded)
    step = build_step(
        query_lens=[1, 1], context_lens=[0, 0], token_ids=[1, 2], block_counts=[1, 1], block_ids=[1, 2], sampling=sampling
    )
    assert list(step.sampling.has_seed) == (seeded or [True, True])


def test_a_block_is_free_only_after_the_last_step_that_could_write_it_was_answered(served: Served) -> None:
    served[0][0] = ChainWorker()
    with session_of(served[1], 2) as session:
        batcher = Batcher(SchedulerSettings(), session.info)
    sequence = SchedulerSequence(0, endless(5, 9), list(prompt(5)))
    batcher.waiting.append(sequence)
    batches = [batcher.choose(may_preempt=True)]
    batcher.send(batches[0])
    batches.append(batcher.choose(may_preempt=False))
    batcher.send(batches[1])
    assert [row.token_ids for batch in batches for row in batch.rows] == [list(prompt(5)), [FEEDBACK]]
    batcher.leave(sequence)
    for batch in batches:
        assert batcher.blocks.num_free == batcher.blocks.num_usable - 2
        assert batcher.left == []
        batch.rows[0].settle(1)
        batcher.vacate(batch.rows[0].residence)
    assert batcher.blocks.num_free == batcher.blocks.num_usable
    assert batcher.left == [1]


def test_drafts_repeat_what_came_after_the_same_tokens_before() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 5, 1, 2, 3])
    assert lookup.propose(4) == [4, 5, 1, 2]
    lookup.extend([9])
    assert lookup.propose(4) == []
    lookup.extend([7, 9, 7, 9])
    assert lookup.propose(5) == [7, 9, 7, 9, 7]


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 6))
def test_a_draft_continues_the_last_occurrence_of_the_longest_run_that_came_before(text: list[int], limit: int) -> None:
    expected: list[int] = []
    for length in (4, 3, 2):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[len(text) - length :]]
        if ends and length <= len(text):
            grown = list(text)
            for index in range(limit):
                grown.append(grown[ends[-1] + index])
            expected = grown[len(text) :]
            break
    assert PromptLookup(text).propose(limit) == expected
