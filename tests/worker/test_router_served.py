"""The reference router against a real worker: tokens don't depend on how steps are sent, guessed or shared."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from modelworker.worker.client import Client, FencedSession, StreamSession
from modelworker.worker.scheduler import (
    Event,
    FinishReason,
    Request,
    RequestPreempted,
    Sampling,
    Scheduler,
    SchedulerSettings,
    StepExecuted,
)
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.worker_process import worker_process

# A prompt that repeats itself, so that there is something to guess.
LOOP = (5, 9, 17, 33) * 4
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.9, seed=3),
    Sampling(temperature=1.3, seed=4, top_k=20, top_p=0.9, min_p=0.01),
    Sampling(presence=1.0, frequency=0.5, repetition=1.2),
    Sampling(temperature=0.8, seed=5, presence=-1.0, repetition=1.1, num_logprobs=3),
)
REQUESTS = [
    Request(prompt_ids=LOOP[start:], max_tokens=12, sampling=sampling, stop_token_ids=frozenset())
    for start, sampling in enumerate(SAMPLINGS)
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = save_tiny(tmp_path_factory.mktemp("model"))
    flags = ("--block-size", "4", "--num-blocks", "40", "--max-sequences", "8", "--max-tokens-per-step", "32")
    with worker_process(
        model, *flags, "--optimization-level", "0", "--graph-mode", "FULL_DECODE_ONLY", "--decode-query-lens", "1,4"
    ) as worker:
        yield worker.address


def outputs(
    address: str, depth: int, settings: SchedulerSettings, requests: list[Request]
) -> tuple[Mapping[int, tuple[int, ...]], list[Event]]:
    """Runs the requests in an epoch of their own; depth 0: steps are single calls."""
    events: list[Event] = []
    with Client(address) as client:
        session = StreamSession(client, max_unanswered=depth) if depth else FencedSession(client)
        try:
            scheduler = Scheduler(session, settings)
            for request in requests:
                scheduler.add(request)
            finished = scheduler.run_until_idle(events.append)
        finally:
            session.release()
    assert {each.reason for each in finished.values()} <= {FinishReason.LENGTH, FinishReason.STOP}
    return {request_id: each.output_ids for request_id, each in finished.items()}, events


@pytest.fixture(scope="module")
def expected(address: str) -> list[tuple[int, ...]]:
    """What each request gets alone."""
    return [outputs(address, 0, SchedulerSettings(), [request])[0][0] for request in REQUESTS]


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
@pytest.mark.parametrize("chunk", [None, 5])
def test_pipelined_and_guessed_steps_give_the_tokens_of_plain_ones(
    address: str, expected: list[tuple[int, ...]], depth: int, num_drafts: int, chunk: int | None
) -> None:
    found, events = outputs(address, depth, SchedulerSettings(num_drafts=num_drafts, prefill_chunk=chunk), REQUESTS)
    assert [found[index] for index in range(len(REQUESTS))] == expected
    if num_drafts and depth < 2:  # In a pipeline only a text that has begun to repeat itself waits for its last token.
        assert sum(event.num_drafts for event in events if isinstance(event, StepExecuted)) > 0


@pytest.mark.parametrize("depth", [0, 2])
def test_preempted_sequences_get_the_same_tokens_in_a_pipeline(address: str, expected: list[tuple[int, ...]], depth: int) -> None:
    found, events = outputs(address, depth, SchedulerSettings(max_blocks=14), REQUESTS)
    assert [found[index] for index in range(len(REQUESTS))] == expected
    assert any(isinstance(event, RequestPreempted) for event in events)


@pytest.mark.parametrize("depth", [1, 3])
def test_stops_that_are_seen_late_end_sequences_where_they_should(
    address: str, expected: list[tuple[int, ...]], depth: int
) -> None:
    requests = [replace(request, stop_token_ids=frozenset({output[6]})) for request, output in zip(REQUESTS, expected, strict=True)]
    found, _ = outputs(address, depth, SchedulerSettings(), requests)
    assert [found[index] for index in range(len(requests))] == [output[: output.index(output[6]) + 1] for output in expected]


@pytest.mark.parametrize("depth", [0, 2])
def test_continuations_of_one_prompt_from_shared_blocks_are_those_of_their_own_blocks(address: str, depth: int) -> None:
    request = replace(REQUESTS[1], prompt_ids=LOOP[:14])
    alone = [outputs(address, 0, SchedulerSettings(), [request.with_seed_offset(index)])[0][0] for index in range(4)]
    events: list[Event] = []
    with Client(address) as client:
        session = StreamSession(client, max_unanswered=depth) if depth else FencedSession(client)
        scheduler = Scheduler(session)
        ids = scheduler.add_continuations(request, 4)
        finished = scheduler.run_until_idle(events.append)
        session.release()
    assert [finished[request_id].output_ids for request_id in ids] == alone
    assert len(set(alone)) > 1
    # The prompt once, then a token of each.
    assert [event.num_tokens for event in events if isinstance(event, StepExecuted)][:2] == [14, 4]
