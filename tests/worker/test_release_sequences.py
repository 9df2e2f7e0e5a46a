"""ReleaseSequences through a real server."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.client import AsyncClient, KvCacheLostError, WorkerOwnedError, WorkerUnavailableError
from modelworker.worker.settings import WorkerSettings
from modelworker_testing.serving import Gate, SumEngine, async_test, running_server, status_details, step_request

ROUTER = 7


@async_test
async def test_sequences_are_released_after_the_steps_that_were_admitted_before_and_before_later_ones() -> None:
    async with running_server() as running, AsyncClient(running.address) as client:
        gate = running.engine.before_step = Gate()
        epoch = (await client.info()).worker_epoch
        steps = [
            asyncio.ensure_future(running.stub.ExecuteStep(step_request(worker_epoch=epoch, router_id=ROUTER, step_id=1))),
        ]
        await gate.wait_entered()
        for step_id in (2, 3):
            if step_id == 3:
                release = asyncio.ensure_future(client.release_sequences(epoch, ROUTER, [5, 2**64 - 1]))
                while running.server.executor.num_queued < 2:
                    await asyncio.sleep(0.005)
            request = step_request(worker_epoch=epoch, router_id=ROUTER, step_id=step_id)
            steps.append(asyncio.ensure_future(running.stub.ExecuteStep(request)))
            while running.server.executor.num_steps_in_flight < step_id:
                await asyncio.sleep(0.005)
        gate.open()
        assert await release == 2
        await asyncio.gather(*steps)
        assert running.engine.released == [([1, 2], [5, 2**64 - 1])]


@async_test
async def test_another_epoch_or_another_router_releases_nothing() -> None:
    async with running_server() as running, AsyncClient(running.address) as client:
        epoch = (await client.info()).worker_epoch
        await running.stub.ExecuteStep(step_request(worker_epoch=epoch, router_id=ROUTER, step_id=1))
        with pytest.raises(KvCacheLostError) as lost:
            await client.release_sequences(epoch ^ 1, ROUTER, [1])
        assert lost.value.metadata["worker_epoch"] == str(epoch)
        with pytest.raises(WorkerOwnedError) as owned:
            await client.release_sequences(epoch, ROUTER + 1, [1])
        assert owned.value.metadata["lease_holder"] == str(ROUTER)
        assert running.engine.released == []
        assert await client.release_sequences(epoch, ROUTER, []) == 0


@async_test
async def test_an_epoch_that_ends_while_the_release_is_queued_is_told() -> None:
    async with running_server() as running, AsyncClient(running.address) as client:
        gate = running.engine.before_step = Gate()
        epoch = (await client.info()).worker_epoch
        step = asyncio.ensure_future(running.stub.ExecuteStep(step_request()))
        await gate.wait_entered()
        reset = asyncio.ensure_future(client.reset_kv_cache(epoch))
        while running.server.executor.num_queued < 1:
            await asyncio.sleep(0.005)
        release = asyncio.ensure_future(client.release_sequences(epoch, ROUTER, [1]))
        while running.server.executor.num_queued < 2:
            await asyncio.sleep(0.005)
        gate.open()
        with pytest.raises(KvCacheLostError):
            await release
        await asyncio.gather(step, reset)
        assert running.engine.released == []


@async_test
async def test_what_is_wrong_with_a_release_is_named() -> None:
    async with running_server() as running:
        request = pb.ReleaseSequencesRequest(sequence_ids=[1])
        request.MergeFromString(b"\xfa\x7f\x03abc")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.ReleaseSequences(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        bad = error_details_pb2.BadRequest()
        assert status_details(caught.value).details[0].Unpack(bad)
        assert [violation.field for violation in bad.field_violations] == ["worker_epoch", "router_id", "2047"]
        assert running.engine.released == []


@async_test
async def test_a_release_while_starting_or_draining_is_unavailable() -> None:
    gate = Gate()
    engine = SumEngine(WorkerSettings())

    def build(*_: object) -> SumEngine:
        gate(None)
        return engine

    async with running_server(build=build, wait_ready=False) as running, AsyncClient(running.address) as client:
        with pytest.raises(WorkerUnavailableError, match="starting"):
            await client.release_sequences(1, ROUTER, [1])
        gate.open()
        await running.server.ready.wait()
        epoch = (await client.info()).worker_epoch
        engine_gate = engine.before_step = Gate()
        step = asyncio.ensure_future(running.stub.ExecuteStep(step_request()))
        await engine_gate.wait_entered()
        running.server.request_stop()
        with pytest.raises(WorkerUnavailableError, match="draining"):
            await client.release_sequences(epoch, ROUTER, [1])
        engine_gate.open()
        await step
