"""Health under its four names, through a real server, over the life of a worker."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from modelworker.worker.errors import FatalEngineError
from modelworker.worker.server import ExitCode
from modelworker.worker.settings import ServerSettings, WorkerSettings
from modelworker_testing.serving import NOT_SERVING, SERVING, Gate, Running, SumEngine, async_test, running_server, step_request
from modelworker_testing.slowness import slowness

LIVENESS = ("", "liveness")
READINESS = ("readiness", "modelworker.v1.ModelWorker")
STALL_SOON = WorkerSettings(server=ServerSettings(stall_seconds=0.3))


async def statuses(running: Running) -> dict[str, int]:
    return {name: await running.health(name) for name in LIVENESS + READINESS}


def expected(*, live: int, ready: int) -> dict[str, int]:
    return dict.fromkeys(LIVENESS, live) | dict.fromkeys(READINESS, ready)


@asynccontextmanager
async def watching(running: Running, name: str) -> AsyncIterator["asyncio.Queue[int]"]:
    """Collects what Watch sends."""
    seen: asyncio.Queue[int] = asyncio.Queue()

    async def collect() -> None:
        request = health_pb2.HealthCheckRequest(service=name)
        async for answer in health_pb2_grpc.HealthStub(running.channel).Watch(request):
            seen.put_nowait(answer.status)

    task = asyncio.create_task(collect())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def next_status(seen: "asyncio.Queue[int]") -> int:
    return await asyncio.wait_for(seen.get(), 30)


@async_test
async def test_the_worker_is_alive_but_not_ready_until_the_engine_is_built():
    gate = Gate()

    def build(settings, progress, counters):
        gate(None)
        return SumEngine(settings)

    async with running_server(build=build, wait_ready=False) as running:
        await gate.wait_entered()
        assert await statuses(running) == expected(live=SERVING, ready=NOT_SERVING)
        async with watching(running, "readiness") as seen:
            assert await next_status(seen) == NOT_SERVING
            gate.open()
            assert await next_status(seen) == SERVING
        assert await statuses(running) == expected(live=SERVING, ready=SERVING)


@async_test
async def test_check_of_an_unknown_name_is_not_found_and_says_the_names():
    async with running_server() as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.health("nobody")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert "'nobody'" in caught.value.details()
        assert "'readiness'" in caught.value.details()


@async_test
async def test_watch_of_an_unknown_name_sends_service_unknown_and_stays_open():
    async with running_server() as running, watching(running, "nobody") as seen:
        assert await next_status(seen) == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        await asyncio.sleep(0.05)
        assert seen.empty()


@async_test
async def test_list_answers_all_names():
    async with running_server() as running:
        answer = await health_pb2_grpc.HealthStub(running.channel).List(health_pb2.HealthListRequest())
        assert {name: status.status for name, status in answer.statuses.items()} == expected(live=SERVING, ready=SERVING)


@async_test
async def test_a_stalled_step_turns_every_name_over_and_back_for_check_and_watch():
    async with running_server(STALL_SOON) as running, watching(running, "") as live, watching(running, "readiness") as ready:
        assert (await next_status(live), await next_status(ready)) == (SERVING, SERVING)
        gate = running.engine.before_step = Gate()
        step = asyncio.ensure_future(running.stub.ExecuteStep(step_request()))
        assert (await next_status(live), await next_status(ready)) == (NOT_SERVING, NOT_SERVING)
        assert await statuses(running) == expected(live=NOT_SERVING, ready=NOT_SERVING)
        gate.open()
        await step
        assert (await next_status(live), await next_status(ready)) == (SERVING, SERVING)
        assert await statuses(running) == expected(live=SERVING, ready=SERVING)


@async_test
async def test_an_idle_worker_stays_serving_beyond_the_stall_limit():
    async with running_server(STALL_SOON) as running:
        await running.stub.ExecuteStep(step_request())
        await asyncio.sleep(0.8)
        assert await statuses(running) == expected(live=SERVING, ready=SERVING)


@async_test
async def test_health_answers_at_once_while_a_step_runs():
    async with running_server() as running:
        gate = running.engine.before_step = Gate()
        step = asyncio.ensure_future(running.stub.ExecuteStep(step_request()))
        await gate.wait_entered()
        loop = asyncio.get_running_loop()
        seconds = []
        for _ in range(20):
            started = loop.time()
            await running.health("liveness")
            seconds.append(loop.time() - started)
        factor = slowness()
        assert sorted(seconds)[10] < 0.1 * factor
        assert max(seconds) < 1 * factor
        gate.open()
        await step


@async_test
async def test_a_draining_worker_is_alive_but_not_ready_from_the_first_moment():
    async with running_server() as running, watching(running, "readiness") as seen:
        assert await next_status(seen) == SERVING
        gate = running.engine.before_step = Gate()
        step = asyncio.ensure_future(running.stub.ExecuteStep(step_request()))
        await gate.wait_entered()
        running.server.request_stop()
        assert await statuses(running) == expected(live=SERVING, ready=NOT_SERVING)
        assert await next_status(seen) == NOT_SERVING
        gate.open()
        assert list((await step).sampled_ids) == [6]
        assert await running.task is ExitCode.OK


@async_test
async def test_open_watches_do_not_hold_up_the_end_and_hear_of_it():
    async with running_server() as running, watching(running, "liveness") as seen:
        assert await next_status(seen) == SERVING
        loop = asyncio.get_running_loop()
        started = loop.time()
        running.server.request_stop()
        assert await running.task is ExitCode.OK
        # A call that does not end holds it up for the two seconds of the last answers.
        assert loop.time() - started < 1.0 * slowness()
        assert await next_status(seen) == NOT_SERVING


@async_test
async def test_a_dead_device_is_internal_for_the_call_and_turns_every_name_over_before_the_end():
    def die(batch):
        raise FatalEngineError("the device is gone")

    async with running_server() as running, AsyncExitStack() as watches:
        running.engine.before_step = die
        seen = [await watches.enter_async_context(watching(running, name)) for name in LIVENESS + READINESS]
        assert {await next_status(of_name) for of_name in seen} == {SERVING}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.ExecuteStep(step_request())
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        assert {await next_status(of_name) for of_name in seen} == {NOT_SERVING}
        assert not running.task.done()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.ExecuteStep(step_request())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(running.task, 20) is ExitCode.ENGINE_FAULT
