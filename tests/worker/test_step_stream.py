"""ExecuteSteps through a real server: order, errors in band, limits, drain, and streams that break or are never read."""

import asyncio
import gc
import json
import random
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import replace

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.errors import FatalEngineError, OverloadedError, PreconditionError, PreconditionReason
from modelworker.worker.server import ExitCode
from modelworker.worker.settings import FencingSettings, ServerSettings, StepSettings, WorkerSettings
from modelworker.worker.statuses import INTERNAL_TEXT
from modelworker_testing.serving import Gate, Running, SumEngine, async_test, running_server, status_details, step_request
from modelworker_testing.slowness import slowness

PATIENCE_SECONDS = 30
EXECUTE_STEPS = "/modelworker.v1.ModelWorker/ExecuteSteps"


class Stream:
    """A client's end of a stream."""

    def __init__(self, running: Running) -> None:
        self.call = running.channel.stream_stream(EXECUTE_STEPS, None, pb.ExecuteStepsResponse.FromString)()

    async def send(self, *requests: pb.ExecuteStepRequest | bytes) -> None:
        for request in requests:
            await self.call.write(request if isinstance(request, bytes) else request.SerializeToString())

    async def receive(self) -> pb.ExecuteStepsResponse:
        answer = await asyncio.wait_for(self.call.read(), PATIENCE_SECONDS)
        assert isinstance(answer, pb.ExecuteStepsResponse), f"the stream has ended: {await self.call.code()}"
        return answer

    async def receive_all(self, number: int) -> list[pb.ExecuteStepsResponse]:
        return [await self.receive() for _ in range(number)]

    async def exchange(self, request: pb.ExecuteStepRequest | bytes) -> pb.ExecuteStepsResponse:
        await self.send(request)
        return await self.receive()

    async def assert_ended(self) -> None:
        assert await asyncio.wait_for(self.call.read(), PATIENCE_SECONDS) is grpc.aio.EOF
        assert await self.call.code() is grpc.StatusCode.OK


def sequenced(running: Running, step_id: int, tokens: list[int] | None = None, **fields: object) -> pb.ExecuteStepRequest:
    epoch = running.server.executor.state().worker_epoch
    return step_request(tokens, **{"worker_epoch": epoch, "router_id": 7, "step_id": step_id} | fields)


async def wait_for(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


def count(running: Running, key: str) -> int:
    return running.server.counters.snapshot().get(key, 0)


def code(answer: pb.ExecuteStepsResponse) -> str:
    """The status of an answer, and the reason where it has one."""
    if answer.WhichOneof("result") == "ok":
        return "OK"
    name = next(each.name for each in grpc.StatusCode if each.value[0] == answer.error.code)
    info = error_details_pb2.ErrorInfo()
    reasons = [info.reason for detail in answer.error.details if detail.Unpack(info)]
    return " ".join([name, *reasons])


# -- order ---------------------------------------------------------------------------------------------------------------------


@async_test
async def test_steps_are_queued_while_the_first_one_runs_and_answered_in_their_order() -> None:
    async with running_server() as running:
        gate = running.engine.before_step = Gate()
        stream = Stream(running)
        await stream.send(*(sequenced(running, number, [number], client_tag=100 + number) for number in range(1, 11)))
        await gate.wait_entered()
        await wait_for(lambda: running.server.executor.num_steps_in_flight == 10)
        gate.open()
        answers = await stream.receive_all(10)
        assert [(answer.step_id, answer.client_tag) for answer in answers] == [(number, 100 + number) for number in range(1, 11)]
        assert [list(answer.ok.sampled_ids) for answer in answers] == [[number] for number in range(1, 11)]
        assert all(answer.ok.step_id == answer.step_id and answer.ok.client_tag == answer.client_tag for answer in answers)
        assert running.engine.executed == list(range(1, 11))
        assert count(running, 'stream_steps_total{code="OK"}') == 10


@async_test
async def test_two_streams_and_single_calls_share_one_order_of_steps() -> None:
    async with running_server() as running:
        gate = running.engine.before_step = Gate()
        first, second = Stream(running), Stream(running)
        calls: list[Awaitable[pb.ExecuteStepResponse]] = []
        executor = running.server.executor
        for step_id in range(1, 13):
            request = sequenced(running, step_id, [step_id])
            if step_id % 3 == 0:
                calls.append(asyncio.ensure_future(running.stub.ExecuteStep(request)))
            else:
                await (first, second)[step_id % 3 - 1].send(request)
            await wait_for(lambda step_id=step_id: executor.num_steps_in_flight == step_id)
        gate.open()
        assert [answer.step_id for answer in await first.receive_all(4)] == [1, 4, 7, 10]
        assert [answer.step_id for answer in await second.receive_all(4)] == [2, 5, 8, 11]
        assert [answer.step_id for answer in await asyncio.gather(*calls)] == [3, 6, 9, 12]
        assert running.engine.executed == list(range(1, 13))


@async_test
async def test_a_step_sent_on_a_stream_and_in_a_call_is_executed_once_and_answered_alike_on_both() -> None:
    async with running_server() as running:
        gate = running.engine.before_step = Gate()
        stream = Stream(running)
        await stream.send(sequenced(running, 1, client_tag=3))
        await gate.wait_entered()
        joined = asyncio.ensure_future(running.stub.ExecuteStep(sequenced(running, 1, client_tag=4)))
        await wait_for(lambda: count(running, "steps_joined_total") == 1)
        gate.open()
        streamed, called = (await stream.receive()).ok, await joined
        assert (streamed.client_tag, called.client_tag) == (3, 4)
        streamed.client_tag = 4
        assert streamed == called
        replayed = (await stream.exchange(sequenced(running, 1, client_tag=4))).ok
        assert replayed == called
        assert running.engine.executed == [1]


@async_test
async def test_half_close_is_followed_by_all_answers_and_the_end() -> None:
    async with running_server() as running:
        gate = running.engine.before_step = Gate()
        stream = Stream(running)
        await stream.send(*(step_request([number]) for number in range(5)))
        await stream.call.done_writing()
        await gate.wait_entered()
        gate.open()
        assert [list(answer.ok.sampled_ids) for answer in await stream.receive_all(5)] == [[number] for number in range(5)]
        await stream.assert_ended()
        assert count(running, 'rpcs_total{code="OK",method="ExecuteSteps"}') == 1


@async_test
async def test_a_stream_without_steps_ends_when_the_client_does() -> None:
    async with running_server() as running:
        stream = Stream(running)
        await stream.call.done_writing()
        await stream.assert_ended()


# -- limits --------------------------------------------------------------------------------------------------------------------


@async_test
async def test_items_over_the_limit_are_refused_in_their_turn() -> None:
    async with running_server(WorkerSettings(fencing=FencingSettings(max_steps_in_flight=2))) as running:
        gate = running.engine.before_step = Gate()
        stream = Stream(running)
        await stream.send(*(step_request([number], client_tag=number) for number in range(1, 5)))
        await gate.wait_entered()
        await wait_for(lambda: count(running, 'stream_steps_total{code="RESOURCE_EXHAUSTED"}') == 2)
        reading = asyncio.ensure_future(stream.receive())
        await asyncio.sleep(0.05)
        assert not reading.done()
        gate.open()
        answers = [await reading, *await stream.receive_all(3)]
        assert [(answer.client_tag, code(answer)) for answer in answers] == [
            (1, "OK"),
            (2, "OK"),
            (3, "RESOURCE_EXHAUSTED"),
            (4, "RESOURCE_EXHAUSTED"),
        ]
        retry = error_details_pb2.RetryInfo()
        assert answers[2].error.details[0].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() > 0
        assert code(await stream.exchange(step_request())) == "OK"


@async_test
async def test_a_sequenced_step_behind_a_refused_one_is_out_of_order_and_both_can_be_sent_again() -> None:
    async with running_server(WorkerSettings(fencing=FencingSettings(max_steps_in_flight=1))) as running:
        gate = running.engine.before_step = Gate()
        stream = Stream(running)
        await stream.send(*(sequenced(running, step_id) for step_id in (1, 2)))
        await gate.wait_entered()
        await wait_for(lambda: count(running, 'stream_steps_total{code="RESOURCE_EXHAUSTED"}') == 1)
        gate.open()
        assert [code(answer) for answer in await stream.receive_all(2)] == ["OK", "RESOURCE_EXHAUSTED"]
        assert code(await stream.exchange(sequenced(running, 3))) == "FAILED_PRECONDITION STEP_OUT_OF_ORDER"
        for step_id in (2, 3):
            assert code(await stream.exchange(sequenced(running, step_id))) == "OK"
        assert running.engine.executed == [1, 2, 3]


def large_step(**fields: object) -> pb.ExecuteStepRequest:
    """One token with a table of 19,000 blocks: 76 KB."""
    return step_request([1], block_counts=[19_000], block_ids=list(range(1, 19_001)), **fields)


@async_test
async def test_a_client_that_never_reads_is_held_up_while_others_are_served(capfd: pytest.CaptureFixture[str]) -> None:
    settings = WorkerSettings(fencing=FencingSettings(max_steps_in_flight=4), step=StepSettings(max_sequences=64))
    many_answers = step_request(
        [1] * 64, query_lens=[1] * 64, context_lens=[0] * 64, block_counts=[1] * 64, block_ids=list(range(1, 65))
    )
    # Else the client's end takes in megabytes of answers by itself.
    small_window = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535))
    async with running_server(settings, channel_options=small_window) as running:
        stream = Stream(running)
        num_sent = 0

        async def flood() -> None:
            nonlocal num_sent
            while True:
                await stream.send(many_answers, large_step())
                num_sent += 2

        flooding = asyncio.ensure_future(flood())
        before, num_looks = -1, 0
        while num_looks < 4:  # Until nothing moves any more.
            num_looks = num_looks + 1 if num_sent == before else 0
            before = num_sent
            await asyncio.sleep(0.1 * slowness())
        outcomes = [count(running, f'stream_steps_total{{code="{name}"}}') for name in ("OK", "RESOURCE_EXHAUSTED")]
        assert 8 <= sum(outcomes) < min(2000, num_sent)
        assert list((await running.stub.ExecuteStep(step_request())).sampled_ids) == [6]
        flooding.cancel()
        await asyncio.gather(flooding, return_exceptions=True)
        stream.call.cancel()
        await wait_for(lambda: count(running, 'rpcs_total{code="CANCELLED",method="ExecuteSteps"}') == 1)
        await wait_for(lambda: running.server.executor.num_steps_in_flight == 0)
    assert "call failed" not in capfd.readouterr().err


@async_test
async def test_steps_of_a_stream_take_room_like_calls_until_they_have_an_outcome_read_or_not() -> None:
    async with running_server(WorkerSettings(server=ServerSettings(max_message_size=80_000))) as running:
        gate = running.engine.before_step = Gate()
        stream = Stream(running)
        await stream.send(*(large_step(client_tag=2**64 - tag) for tag in range(1, 6)))
        await wait_for(lambda: count(running, 'stream_steps_total{code="RESOURCE_EXHAUSTED"}') == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.ExecuteStep(large_step())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        gate.open()
        await wait_for(lambda: running.server.executor.num_steps_in_flight == 0)
        await asyncio.sleep(0.01)  # One turn of the loop, in which the outcomes reach the stream.
        await asyncio.gather(*(running.stub.ExecuteStep(large_step()) for _ in range(4)))
        answers = await stream.receive_all(5)
        assert [code(answer) for answer in answers] == ["OK"] * 4 + ["RESOURCE_EXHAUSTED"]
        assert [answer.client_tag for answer in answers] == [2**64 - tag for tag in range(1, 6)]
        assert answers[4].error.message.endswith(" bytes of requests are there at once, the limit is 320000")


# -- errors in band ------------------------------------------------------------------------------------------------------------

BAD_ITEMS: dict[str, Callable[[Running], pb.ExecuteStepRequest | bytes]] = {
    "INVALID_ARGUMENT": lambda running: step_request([1, 5000, 2], block_ids=[0], client_tag=5),
    "INVALID_ARGUMENT no message": lambda running: b"\xff\xff\xff",
    "INVALID_ARGUMENT too large": lambda running: b"\x52\x80\x80\x80\x02" + bytes(4 * 2**20),
    "INVALID_ARGUMENT too large, with numbers": lambda running: step_request([1] * 10**6, step_id=2, client_tag=5),
    "INVALID_ARGUMENT not built": lambda running: step_request([1], lora_index=[0]),
    "INVALID_ARGUMENT no epoch": lambda running: step_request([1], step_id=1),
    "FAILED_PRECONDITION KV_CACHE_LOST": lambda running: step_request(worker_epoch=5, router_id=7, step_id=2),
    "FAILED_PRECONDITION STEP_OUT_OF_ORDER": lambda running: sequenced(running, 3),
    "FAILED_PRECONDITION WORKER_OWNED": lambda running: sequenced(running, 2, router_id=8),
    "FAILED_PRECONDITION unsequenced": lambda running: step_request(),
    "ALREADY_EXISTS": lambda running: sequenced(running, 1, [4]),
}


@pytest.mark.parametrize("name", BAD_ITEMS)
@async_test
async def test_a_refused_item_gets_the_status_and_details_of_a_refused_call_and_the_stream_goes_on(name: str) -> None:
    async with running_server() as running:
        stream = Stream(running)
        assert code(await stream.exchange(sequenced(running, 1))) == "OK"
        item = BAD_ITEMS[name](running)
        answer = await stream.exchange(item)
        assert code(answer).split()[0] == name.split(maxsplit=1)[0]
        call = running.channel.unary_unary("/modelworker.v1.ModelWorker/ExecuteStep")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(item if isinstance(item, bytes) else item.SerializeToString())
        in_band, of_call = status_pb2.Status.FromString(answer.error.SerializeToString()), status_details(caught.value)
        _forget_the_clock(in_band, of_call)
        assert in_band == of_call
        if not isinstance(item, bytes):
            assert (answer.step_id, answer.client_tag) == (item.step_id, item.client_tag)
        assert code(await stream.exchange(sequenced(running, 2))) == "OK"
        assert running.engine.executed == [1, 2]
        assert count(running, f'stream_steps_total{{code="{name.split(maxsplit=1)[0]}"}}') == 1


def _forget_the_clock(*statuses: status_pb2.Status) -> None:
    """Takes out the milliseconds until a lease expires."""
    for status in statuses:
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info):
                info.metadata.pop("expires_in_ms", None)
                detail.Pack(info)


@async_test
async def test_an_unsequenced_item_is_refused_where_fencing_is_required() -> None:
    async with running_server(WorkerSettings(fencing=FencingSettings(require_fencing=True))) as running:
        stream = Stream(running)
        assert code(await stream.exchange(step_request())) == "FAILED_PRECONDITION FENCING_REQUIRED"
        assert code(await stream.exchange(sequenced(running, 1))) == "OK"


@async_test
async def test_the_timeout_of_an_item_holds_in_the_queue_and_for_no_other_item() -> None:
    async with running_server() as running:
        gate = running.engine.before_step = Gate()
        stream = Stream(running)
        await stream.send(step_request([1]), step_request([2], timeout_ms=50), step_request([3], timeout_ms=60_000))
        await gate.wait_entered()
        await wait_for(lambda: count(running, 'steps_dropped_total{reason="late"}') == 1)
        gate.open()
        answers = await stream.receive_all(3)
        assert [code(answer) for answer in answers] == ["OK", "DEADLINE_EXCEEDED", "OK"]
        assert [list(answer.ok.sampled_ids) for answer in answers] == [[1], [], [3]]


@async_test
async def test_the_streams_own_deadline_ends_it_and_withdraws_what_is_queued() -> None:
    async with running_server() as running:
        gate = running.engine.before_step = Gate()
        call = running.channel.stream_stream(EXECUTE_STEPS, None, pb.ExecuteStepsResponse.FromString)(timeout=1.0)
        for _ in range(3):
            await call.write(step_request().SerializeToString())
        await gate.wait_entered()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await wait_for(lambda: running.server.executor.num_queued == 0)
        gate.open()
        await wait_for(lambda: running.server.executor.num_steps_in_flight == 0)
        assert len(running.engine.executed) == 1


@async_test
async def test_a_step_behind_a_cancelled_call_is_cancelled_in_band() -> None:
    async with running_server() as running:
        gate = running.engine.before_step = Gate()
        stream = Stream(running)
        await stream.send(sequenced(running, 1))
        await gate.wait_entered()
        call = running.stub.ExecuteStep(sequenced(running, 2))
        await wait_for(lambda: running.server.executor.num_steps_in_flight == 2)
        await stream.send(sequenced(running, 3))
        await wait_for(lambda: running.server.executor.num_steps_in_flight == 3)
        call.cancel()
        await wait_for(lambda: running.server.executor.num_steps_in_flight == 1)
        gate.open()
        assert [code(answer) for answer in await stream.receive_all(2)] == ["OK", "CANCELLED"]
        assert code(await stream.exchange(sequenced(running, 2))) == "OK"
        assert running.engine.executed == [1, 2]


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (PreconditionError(PreconditionReason.FEEDBACK_MISMATCH, "no token"), "FAILED_PRECONDITION FEEDBACK_MISMATCH"),
        (OverloadedError("full", retry_after_ms=5), "RESOURCE_EXHAUSTED"),
    ],
)
@async_test
async def test_a_refusal_of_the_engine_is_in_band_and_takes_the_steps_behind_it_along(refusal: Exception, expected: str) -> None:
    async with running_server() as running:
        gate = Gate()

        def refuse_the_second(batch: object) -> None:
            gate(None)
            if batch.step_id == 2 and refusals:
                raise refusals.pop()

        refusals = [refusal]
        running.engine.before_step = refuse_the_second
        stream = Stream(running)
        await stream.send(*(sequenced(running, step_id) for step_id in (1, 2, 3)))
        await wait_for(lambda: running.server.executor.num_steps_in_flight == 3)
        gate.open()
        assert [code(answer) for answer in await stream.receive_all(3)] == ["OK", expected, expected]
        for step_id in (2, 3):
            assert code(await stream.exchange(sequenced(running, step_id))) == "OK"
        assert running.engine.executed == [1, 2, 3]


@async_test
async def test_an_engine_fault_is_internal_in_band_ends_the_epoch_and_not_the_stream(capfd: pytest.CaptureFixture[str]) -> None:
    async with running_server() as running:
        gate = Gate()

        def fail(batch: object) -> None:
            gate(None)
            raise RuntimeError("secret of the engine")

        running.engine.before_step = fail
        stream = Stream(running)
        await stream.send(sequenced(running, 1), sequenced(running, 2))
        await wait_for(lambda: running.server.executor.num_steps_in_flight == 2)
        gate.open()
        answers = await stream.receive_all(2)
        assert [code(answer) for answer in answers] == ["INTERNAL", "FAILED_PRECONDITION KV_CACHE_LOST"]
        assert "secret" not in answers[0].error.message
        running.engine.before_step = lambda batch: None
        assert code(await stream.exchange(sequenced(running, 1))) == "OK"
    assert "secret of the engine" in capfd.readouterr().err


@async_test
async def test_a_device_fault_answers_what_is_in_flight_and_ends_stream_and_worker() -> None:
    async with running_server() as running:
        gate = Gate()

        def die(batch: object) -> None:
            gate(None)
            raise FatalEngineError("the device is gone")

        running.engine.before_step = die
        stream = Stream(running)
        await stream.send(step_request(), step_request())
        await wait_for(lambda: running.server.executor.num_steps_in_flight == 2)
        gate.open()
        assert [code(answer) for answer in await stream.receive_all(2)] == ["INTERNAL", "UNAVAILABLE"]
        await stream.assert_ended()
        assert await running.task is ExitCode.ENGINE_FAULT


class DescriptionFails(SumEngine):
    """Fails where nobody expects it: while a step is parsed."""

    error: Exception | None = None

    @property
    def description(self):
        if self.error is not None:
            raise self.error
        return self._description

    @description.setter
    def description(self, value):
        self._description = value


@async_test
async def test_anything_unknown_is_internal_in_band_with_a_fixed_text(capfd: pytest.CaptureFixture[str]) -> None:
    engine = DescriptionFails(WorkerSettings())
    async with running_server(build=lambda *_: engine) as running:
        stream = Stream(running)
        assert code(await stream.exchange(step_request())) == "OK"
        engine.error = ZeroDivisionError("secret of the servicer")
        answer = await stream.exchange(step_request())
        assert (code(answer), answer.error.message) == ("INTERNAL", INTERNAL_TEXT)
        engine.error = None
        assert code(await stream.exchange(step_request())) == "OK"
    assert "secret of the servicer" in capfd.readouterr().err


@async_test
async def test_random_and_cut_off_items_are_each_answered_in_their_turn_and_the_stream_lives() -> None:
    chance = random.Random(11)
    good = step_request([1, 2, 3], client_tag=9).SerializeToString()

    def spoiled() -> bytes:
        match chance.randrange(4):
            case 0:
                return chance.randbytes(chance.randrange(200))
            case 1:
                return good[: chance.randrange(1, len(good))]
            case 2:
                at = chance.randrange(len(good))
                return good[:at] + chance.randbytes(1) + good[at + 1 :]
            case _:
                return good + chance.randbytes(chance.randrange(1, 50))

    # Of the spoiled items some are steps, too: all may be in flight at once.
    settings = WorkerSettings(server=ServerSettings(log_level="error"), fencing=FencingSettings(max_steps_in_flight=600))
    async with running_server(settings) as running:
        stream = Stream(running)
        items = [item for _ in range(300) for item in (spoiled(), good)]

        async def send() -> None:
            await stream.send(*items)

        sending = asyncio.ensure_future(send())
        answers = await stream.receive_all(len(items))
        await sending
        good_ones = [(code(answer), answer.client_tag, list(answer.ok.sampled_ids)) for answer in answers[1::2]]
        assert good_ones == [("OK", 9, [6])] * 300
        assert {code(answer) for answer in answers[::2]} <= {"OK", "INVALID_ARGUMENT", "FAILED_PRECONDITION KV_CACHE_LOST"}
        assert sum(code(answer) == "INVALID_ARGUMENT" for answer in answers[::2]) > 200


@async_test
async def test_an_item_over_the_message_limit_ends_the_stream_and_what_it_had_queued() -> None:
    async with running_server(WorkerSettings(server=ServerSettings(max_message_size=80_000))) as running:
        gate = running.engine.before_step = Gate()
        stream = Stream(running)
        await stream.send(sequenced(running, 1), sequenced(running, 2))
        await wait_for(lambda: running.server.executor.num_steps_in_flight == 2)
        await stream.send(bytes(90_000))
        await wait_for(lambda: running.server.executor.num_queued == 0)
        gate.open()
        assert await stream.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        again = Stream(running)
        assert [code(await again.exchange(sequenced(running, step_id))) for step_id in (1, 2)] == ["OK", "OK"]
        assert running.engine.executed == [1, 2]


@async_test
async def test_refused_items_leave_nothing_behind_for_the_garbage_collector() -> None:
    async with running_server(WorkerSettings(server=ServerSettings(log_level="error"))) as running:
        stream = Stream(running)
        bad = step_request([-5], block_counts=[25_000], block_ids=list(range(1, 25_001)))
        assert code(await stream.exchange(bad)) == "INVALID_ARGUMENT"
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(50):
                await stream.exchange(bad)
            left = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            gc.enable()
        assert left < 10 * bad.ByteSize()


# -- logs ----------------------------------------------------------------------------------------------------------------------


@async_test
async def test_log_lines_of_each_item_carry_its_own_step_tag_and_trace(capfd: pytest.CaptureFixture[str]) -> None:
    settings = WorkerSettings()
    settings = replace(settings, server=replace(settings.server, log_level="debug"))
    traces = [f"{number:032x}" for number in (1, 2, 3)]
    async with running_server(settings) as running:
        gate = running.engine.before_step = Gate()
        stream = Stream(running)
        for number, trace in enumerate(traces):
            tokens = [-5] if number == 1 else [number]
            await stream.send(step_request(tokens, client_tag=number, traceparent=f"00-{trace}-b7ad6b7169203331-01"))
        await stream.send(step_request([1], client_tag=3, traceparent="nonsense"))
        await gate.wait_entered()
        gate.open()
        await stream.receive_all(4)
        assert count(running, "trace_contexts_ignored_total") == 1
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    steps = [line for line in lines if line["event"] in ("step executed", "call refused")]
    assert {(line["event"], line["client_tag"], line.get("trace_id")) for line in steps} == {
        ("step executed", 0, traces[0]),
        ("call refused", 1, traces[1]),
        ("step executed", 2, traces[2]),
        ("step executed", 3, None),
    }
    assert {line["method"] for line in steps} == {"ExecuteSteps"}


# -- the worker's life ---------------------------------------------------------------------------------------------------------


@async_test
async def test_a_stream_to_a_worker_that_starts_is_unavailable_as_a_whole() -> None:
    gate = Gate()

    def build(settings: WorkerSettings, *_: object) -> SumEngine:
        gate(None)
        return SumEngine(settings)

    async with running_server(build=build, wait_ready=False) as running:
        stream = Stream(running)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.exchange(step_request())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert status_details(caught.value).message.startswith("starting")
        gate.open()
        await running.server.ready.wait()
        assert code(await Stream(running).exchange(step_request())) == "OK"


@async_test
async def test_on_drain_accepted_steps_and_replays_are_answered_new_ones_refused_and_the_stream_ended() -> None:
    async with running_server() as running:
        stream, idle = Stream(running), Stream(running)
        assert code(await idle.exchange(sequenced(running, 1))) == "OK"
        gate = running.engine.before_step = Gate()
        await stream.send(sequenced(running, 2), sequenced(running, 3))
        await wait_for(lambda: running.server.executor.num_steps_in_flight == 2)
        running.server.request_stop()
        await stream.send(sequenced(running, 4), sequenced(running, 1), sequenced(running, 3))
        late = Stream(running)
        assert code(await late.exchange(sequenced(running, 1))) == "OK"
        assert code(await idle.exchange(sequenced(running, 4))) == "UNAVAILABLE"
        gate.open()
        answers = await stream.receive_all(5)
        assert [(answer.step_id, code(answer)) for answer in answers] == [
            (2, "OK"),
            (3, "OK"),
            (4, "UNAVAILABLE"),
            (1, "OK"),
            (3, "OK"),
        ]
        for each in (stream, idle, late):
            await each.assert_ended()
        assert await running.task is ExitCode.OK
        assert running.engine.executed == [1, 2, 3]


@async_test
async def test_a_cancelled_stream_withdraws_queued_steps_and_keeps_the_answer_of_the_running_one() -> None:
    async with running_server() as running:
        gate = running.engine.before_step = Gate()
        stream = Stream(running)
        await stream.send(*(sequenced(running, step_id, [step_id]) for step_id in (1, 2, 3, 4)))
        await wait_for(lambda: running.server.executor.num_steps_in_flight == 4)
        stream.call.cancel()
        await wait_for(lambda: running.server.executor.num_queued == 0)
        assert running.server.executor.state().next_step_id == 2
        gate.open()
        await wait_for(lambda: running.server.executor.num_steps_in_flight == 0)
        again = Stream(running)
        answers = [await again.exchange(sequenced(running, step_id, [step_id])) for step_id in (1, 2, 3, 4)]
        assert [list(answer.ok.sampled_ids) for answer in answers] == [[1], [2], [3], [4]]
        assert running.engine.executed == [1, 2, 3, 4]
        counters = running.server.counters.snapshot()
        assert counters['stream_steps_total{code="CANCELLED"}'] == 4
        assert counters['rpcs_total{code="CANCELLED",method="ExecuteSteps"}'] == 1
        assert counters["steps_replayed_total"] == 1
        assert "steps_joined_total" not in counters


@async_test
async def test_a_queued_step_that_another_caller_waits_for_outlives_the_stream() -> None:
    async with running_server() as running:
        gate = running.engine.before_step = Gate()
        stream, other = Stream(running), Stream(running)
        await stream.send(sequenced(running, 1), sequenced(running, 2), sequenced(running, 3))
        await wait_for(lambda: running.server.executor.num_steps_in_flight == 3)
        await other.send(sequenced(running, 1), sequenced(running, 2))
        await wait_for(lambda: count(running, "steps_joined_total") == 2)
        stream.call.cancel()
        await wait_for(lambda: running.server.executor.num_queued == 1)
        gate.open()
        assert [code(answer) for answer in await other.receive_all(2)] == ["OK", "OK"]
        assert running.engine.executed == [1, 2]
