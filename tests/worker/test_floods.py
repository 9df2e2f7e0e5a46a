"""Requests that cost far more than they are worth: the worker stays alive, small and quick to answer."""

import asyncio
import gc
import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from modelworker.worker.client import Client, build_step
from modelworker.worker.settings import ServerSettings, WorkerSettings
from modelworker_testing.checkpoints import save_table_model, save_tiny
from modelworker_testing.crowd import NUM_BLOCKS, WANTED
from modelworker_testing.flood import NUM_BYTES, NUM_CLIENTS, NUM_STEPS
from modelworker_testing.serving import SERVING, Gate, SumEngine, async_test, running_server, status_details, step_request
from modelworker_testing.slowness import slowness
from modelworker_testing.worker_process import WorkerProcess, worker_process

MIB = 2**20
SUPPORT = Path(__file__).parents[1] / "support"
STEP = build_step(query_lens=[1], context_lens=[0], token_ids=[1], block_counts=[1], block_ids=[1])


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    model = save_tiny(tmp_path_factory.mktemp("tiny"))
    with worker_process(model, "--block-size", "4", "--num-blocks", "32", "--max-sequences", "8") as process:
        yield process


class Memory:
    """The resident memory of a process."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")

    def bytes_of(self, name: str) -> int:
        return next(int(line.split()[1]) * 1024 for line in self._status.read_text().splitlines() if line.startswith(name))


def watch_health(address: str, process: subprocess.Popen[str]) -> tuple[list[float], float]:
    """Checks liveness on a connection of its own until a process ends.

    Returns:
        The seconds that each answer took, divided by the slowness of the machine around it, and the mean slowness.
    """
    seconds, slownesses = [], [slowness()]
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while process.poll() is None:
            begun = time.perf_counter()
            assert stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=60).status == SERVING
            took = time.perf_counter() - begun
            slownesses.append(slowness())
            seconds.append(took / max(slownesses[-2:]))
    return seconds, sum(slownesses) / len(slownesses)


def test_huge_steps_of_eight_clients_at_once_are_refused_while_health_is_answered(worker: WorkerProcess) -> None:
    memory = Memory(worker.process.pid)
    with Client(worker.address) as client:
        client.execute(STEP)
        before = memory.bytes_of("VmRSS")
        environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(SUPPORT)}
        flood = subprocess.Popen(
            [sys.executable, "-m", "modelworker_testing.flood", worker.address], env=environment, stdout=subprocess.PIPE, text=True
        )
        seconds, _ = watch_health(worker.address, flood)
        answers = json.loads(flood.communicate()[0])
        assert {code for code, _ in answers} == {"INVALID_ARGUMENT"}
        assert all(details.startswith(f"request: found {NUM_BYTES // 100}") for _, details in answers)
        assert len(answers) == NUM_CLIENTS * NUM_STEPS
        # gRPC copies what has arrived on the event loop, 0.1 s of CPU time for each.
        assert max(seconds) < 1
        # gRPC itself holds what has arrived: of each client once as it came, of some twice more while it makes bytes of it.
        assert memory.bytes_of("VmHWM") - before < 3.5 * NUM_CLIENTS * NUM_BYTES
        assert client.execute(STEP).sampled_counts.tolist() == [1]


@pytest.mark.slow
def test_two_hundred_clients_of_every_kind_for_a_minute_leave_good_ones_right_and_the_worker_as_it_was(tmp_path: Path) -> None:
    model = save_table_model(tmp_path, WANTED)
    flags = ("--block-size", "4", "--num-blocks", str(NUM_BLOCKS), "--max-steps-in-flight", "128", "--log-level", "error")
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, "-m", "modelworker_testing.crowd"]
    with worker_process(model, *flags) as worker:
        subprocess.run([*command, worker.address, "10"], env=environment, check=True, capture_output=True)
        process = Path(f"/proc/{worker.process.pid}")
        memory, threads, files = Memory(worker.process.pid), len(list(process.glob("task/*"))), len(list(process.glob("fd/*")))
        before = memory.bytes_of("VmRSS")
        clients = subprocess.Popen([*command, worker.address, "60"], env=environment, stdout=subprocess.PIPE, text=True)
        seconds, slow = watch_health(worker.address, clients)
        outcomes = json.loads(clients.communicate()[0])
        assert clients.returncode == 0
        print(outcomes, f"health at most {max(seconds):.2f} s at slowness {slow:.1f}")
        assert outcomes["good right"] > 400 / slow
        assert {name for name in outcomes if name.startswith("good")} <= {"good right", "good RESOURCE_EXHAUSTED"}
        assert outcomes["stream right"] > 100 / slow
        in_band = {name for name in outcomes if name.startswith("stream")}
        assert in_band <= {"stream right", "stream bad 3", "stream good 8", "stream bad 8"}
        refused = {name for name in outcomes if name.startswith(("bad", "huge"))}
        assert refused <= {"bad INVALID_ARGUMENT", "huge INVALID_ARGUMENT", "huge RESOURCE_EXHAUSTED"}
        assert max(seconds) < 1
        time.sleep(2)
        assert memory.bytes_of("VmRSS") - before < 40 * MIB
        assert len(list(process.glob("task/*"))) <= threads + 4
        assert len(list(process.glob("fd/*"))) <= files + 8


def table_of(num_entries: int) -> dict[str, object]:
    """A sequence of one token with a table of many blocks, of which only the first is needed."""
    return {"block_counts": [num_entries], "block_ids": list(range(1, num_entries + 1))}


@async_test
async def test_large_steps_that_wait_are_bounded_in_bytes_and_refused_beyond():
    async with running_server(WorkerSettings(server=ServerSettings(max_message_size=80_000))) as running:
        gate = running.engine.before_step = Gate()
        waiting = [asyncio.ensure_future(running.stub.ExecuteStep(step_request([1], **table_of(19_000)))) for _ in range(4)]
        while running.server.executor.num_steps_in_flight < 4:
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.ExecuteStep(step_request([1], **table_of(19_000)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details().endswith(" bytes of requests are there at once, the limit is 320000")
        retry = error_details_pb2.RetryInfo()
        assert status_details(caught.value).details[0].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() > 0
        # A small step is welcome, and so is a large one afterwards.
        waiting.append(asyncio.ensure_future(running.stub.ExecuteStep(step_request([1]))))
        while running.server.executor.num_steps_in_flight < 5:
            await asyncio.sleep(0.01)
        gate.open()
        await asyncio.gather(*waiting)
        await running.stub.ExecuteStep(step_request([1], **table_of(19_000)))


@async_test
async def test_refused_steps_leave_nothing_behind_for_the_garbage_collector():
    async with running_server() as running:
        bad = step_request([-5], **table_of(25_000))
        assert bad.ByteSize() > 100_000

        async def refused() -> None:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await running.stub.ExecuteStep(bad)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

        await refused()
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(50):
                await refused()
            left = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
            gc.enable()
        # What one of them was would be 100 KB as bytes, and as much again as an array.
        assert left < 20 * bad.ByteSize()


@pytest.mark.parametrize("method", ["GetWorkerInfo", "ResetKvCache", "ReleaseSequences", "ExportKvBlocks"])
@async_test
async def test_a_huge_request_that_is_no_step_is_refused_with_its_size(method: str):
    async with running_server() as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.channel.unary_unary(f"/modelworker.v1.ModelWorker/{method}")(bytes(2 * MIB))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "request: found 2097152 bytes, expected at most 1048576"


@async_test
async def test_a_health_check_of_a_long_name_is_not_found_quoting_its_beginning():
    async with running_server() as running:
        stub = health_pb2_grpc.HealthStub(running.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="x" * 500_000))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert f"no health status for '{'x' * 100}': the names are" in caught.value.details()


@async_test
async def test_a_step_while_the_worker_starts_is_unavailable_without_being_parsed():
    gate = Gate()

    def build(settings, *_):
        gate(None)
        return SumEngine(settings)

    async with running_server(build=build, wait_ready=False) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.channel.unary_unary("/modelworker.v1.ModelWorker/ExecuteStep")(b"\xff" * 100)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        gate.open()
        await running.server.ready.wait()


@async_test
async def test_of_many_refused_calls_ten_lines_a_second_are_written_and_the_others_told_as_a_number(capfd):
    lines = []

    def num_told() -> int:
        lines.extend(map(json.loads, capfd.readouterr().err.splitlines()))
        refused, told = lines_of("call refused"), lines_of("more calls refused")
        return len(refused) + sum(line["suppressed"] for line in told)

    def lines_of(event: str) -> list[dict[str, object]]:
        return [line for line in lines if line["event"] == event]

    async with running_server() as running:
        begun = time.monotonic()
        await asyncio.gather(*(running.stub.ExecuteStep(step_request([-5])) for _ in range(50)), return_exceptions=True)
        seconds = time.monotonic() - begun
        while num_told() < 50:
            await asyncio.sleep(0.1)
    assert num_told() == 50
    assert 10 <= len(lines_of("call refused")) <= 10 * (2 + int(seconds))
    told = lines_of("more calls refused")
    assert {(line["method"], line["code"]) for line in told} <= {("ExecuteStep", "INVALID_ARGUMENT")}
    assert len(told) > 0 or seconds > 5
    assert not any("step_id" in line for line in told)
