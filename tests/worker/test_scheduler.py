"""The scheduler against a small worker that holds it to the protocol. The oracle computes that worker's chain from tokens alone."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
from modelworker_testing.chain_worker import EOS, FEEDBACK, POISON, ChainWorker, chain_of, sample


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
    assert finished[large].error == "prompt_ids: found 30 tokens, which need 8 KV cache blocks, the worker has 5"
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
    with pytest.raises(RequestError, match="prompt_ids: found 17 tokens, which need 5 KV cache blocks, the worker has 4"):
        scheduler.add(endless(17, 1))


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
