"""Who owns a worker's KV cache, and when its blocks may be used again, through a real server."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch
from google.rpc import error_details_pb2

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.client import StepSampling, build_step
from modelworker.worker.engine import Engine
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.engines import engine_of
from modelworker_testing.serving import Running, async_test, running_server, status_details, step_request

PROMPT_A = [5, 17, 100, 3, 42, 8]
PROMPT_B = [99, 1, 64, 23, 7, 50, 11]
PATIENCE_SECONDS = 30


async def precondition_of(call: grpc.aio.Call) -> error_details_pb2.ErrorInfo:
    """The reason of a call that must be refused because of the worker's state."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    info = error_details_pb2.ErrorInfo()
    assert status_details(caught.value).details[0].Unpack(info)
    return info


async def info_of(running: Running) -> pb.WorkerInfo:
    return await running.stub.GetWorkerInfo(pb.GetWorkerInfoRequest())


@async_test
async def test_a_second_router_is_refused_takes_over_after_a_reset_and_the_first_ones_late_step_is_refused():
    async with running_server() as running:

        def step(router: int, step_id: int, epoch: int, tokens: list[int]) -> Any:
            return running.stub.ExecuteStep(step_request(tokens, worker_epoch=epoch, router_id=router, step_id=step_id))

        epoch = (await info_of(running)).worker_epoch
        assert list((await step(7, 1, epoch, [1, 2])).sampled_ids) == [3]
        refused = await precondition_of(step(8, 2, epoch, [4, 5]))
        assert (refused.reason, refused.metadata["lease_holder"]) == ("WORKER_OWNED", "7")
        unsequenced = await precondition_of(running.stub.ExecuteStep(step_request([4, 5])))
        assert unsequenced.reason == "WORKER_OWNED"

        new_epoch = (await running.stub.ResetKvCache(pb.ResetKvCacheRequest(worker_epoch=epoch))).worker_epoch
        assert list((await step(8, 1, new_epoch, [4, 5])).sampled_ids) == [9]
        late = await precondition_of(step(7, 2, epoch, [3]))
        assert (late.reason, late.metadata["worker_epoch"]) == ("KV_CACHE_LOST", str(new_epoch))
        assert (await precondition_of(step(7, 2, new_epoch, [3]))).reason == "WORKER_OWNED"
        assert (await info_of(running)).lease_holder == 8
        assert running.engine.executed == [1, 1]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine_of(save_tiny(tmp_path_factory.mktemp("tiny"))) as engine:
        yield engine


class MiddleOfStep:
    """Holds an engine between two layers: the KV of the first is written, that of the second is not."""

    def __init__(self, engine: Engine) -> None:
        self.reached, self._go_on = threading.Event(), threading.Event()
        second_layer = next(module for name, module in engine.model.named_modules() if name.endswith("layers.1"))
        self._hook = second_layer.register_forward_pre_hook(self._hold)

    def _hold(self, module: torch.nn.Module, arguments: object) -> None:
        self._hook.remove()
        self.reached.set()
        assert self._go_on.wait(PATIENCE_SECONDS)

    def go_on(self) -> None:
        self._go_on.set()


def prompt_step(prompt: list[int], table: list[int], **identity: int) -> pb.ExecuteStepRequest:
    return build_step(
        query_lens=[len(prompt)],
        context_lens=[0],
        token_ids=prompt,
        block_counts=[len(table)],
        block_ids=table,
        sampling=StepSampling(num_logprobs=[0]),
        **identity,
    )


@async_test
async def test_a_step_that_reuses_the_blocks_of_one_cancelled_in_its_middle_gives_what_it_gives_alone(engine: Engine):
    engine.reset_kv_cache()
    async with running_server(build=lambda *_: engine) as running:
        expected = await running.stub.ExecuteStep(prompt_step(PROMPT_B, [2, 1]))
        epoch = (await info_of(running)).worker_epoch
        epoch = (await running.stub.ResetKvCache(pb.ResetKvCacheRequest(worker_epoch=epoch))).worker_epoch

        middle = MiddleOfStep(engine)
        cancelled = running.stub.ExecuteStep(prompt_step(PROMPT_A, [1, 2], worker_epoch=epoch, router_id=7, step_id=1))
        assert await asyncio.to_thread(middle.reached.wait, PATIENCE_SECONDS)
        cancelled.cancel()
        reusing = asyncio.ensure_future(
            running.stub.ExecuteStep(prompt_step(PROMPT_B, [2, 1], worker_epoch=epoch, router_id=7, step_id=2))
        )
        while running.server.executor.num_queued < 1:
            await asyncio.sleep(0.005)
        # A step that runs is not over when its caller has gone: this is what tells a router when its blocks are free.
        assert (await info_of(running)).last_executed_step_id == 0
        middle.go_on()
        answer = await reusing
        assert (await info_of(running)).last_executed_step_id == 2
        assert answer.sampled_ids == expected.sampled_ids
        assert answer.logprobs == expected.logprobs
        with pytest.raises(asyncio.CancelledError):
            await cancelled
