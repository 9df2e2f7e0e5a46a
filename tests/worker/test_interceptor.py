"""Every row of the error table, through a real server."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.call import CallContext, RequestRoom
from modelworker.worker.call_log import CallLog
from modelworker.worker.counters import Counters
from modelworker.worker.description import WorkerDescription
from modelworker.worker.errors import InvalidStepError, PreconditionError, PreconditionReason, Violation, WorkerError
from modelworker.worker.interceptor import StatusInterceptor
from modelworker.worker.settings import FencingSettings, WorkerSettings
from modelworker.worker.statuses import INTERNAL_TEXT, code_of, status_of
from modelworker_testing.serving import Gate, Running, SumEngine, async_test, running_server, status_details, step_request

Detail = TypeVar("Detail")

ONE_IN_FLIGHT = WorkerSettings(fencing=FencingSettings(max_steps_in_flight=1))


async def refused(call: Awaitable[object], code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    """Awaits a call that must fail with a code, and with a google.rpc.Status that says the same."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, 30)
    error = caught.value
    assert error.code() is code, error.details()
    status = status_details(error)
    assert (status.code, status.message) == (code.value[0], error.details())
    return error


def detail(error: grpc.aio.AioRpcError, kind: type[Detail]) -> Detail:
    """The only detail of a failed call."""
    (packed,) = status_details(error).details
    message = kind()
    assert packed.Unpack(message)
    return message


async def sequenced(running: Running, step_id: int, tokens: list[int] | None = None, **fields: object) -> pb.ExecuteStepRequest:
    epoch = running.server.executor.state().worker_epoch
    return step_request(tokens, worker_epoch=epoch, router_id=7, step_id=step_id, **fields)


@async_test
async def test_a_malformed_step_is_invalid_argument_with_a_field_violation_for_each_fault():
    async with running_server() as running:
        call = running.stub.ExecuteStep(step_request([1, 5000, 2], block_ids=[0]))
        violations = detail(await refused(call, grpc.StatusCode.INVALID_ARGUMENT), error_details_pb2.BadRequest).field_violations
        assert [violation.field for violation in violations] == ["token_ids[1]", "block_ids[0]"]
        assert "5000" in violations[0].description
        assert running.engine.executed == []


@async_test
async def test_bytes_that_are_no_message_are_invalid_argument():
    async with running_server() as running:
        for method in ("ExecuteStep", "GetWorkerInfo", "ResetKvCache"):
            call = running.channel.unary_unary(f"/modelworker.v1.ModelWorker/{method}")
            error = await refused(call(b"\xff\xff\xff"), grpc.StatusCode.INVALID_ARGUMENT)
            assert detail(error, error_details_pb2.BadRequest).field_violations[0].field == "request"


@async_test
async def test_a_step_of_another_epoch_is_failed_precondition_with_reason_domain_and_the_right_epoch():
    async with running_server() as running:
        call = running.stub.ExecuteStep(step_request(worker_epoch=5, router_id=7, step_id=1))
        info = detail(await refused(call, grpc.StatusCode.FAILED_PRECONDITION), error_details_pb2.ErrorInfo)
        assert (info.reason, info.domain) == ("KV_CACHE_LOST", "modelworker")
        assert info.metadata["worker_epoch"] == str(running.server.executor.state().worker_epoch)


@async_test
async def test_a_step_out_of_order_is_failed_precondition_naming_the_expected_id():
    async with running_server() as running:
        call = running.stub.ExecuteStep(await sequenced(running, 3))
        info = detail(await refused(call, grpc.StatusCode.FAILED_PRECONDITION), error_details_pb2.ErrorInfo)
        assert (info.reason, info.metadata["expected_step_id"]) == ("STEP_OUT_OF_ORDER", "1")


@async_test
async def test_a_step_over_the_in_flight_limit_is_resource_exhausted_with_a_retry_delay():
    async with running_server(ONE_IN_FLIGHT) as running:
        gate = running.engine.before_step = Gate()
        first = asyncio.ensure_future(running.stub.ExecuteStep(step_request()))
        await gate.wait_entered()
        error = await refused(running.stub.ExecuteStep(step_request()), grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert detail(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
        gate.open()
        assert list((await first).sampled_ids) == [6]


@async_test
async def test_calls_while_starting_are_unavailable_and_say_the_stage():
    gate = Gate()

    def build(settings, progress, counters):
        with progress.stage("loading weights", 100, "tensors") as advance:
            advance(43)
            gate(None)
        return SumEngine(settings)

    async with running_server(build=build, wait_ready=False) as running:
        await gate.wait_entered()
        for call in (
            running.stub.GetWorkerInfo(pb.GetWorkerInfoRequest()),
            running.stub.ExecuteStep(step_request()),
            running.stub.ResetKvCache(pb.ResetKvCacheRequest(worker_epoch=1)),
        ):
            error = await refused(call, grpc.StatusCode.UNAVAILABLE)
            assert error.details() == "starting: loading weights 43 %"
            assert detail(error, error_details_pb2.RetryInfo).retry_delay.seconds == 1
        gate.open()
        await running.server.ready.wait()
        assert list((await running.stub.ExecuteStep(step_request())).sampled_ids) == [6]


@async_test
async def test_new_steps_while_draining_are_unavailable_while_replays_and_worker_info_are_answered():
    async with running_server() as running:
        first = await sequenced(running, 1)
        answer = await running.stub.ExecuteStep(first)
        gate = running.engine.before_step = Gate()
        second = asyncio.ensure_future(running.stub.ExecuteStep(await sequenced(running, 2)))
        await gate.wait_entered()
        running.server.request_stop()
        await refused(running.stub.ExecuteStep(await sequenced(running, 3)), grpc.StatusCode.UNAVAILABLE)
        assert await running.stub.ExecuteStep(first) == answer
        assert (await running.stub.GetWorkerInfo(pb.GetWorkerInfoRequest())).model.name == "sum"
        gate.open()
        assert list((await second).sampled_ids) == [6]


@async_test
async def test_a_step_id_with_other_content_already_exists():
    async with running_server() as running:
        await running.stub.ExecuteStep(await sequenced(running, 1))
        await refused(running.stub.ExecuteStep(await sequenced(running, 1, [4])), grpc.StatusCode.ALREADY_EXISTS)
        assert running.engine.executed == [1]


@async_test
async def test_a_step_whose_deadline_passes_in_the_queue_is_deadline_exceeded_and_not_executed():
    async with running_server() as running:
        gate = running.engine.before_step = Gate()
        first = asyncio.ensure_future(running.stub.ExecuteStep(step_request()))
        await gate.wait_entered()
        late = running.stub.ExecuteStep(step_request(timeout_ms=50))
        await refused(late, grpc.StatusCode.DEADLINE_EXCEEDED)
        gate.open()
        await first
        assert running.engine.executed == [0]


@async_test
async def test_the_deadline_of_the_rpc_itself_holds_in_the_queue():
    async with running_server() as running:
        gate = running.engine.before_step = Gate()
        first = asyncio.ensure_future(running.stub.ExecuteStep(step_request()))
        await gate.wait_entered()
        second = asyncio.ensure_future(running.stub.ExecuteStep(step_request([9]), timeout=1.0))
        while running.server.executor.num_steps_in_flight < 2:
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await second
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        while running.server.executor.num_steps_in_flight > 1:
            await asyncio.sleep(0.01)
        gate.open()
        await first
        assert len(running.engine.executed) == 1


@async_test
async def test_steps_behind_a_cancelled_one_are_answered_as_cancelled_and_not_executed():
    async with running_server() as running:
        gate = running.engine.before_step = Gate()
        first = asyncio.ensure_future(running.stub.ExecuteStep(await sequenced(running, 1)))
        await gate.wait_entered()
        second = running.stub.ExecuteStep(await sequenced(running, 2))
        while running.server.executor.num_steps_in_flight < 2:
            await asyncio.sleep(0.01)
        third = asyncio.ensure_future(running.stub.ExecuteStep(await sequenced(running, 3)))
        while running.server.executor.num_steps_in_flight < 3:
            await asyncio.sleep(0.01)
        second.cancel()
        await refused(third, grpc.StatusCode.CANCELLED)
        gate.open()
        await first
        assert running.engine.executed == [1]
        counters = running.server.counters.snapshot()
        assert counters['rpcs_total{code="CANCELLED",method="ExecuteStep"}'] == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda stub: stub.ImportKvBlocks(iter([pb.ImportKvBlocksRequest()])),
        lambda stub: aiter_to_list(stub.ExportKvBlocks(pb.ExportKvBlocksRequest())),
    ],
    ids=["ImportKvBlocks", "ExportKvBlocks"],
)
@async_test
async def test_an_rpc_that_is_not_built_is_unimplemented_and_says_what_to_do_instead(call: Callable[[object], Awaitable[object]]):
    async with running_server() as running:
        error = await refused(call(running.stub), grpc.StatusCode.UNIMPLEMENTED)
        assert "is not implemented by this worker: " in error.details()


async def aiter_to_list(answers):
    return [answer async for answer in answers]


@async_test
async def test_an_engine_fault_is_internal_without_its_text_and_starts_a_new_epoch(capfd: pytest.CaptureFixture[str]):
    async with running_server() as running:
        epoch = running.server.executor.state().worker_epoch

        def fail(batch):
            raise RuntimeError("secret of the engine")

        running.engine.before_step = fail
        error = await refused(running.stub.ExecuteStep(step_request()), grpc.StatusCode.INTERNAL)
        assert "secret" not in error.details()
        running.engine.before_step = lambda batch: None
        answer = await running.stub.ExecuteStep(step_request())
        assert answer.worker_epoch != epoch
    assert "secret of the engine" in capfd.readouterr().err


class DescriptionFails(SumEngine):
    """Fails where nobody expects it: in the servicer."""

    error: Exception | None = None

    @property
    def description(self) -> WorkerDescription:
        if self.error is not None:
            raise self.error
        return self._description

    @description.setter
    def description(self, value: WorkerDescription) -> None:
        self._description = value


@async_test
async def test_anything_unknown_is_internal_with_a_fixed_text_and_its_details_only_in_the_log(capfd: pytest.CaptureFixture[str]):
    engine = DescriptionFails(WorkerSettings())
    async with running_server(build=lambda *_: engine) as running:
        engine.error = ZeroDivisionError("secret of the servicer")
        for call in (running.stub.GetWorkerInfo(pb.GetWorkerInfoRequest()), running.stub.ExecuteStep(step_request())):
            error = await refused(call, grpc.StatusCode.INTERNAL)
            assert error.details() == INTERNAL_TEXT
            assert not status_details(error).details
        engine.error = None
    assert "secret of the servicer" in capfd.readouterr().err


@async_test
async def test_a_refusal_that_is_too_long_for_trailing_metadata_still_arrives_with_its_first_violations():
    engine = DescriptionFails(WorkerSettings())
    async with running_server(build=lambda *_: engine) as running:
        engine.error = InvalidStepError([Violation(f"history.token_ids[{i}]", "ü" * 2000) for i in range(16)])
        error = await refused(running.stub.ExecuteStep(step_request()), grpc.StatusCode.INVALID_ARGUMENT)
        violations = detail(error, error_details_pb2.BadRequest).field_violations
        assert [violation.field for violation in violations] == [f"history.token_ids[{i}]" for i in range(len(violations))]
        assert len(violations) >= 5
        engine.error = PreconditionError(PreconditionReason.STEP_OUT_OF_ORDER, "ü" * 5000, expected_step_id=3)
        error = await refused(running.stub.ExecuteStep(step_request()), grpc.StatusCode.FAILED_PRECONDITION)
        assert detail(error, error_details_pb2.ErrorInfo).metadata["expected_step_id"] == "3"
        engine.error = None


@given(st.lists(st.builds(Violation, st.text(max_size=2000), st.text(max_size=2000)), min_size=1, max_size=16))
def test_a_status_always_fits_into_eight_kibibytes_of_metadata(violations: list[Violation]):
    status = status_of(InvalidStepError(violations))
    encoded_message = sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in status.message.encode())
    assert encoded_message + -(-len(status.SerializeToString()) // 3) * 4 < 8000
    assert isinstance(status, status_pb2.Status)


def test_every_worker_error_has_a_row_in_the_table():
    def kinds(kind: type[WorkerError]) -> list[type[WorkerError]]:
        return [kind, *(leaf for child in kind.__subclasses__() for leaf in kinds(child))]

    for kind in kinds(WorkerError)[1:]:
        error = kind.__new__(kind)
        assert code_of(error) is not grpc.StatusCode.INTERNAL or kind.__name__ == "EngineFaultError", kind


@async_test
async def test_log_lines_of_a_call_carry_step_epoch_tag_and_trace_but_no_token_ids(capfd: pytest.CaptureFixture[str]):
    trace = "0af7651916cd43dd8448eb211c80319c"
    async with running_server() as running:
        request = step_request(
            [987654], worker_epoch=3, router_id=1, step_id=12, client_tag=34, traceparent=f"00-{trace}-b7ad6b7169203331-01"
        )
        await refused(running.stub.ExecuteStep(request), grpc.StatusCode.INVALID_ARGUMENT)
        metadata = (("traceparent", f"00-{trace[::-1]}-b7ad6b7169203331-01"),)
        await refused(running.stub.ExecuteStep(step_request([-5]), metadata=metadata), grpc.StatusCode.INVALID_ARGUMENT)
    log = capfd.readouterr().err
    first, second = (line for line in log.splitlines() if "call refused" in line)
    for part in (
        '"step_id": 12',
        '"epoch": 3',
        '"client_tag": 34',
        f'"trace_id": "{trace}"',
        '"method": "ExecuteStep"',
        "token_ids[0]",
    ):
        assert part in first
    assert f'"trace_id": "{trace[::-1]}"' in second
    assert "987654" not in log


@async_test
async def test_each_step_is_one_debug_line_with_its_timings(capfd: pytest.CaptureFixture[str]):
    settings = WorkerSettings()
    settings = replace(settings, server=replace(settings.server, log_level="debug"))
    async with running_server(settings) as running:
        await running.stub.ExecuteStep(step_request([1, 2, 3], client_tag=5))
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "step executed" in line)
    for part in ('"num_tokens": 3', '"num_sequences": 1', '"queue_ms": ', '"forward_ms": ', '"client_tag": 5', '"level": "debug"'):
        assert part in line


@async_test
async def test_a_call_arrives_before_its_request_is_parsed_and_its_handler_gets_the_bytes():
    seen = []

    def parse_slowly(raw: bytes) -> bytes:
        time.sleep(0.05)
        return raw[::-1]

    async def answer(request: bytes, context: CallContext) -> bytes:
        seen.append((request, context.raw, time.monotonic_ns() - context.arrival_ns, context.time_remaining()))
        return b"answer"

    interceptor = StatusInterceptor(CallLog(Counters()), check_size=lambda method, raw: None, room=RequestRoom(100))
    server = grpc.aio.server(interceptors=[interceptor])
    handlers = {"Call": grpc.unary_unary_rpc_method_handler(answer, request_deserializer=parse_slowly)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert await channel.unary_unary("/test/Call")(b"abc", timeout=30) == b"answer"
    finally:
        await server.stop(None)
    ((request, raw, age_ns, remaining_seconds),) = seen
    assert (request, raw) == (b"cba", b"abc")
    assert age_ns >= 50_000_000
    assert 0 < remaining_seconds < 31


@async_test
async def test_a_trace_context_that_can_not_be_parsed_is_counted_and_the_step_runs(capfd: pytest.CaptureFixture[str]):
    trace = "0af7651916cd43dd8448eb211c80319c"
    settings = WorkerSettings()
    settings = replace(settings, server=replace(settings.server, log_level="debug"))
    async with running_server(settings) as running:
        for traceparent in ("nonsense", "x" * 10_000, f"01-{trace}-b7ad6b7169203331-01-and more", ""):
            await running.stub.ExecuteStep(step_request([1], traceparent=traceparent), metadata=(("traceparent", "no trace"),))
        assert running.server.counters.snapshot()["trace_contexts_ignored_total"] == 6
    lines = [line for line in capfd.readouterr().err.splitlines() if "step executed" in line]
    assert len(lines) == 4
    assert [f'"trace_id": "{trace}"' in line for line in lines] == [False, False, True, False]
