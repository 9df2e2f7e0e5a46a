"""The client's streams against real servers: pipelined steps, errors in band, and connections that break."""

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.client import (
    AsyncClient,
    AsyncFencedSession,
    AsyncStreamSession,
    CallDeadlineError,
    Client,
    InvalidRequestError,
    KvCacheLostError,
    StepConflictError,
    StepPendingError,
    StreamSession,
    WorkerCallError,
    WorkerOwnedError,
    WorkerUnavailableError,
    build_step,
)
from modelworker.worker.settings import FencingSettings, ServerSettings, WorkerSettings
from modelworker_testing.cable import Cable
from modelworker_testing.serving import VOCAB_SIZE, Gate, Running, async_test, running_server
from modelworker_testing.serving_thread import served_in_thread


def one_token(position: int, token: int, client_tag: int = 0) -> pb.ExecuteStepRequest:
    """A decode of the one sequence, in the blocks 1, 2, 3 ..."""
    num_blocks = position // 4 + 1
    return build_step(
        query_lens=[1],
        context_lens=[position],
        token_ids=[token],
        block_counts=[num_blocks],
        block_ids=list(range(1, num_blocks + 1)),
        client_tag=client_tag,
    )


def tokens_of(num_steps: int) -> list[int]:
    return [(7 * step + 3) % VOCAB_SIZE for step in range(num_steps)]


def sums_of(tokens: list[int]) -> list[int]:
    """What the engine samples when each step ran once, in order, on what the ones before it wrote."""
    return [sum(tokens[: step + 1]) % VOCAB_SIZE for step in range(len(tokens))]


def count(running: Running, key: str) -> int:
    return running.server.counters.snapshot().get(key, 0)


# -- pipelining ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
@async_test
async def test_steps_in_flight_at_any_depth_give_the_tokens_of_steps_one_at_a_time(depth: int) -> None:
    tokens = tokens_of(40)
    async with running_server() as worker, AsyncClient(worker.address) as client:
        session = await AsyncStreamSession.open(client)
        sampled, sent = [], 0
        while len(sampled) < len(tokens):
            while sent < len(tokens) and sent - len(sampled) < depth:
                await session.send(one_token(sent, tokens[sent]))
                sent += 1
            sampled += (await session.receive()).sampled_ids.tolist()
        assert sampled == sums_of(tokens)
        assert worker.engine.executed == list(range(1, 41))
        assert not session.is_pending
        assert session.next_step_id == 41


def test_the_blocking_session_has_several_steps_in_flight_too() -> None:
    tokens = tokens_of(20)
    with served_in_thread() as worker, Client(worker.address) as client:
        gate = worker.engine.before_step = Gate()
        session = StreamSession(client)
        for step in range(4):
            session.send(one_token(step, tokens[step]))
        while worker.server.executor.num_steps_in_flight < 4:
            time.sleep(0.01)
        gate.open()
        sampled = [session.receive().sampled_ids.tolist()[0] for _ in range(4)]
        sampled += [session.execute(one_token(step, tokens[step])).sampled_ids.tolist()[0] for step in range(4, 20)]
        assert sampled == sums_of(tokens)
        session.close()
        assert session.execute(one_token(20, 1)).step_id == 21


@async_test
async def test_as_many_steps_as_the_worker_admits_may_be_unanswered() -> None:
    async with running_server(WorkerSettings(fencing=FencingSettings(max_steps_in_flight=3))) as worker:
        gate = worker.engine.before_step = Gate()
        async with AsyncClient(worker.address) as client:
            session = await AsyncStreamSession.open(client)
            for step in range(3):
                await session.send(one_token(step, 1))
            with pytest.raises(StepPendingError, match="3 steps from 1 on are not answered"):
                await session.send(one_token(3, 1))
            with pytest.raises(StepPendingError):
                await session.execute(one_token(3, 1))
            gate.open()
            assert [(await session.receive()).step_id for _ in range(3)] == [1, 2, 3]
            with pytest.raises(StepPendingError, match="no step is pending"):
                await session.receive()
            assert (await session.execute(one_token(3, 1))).step_id == 4


# -- errors --------------------------------------------------------------------------------------------------------------------


@async_test
async def test_a_refused_step_makes_those_behind_it_void_and_leaves_its_id_to_the_next_one() -> None:
    tokens = tokens_of(6)
    async with running_server() as worker, AsyncClient(worker.address) as client:
        session = await AsyncStreamSession.open(client)
        await session.send(one_token(0, tokens[0]))
        await session.send(one_token(1, VOCAB_SIZE))
        for step in (2, 3):
            await session.send(one_token(step, tokens[step]))
        assert (await session.receive()).step_id == 1
        with pytest.raises(InvalidRequestError) as caught:
            await session.receive()
        assert [violation.field for violation in caught.value.violations] == ["token_ids[0]"]
        assert not session.is_pending
        assert session.next_step_id == 2
        for step in range(1, 6):
            await session.send(one_token(step, tokens[step]))
        sampled = [(await session.receive()).sampled_ids.tolist()[0] for _ in range(5)]
        assert sampled == sums_of(tokens)[1:]
        assert worker.engine.executed == [1, 2, 3, 4, 5, 6]
        assert count(worker, 'stream_steps_total{code="FAILED_PRECONDITION"}') == 2


@async_test
async def test_a_busy_worker_is_asked_again_and_no_step_is_lost_or_repeated() -> None:
    tokens = tokens_of(12)
    async with running_server(WorkerSettings(fencing=FencingSettings(max_steps_in_flight=2))) as worker:
        gate = worker.engine.before_step = Gate()
        async with AsyncClient(worker.address) as client:
            session = await AsyncStreamSession.open(client, max_unanswered=6)
            for step in range(6):
                await session.send(one_token(step, tokens[step]))
            await gate.wait_entered()
            # As many again as may be in flight are read; the rest waits in the transport.
            while count(worker, 'stream_steps_total{code="RESOURCE_EXHAUSTED"}') < 2:
                await asyncio.sleep(0.01)
            gate.open()
            sampled = []
            for step in range(6, 18):
                sampled += (await session.receive()).sampled_ids.tolist()
                if step < 12:
                    await session.send(one_token(step, tokens[step]))
            assert sampled == sums_of(tokens)
            assert worker.engine.executed == list(range(1, 13))


@async_test
async def test_a_reset_behind_the_sessions_back_is_told_for_all_steps_in_flight_and_renewed() -> None:
    async with running_server() as worker, AsyncClient(worker.address) as client:
        session = await AsyncStreamSession.open(client)
        await session.execute(one_token(0, 5))
        await client.reset_kv_cache(session.worker_epoch)
        for step in (1, 2, 3):
            await session.send(one_token(step, 5))
        with pytest.raises(KvCacheLostError):
            await session.receive()
        assert not session.is_pending
        await session.renew()
        for step in (0, 1, 2):
            await session.send(one_token(step, 5))
        assert [(await session.receive()).step_id for _ in range(3)] == [1, 2, 3]


@async_test
async def test_a_fault_after_launch_ends_as_a_lost_kv_cache() -> None:
    async with running_server() as worker, AsyncClient(worker.address) as client:
        launched: list[int] = []

        def fail(batch) -> None:
            launched.append(batch.step_id)
            raise RuntimeError("injected")

        session = await AsyncStreamSession.open(client)
        await session.execute(one_token(0, 5))
        worker.engine.before_step = fail
        await session.send(one_token(1, 5))
        await session.send(one_token(2, 5))
        with pytest.raises(KvCacheLostError):
            await session.receive()
        assert launched == [2]
        assert not session.is_pending


@async_test
async def test_a_second_router_is_refused_in_band() -> None:
    async with running_server() as worker, AsyncClient(worker.address) as client:
        first = await AsyncStreamSession.open(client)
        await first.execute(one_token(0, 5))
        second = await AsyncStreamSession.open(client)
        with pytest.raises(WorkerOwnedError):
            await second.execute(one_token(1, 5))
        await first.release()
        await second.renew()
        assert (await second.execute(one_token(0, 5))).step_id == 1
        with pytest.raises(KvCacheLostError):
            await first.execute(one_token(1, 5))
        assert worker.engine.executed == [1, 1]


@async_test
async def test_patience_ends_with_the_steps_pending_and_receive_settles_them_later() -> None:
    async with running_server() as worker, AsyncClient(worker.address) as client:
        gate = worker.engine.before_step = Gate()
        session = await AsyncStreamSession.open(client, patience=0.4)
        await session.send(one_token(0, 5))
        await session.send(one_token(1, 6))
        with pytest.raises(CallDeadlineError):
            await session.receive()
        assert session.is_pending
        gate.open()
        assert [(await session.receive()).sampled_ids.tolist() for _ in range(2)] == [[5], [11]]
        assert worker.engine.executed == [1, 2]


def test_patience_of_the_blocking_session_ends_likewise() -> None:
    with served_in_thread() as worker, Client(worker.address) as client:
        gate = worker.engine.before_step = Gate()
        session = StreamSession(client, patience=0.4)
        session.send(one_token(0, 5))
        session.send(one_token(1, 6))
        with pytest.raises(CallDeadlineError):
            session.receive()
        assert session.is_pending
        gate.open()
        assert [session.receive().sampled_ids.tolist() for _ in range(2)] == [[5], [11]]
        assert worker.engine.executed == [1, 2]


@async_test
async def test_a_task_that_is_cancelled_while_it_waits_leaves_its_steps_to_the_next_receive() -> None:
    async with running_server() as worker, AsyncClient(worker.address) as client:
        gate = worker.engine.before_step = Gate()
        session = await AsyncStreamSession.open(client)
        await session.send(one_token(0, 5))
        await session.send(one_token(1, 6))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(session.receive(), 0.2)
        assert session.is_pending
        gate.open()
        assert [(await session.receive()).sampled_ids.tolist() for _ in range(2)] == [[5], [11]]
        assert worker.engine.executed == [1, 2]


@async_test
async def test_a_draining_worker_answers_what_it_took_and_then_patience_ends() -> None:
    async with running_server() as worker, AsyncClient(worker.address) as client:
        gate = worker.engine.before_step = Gate()
        session = await AsyncStreamSession.open(client, patience=1.0)
        await session.send(one_token(0, 5))
        await gate.wait_entered()
        worker.server.request_stop()
        await session.send(one_token(1, 6))
        gate.open()
        assert (await session.receive()).sampled_ids.tolist() == [5]
        with pytest.raises(WorkerUnavailableError):
            await session.receive()
        assert worker.engine.executed == [1]


@async_test
async def test_another_step_under_the_same_id_is_a_conflict() -> None:
    async with running_server() as worker, AsyncClient(worker.address) as client:
        one = await AsyncStreamSession.open(client, router_id=1)
        same = await AsyncStreamSession.open(client, router_id=1)
        await one.execute(one_token(0, 5))
        with pytest.raises(StepConflictError):
            await same.execute(one_token(0, 6))
        assert worker.engine.executed == [1]


@async_test
async def test_single_calls_of_another_session_object_and_a_stream_share_the_order() -> None:
    async with running_server() as worker, AsyncClient(worker.address) as client:
        stream = await AsyncStreamSession.open(client, router_id=1)
        await stream.execute(one_token(0, 5))
        single = await AsyncFencedSession.open(client, router_id=1)
        assert (await single.execute(one_token(1, 6))).sampled_ids.tolist() == [11]
        await stream.renew()
        assert (await stream.execute(one_token(2, 7))).sampled_ids.tolist() == [18]
        assert worker.engine.executed == [1, 2, 3]


# -- the bare stream -----------------------------------------------------------------------------------------------------------


@async_test
async def test_a_bare_stream_answers_unsequenced_steps_with_their_tags_and_errors_as_outcomes() -> None:
    async with running_server() as worker, AsyncClient(worker.address) as client:
        stream = client.stream_steps()
        await stream.send(one_token(0, 5, client_tag=1))
        await stream.send(one_token(0, VOCAB_SIZE, client_tag=2))
        await stream.send(one_token(0, 6, client_tag=3))
        await stream.finish()
        answers = [await stream.receive(10) for _ in range(3)]
        assert [answer.client_tag for answer in answers] == [1, 2, 3]
        assert answers[2].result().sampled_ids.tolist() == [6]
        with pytest.raises(InvalidRequestError):
            answers[1].result()
        for _ in range(2):
            with pytest.raises(WorkerUnavailableError, match="the stream has ended"):
                await stream.receive(10)
        await stream.send(one_token(0, 5))
        assert worker.engine.executed == [0, 0]


def test_a_blocking_bare_stream_does_the_same() -> None:
    with served_in_thread() as worker, Client(worker.address) as client:
        stream = client.stream_steps()
        request = one_token(0, 5, client_tag=1)
        stream.send(request)
        request.token_ids[0] = 9  # What was sent is sent.
        stream.send(one_token(0, VOCAB_SIZE, client_tag=2))
        stream.finish()
        assert stream.receive(10).result().sampled_ids.tolist() == [5]
        assert isinstance(stream.receive(10).outcome, InvalidRequestError)
        with pytest.raises(WorkerUnavailableError):
            stream.receive(10)
        assert worker.engine.executed == [0]


@async_test
async def test_a_cancelled_stream_says_so() -> None:
    async with running_server() as worker, AsyncClient(worker.address) as client:
        stream = client.stream_steps()
        await stream.send(one_token(0, 5))
        await stream.receive(10)
        stream.cancel()
        with pytest.raises(WorkerCallError) as caught:
            await stream.receive(10)
        assert caught.value.code is grpc.StatusCode.CANCELLED


# -- broken connections --------------------------------------------------------------------------------------------------------


async def survive_cuts(num_cuts: int, num_steps: int, seed: int) -> None:
    """Pipelines through a connection that is cut again and again; the worker must execute each step once, in order."""
    chance = random.Random(seed)
    async with running_server() as worker:
        cable = Cable(worker.server.port, iter([chance.randrange(1, 4000) for _ in range(num_cuts)]))
        async with cable.plugged_in() as address, AsyncClient(address) as client:
            session = await AsyncStreamSession.open(client)
            in_flight: deque[int] = deque()
            sent, total, received = 0, 0, 0
            while received < num_steps or cable.num_cuts < num_cuts:
                while len(in_flight) < chance.choice((1, 2, 4, 8)):
                    token = (7 * sent + 3) % VOCAB_SIZE
                    await session.send(one_token(sent, token))
                    total = (total + token) % VOCAB_SIZE
                    in_flight.append(total)
                    sent += 1
                answer = await session.receive()
                received += 1
                assert answer.step_id == received
                assert answer.sampled_ids.tolist() == [in_flight.popleft()]
            while in_flight:
                assert (await session.receive()).sampled_ids.tolist() == [in_flight.popleft()]
        assert worker.engine.executed == list(range(1, sent + 1))
        assert cable.num_cuts == num_cuts
        # Some cuts came between an execution and its answer.
        assert count(worker, "steps_replayed_total") + count(worker, "steps_joined_total") > 0


def test_each_step_is_executed_once_however_often_the_stream_breaks() -> None:
    asyncio.run(survive_cuts(num_cuts=10, num_steps=60, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 3])
def test_two_hundred_lost_connections_leave_every_pipelined_step_executed_once(seed: int) -> None:
    asyncio.run(survive_cuts(num_cuts=200, num_steps=500, seed=seed))


async def survive_refusals(num_cuts: int, num_steps: int, seed: int) -> None:
    """As `survive_cuts`, with steps among them that are malformed or late, which takes those behind them along."""
    chance = random.Random(seed)
    async with running_server(WorkerSettings(server=ServerSettings(log_level="error"))) as worker:
        worker.engine.before_step = lambda batch: time.sleep(0.002)
        cable = Cable(worker.server.port, iter([chance.randrange(500, 8000) for _ in range(num_cuts)]))
        async with cable.plugged_in() as address, AsyncClient(address) as client:
            session = await AsyncStreamSession.open(client)
            received, total, refusals = 0, 0, 0
            while received < num_steps:
                while session.next_step_id - received <= chance.choice((1, 2, 4, 8)):
                    step_id = session.next_step_id
                    kind = chance.random()
                    request = one_token(step_id - 1, VOCAB_SIZE if kind < 0.1 else 7 * step_id % VOCAB_SIZE)
                    request.timeout_ms = 1 if 0.1 < kind < 0.2 else 0
                    await session.send(request)
                try:
                    answer = await session.receive()
                except (InvalidRequestError, CallDeadlineError):
                    refusals += 1
                    assert not session.is_pending
                    assert session.next_step_id == received + 1
                else:
                    received += 1
                    total = (total + 7 * received) % VOCAB_SIZE
                    assert (answer.step_id, answer.sampled_ids.tolist()) == (received, [total])
            session.close()
        executed = worker.engine.executed
        assert executed == list(range(1, len(executed) + 1))
        assert refusals > num_steps / 20


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_refused_steps_and_lost_connections_in_any_order_leave_each_step_executed_once(seed: int) -> None:
    asyncio.run(survive_refusals(num_cuts=6, num_steps=80, seed=seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 14))
def test_many_refused_steps_and_lost_connections_leave_each_step_executed_once(seed: int) -> None:
    asyncio.run(survive_refusals(num_cuts=60, num_steps=600, seed=seed))


@contextmanager
def cut_cable(port: int, lengths: Iterator[int]) -> Iterator[str]:
    """A cable on a thread of its own, for blocking clients."""

    async def run() -> None:
        async with Cable(port, lengths).plugged_in() as address:
            addresses.append(address)
            is_there.set()
            await asyncio.to_thread(is_over.wait)

    addresses: list[str] = []
    is_there, is_over = threading.Event(), threading.Event()
    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert is_there.wait(30)
        yield addresses[0]
    finally:
        is_over.set()
        thread.join()


def test_the_blocking_session_survives_cuts_too() -> None:
    tokens = tokens_of(40)
    with served_in_thread() as worker, cut_cable(worker.server.port, iter([300, 900, 500, 1200, 40, 2500])) as address:
        with Client(address) as client:
            session = StreamSession(client)
            sampled, sent = [], 0
            while len(sampled) < len(tokens):
                while sent < len(tokens) and sent - len(sampled) < 4:
                    session.send(one_token(sent, tokens[sent]))
                    sent += 1
                sampled += session.receive().sampled_ids.tolist()
            session.close()
        assert sampled == sums_of(tokens)
        assert worker.engine.executed == list(range(1, 41))
