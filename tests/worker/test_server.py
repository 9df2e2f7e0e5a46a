"""The server in this process: message limits, keepalive, admission, ports."""

import asyncio
import socket
import time
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.errors import SetupError
from modelworker.worker.progress import LogProgress
from modelworker.worker.result import SampledLogprobs
from modelworker.worker.server import ExitCode, WorkerServer, server_options, write_port_file
from modelworker.worker.settings import FencingSettings, ServerSettings, StepSettings, WorkerSettings
from modelworker_testing.serving import BLOCK_SIZE, Gate, SumEngine, async_test, running_server, step_request
from modelworker_testing.slowness import slowness

MIB = 2**20


@async_test
async def test_a_step_of_five_megabytes_is_executed():
    async with running_server() as running:
        # 64 sequences with tables of 20,000 blocks: far longer than needed, which is allowed.
        tables = np.full((64, 20_000), 29_999, np.int32)
        tables[:, 0] = np.arange(1, 65)
        request = step_request(
            list(range(64)),
            query_lens=[1] * 64,
            context_lens=[0] * 64,
            block_counts=[20_000] * 64,
            block_ids=tables.ravel().tolist(),
        )
        assert request.ByteSize() > 5_000_000
        answer = await running.stub.ExecuteStep(request)
        assert list(answer.sampled_ids) == list(range(64))


@async_test
async def test_an_answer_of_five_megabytes_arrives():
    num_logprobs = 500_000

    class Talkative(SumEngine):
        def step(self, batch):
            logprobs = SampledLogprobs(
                processed=np.zeros(1, np.bool_),
                counts=np.array([num_logprobs], np.int32),
                token_ids=np.arange(num_logprobs, dtype=np.int32),
                values=np.full(num_logprobs, -1, np.float32),
                ranks=np.arange(num_logprobs, dtype=np.int32),
            )
            return replace(super().step(batch), logprobs=logprobs)

    async with running_server(build=lambda settings, *_: Talkative(settings)) as running:
        answer = await running.stub.ExecuteStep(step_request())
        assert answer.ByteSize() > 5_000_000
        assert len(answer.logprobs.ranks) == num_logprobs


@async_test
async def test_a_message_over_the_limit_is_resource_exhausted_naming_the_limit_which_is_reported():
    async with running_server(WorkerSettings(server=ServerSettings(max_message_size=MIB))) as running:
        call = running.channel.unary_unary("/modelworker.v1.ModelWorker/ExecuteStep")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bytes(MIB + 1))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(MIB) in caught.value.details()
        assert (await running.stub.GetWorkerInfo(pb.GetWorkerInfoRequest())).limits.max_message_bytes == MIB


def test_the_option_keys_are_those_that_the_core_reads():
    assert dict(server_options(5)) == {
        "grpc.so_reuseport": 0,
        "grpc.max_receive_message_length": 5,
        "grpc.max_send_message_length": 5,
        "grpc.http2.min_ping_interval_without_data_ms": 5000,
        "grpc.http2.max_ping_strikes": 0,
        "grpc.keepalive_time_ms": 20_000,
        "grpc.keepalive_timeout_ms": 10_000,
        "grpc.http2.ping_timeout_ms": 10_000,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
    }


# The core waits at least a second between keepalive pings, and cuts a connection off at the third that comes too early.
IMPATIENT_CLIENT = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)


async def is_cut_off_by_a_server_without_the_ping_options() -> bool:
    async def slow(request: bytes, context: object) -> bytes:
        await asyncio.sleep(6)
        return b""

    server = grpc.aio.server(options=[option for option in server_options(MIB) if "ping" not in option[0]])
    handler = grpc.method_handlers_generic_handler("test", {"Slow": grpc.unary_unary_rpc_method_handler(slow)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=IMPATIENT_CLIENT) as channel:
            await channel.unary_unary("/test/Slow")(b"")
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(None)
    return False


@async_test
async def test_a_client_that_pings_often_is_not_cut_off_during_a_long_step_as_it_is_without_the_options():
    async with running_server(channel_options=IMPATIENT_CLIENT) as running:
        running.engine.before_step = lambda batch: time.sleep(6)
        answer, cut_off = await asyncio.gather(
            running.stub.ExecuteStep(step_request()), is_cut_off_by_a_server_without_the_ping_options()
        )
    assert list(answer.sampled_ids) == [6]
    assert cut_off


class DeadWire:
    """A connection through which nothing comes any more once it is cut, while both ends believe in it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_cut = False
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> "DeadWire":
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._is_cut = True

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far_writer]
        for source, target in ((reader, far_writer), (far_reader, writer)):
            self._tasks.append(asyncio.create_task(self._carry(source, target)))

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while content := await source.read(65536):
            if not self._is_cut:
                target.write(content)
        target.close()


@pytest.mark.parametrize("has_keepalive", [True, False])
@async_test
async def test_the_call_of_a_peer_that_vanishes_without_a_word_is_cancelled_because_of_the_keepalive(has_keepalive: bool):
    """With the server's options in seconds: the real ones would take half a minute."""
    started, ended = asyncio.Event(), asyncio.Event()

    async def wait(request: bytes, context: object) -> bytes:
        started.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ended.set()
            raise
        return b""

    quick = dict.fromkeys(("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"), 1000)
    options = dict(server_options(MIB)) | quick
    server = grpc.aio.server(options=[(key, value) for key, value in options.items() if has_keepalive or key not in quick])
    handler = grpc.method_handlers_generic_handler("test", {"Wait": grpc.unary_unary_rpc_method_handler(wait)})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with DeadWire(port) as wire, grpc.aio.insecure_channel(f"127.0.0.1:{wire.port}") as channel:
            call = channel.unary_unary("/test/Wait")(b"")
            await asyncio.wait_for(started.wait(), 30)
            wire.cut()
            if has_keepalive:
                await asyncio.wait_for(ended.wait(), 15)
            else:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(ended.wait(), 4)
            call.cancel()
    finally:
        await server.stop(None)


@async_test
async def test_of_twenty_steps_at_once_four_are_taken_and_sixteen_refused_at_once():
    async with running_server(WorkerSettings(fencing=FencingSettings(max_steps_in_flight=4))) as running:
        gate = running.engine.before_step = Gate()
        await running.stub.GetWorkerInfo(pb.GetWorkerInfoRequest())
        started = time.perf_counter()
        refused_after: list[tuple[float, grpc.StatusCode]] = []

        async def call(token: int) -> int | None:
            try:
                answer = await running.stub.ExecuteStep(step_request([token]))
            except grpc.aio.AioRpcError as error:
                refused_after.append((time.perf_counter() - started, error.code()))
                return None
            return answer.sampled_ids[0]

        calls = [asyncio.ensure_future(call(token)) for token in range(20)]
        while len(refused_after) < 16:
            await asyncio.sleep(0.005)
        assert running.server.executor.num_steps_in_flight == 4
        # No step ends meanwhile, so that nobody waits for one. Client and server, both on this thread, take 50 ms.
        assert max(seconds for seconds, _ in refused_after) < 0.5 * slowness()
        assert {code for _, code in refused_after} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        gate.open()
        answers = [answer for answer in await asyncio.gather(*calls) if answer is not None]
        assert len(answers) == 4
        assert len(running.engine.executed) == 4


@async_test
async def test_fifty_clients_at_once_are_within_the_default_limit():
    async with running_server() as running:
        calls = [running.stub.ExecuteStep(step_request([token], block_ids=[token + 1])) for token in range(50)]
        answers = await asyncio.gather(*calls)
        assert [answer.sampled_ids[0] for answer in answers] == list(range(50))


@async_test
async def test_a_client_that_goes_away_takes_its_queued_step_along_and_nobody_else_notices():
    async with running_server() as running:
        gate = running.engine.before_step = Gate()
        first = asyncio.ensure_future(running.stub.ExecuteStep(step_request([1])))
        await gate.wait_entered()
        async with grpc.aio.insecure_channel(running.address) as channel:
            gone = channel.unary_unary("/modelworker.v1.ModelWorker/ExecuteStep")(step_request([2]).SerializeToString())
            while running.server.executor.num_steps_in_flight < 2:
                await asyncio.sleep(0.01)
        with pytest.raises((asyncio.CancelledError, grpc.aio.AioRpcError)):
            await gone
        while running.server.executor.num_steps_in_flight > 1:
            await asyncio.sleep(0.01)
        gate.open()
        assert list((await first).sampled_ids) == [1]
        assert len(running.engine.executed) == 1


@async_test
async def test_the_next_step_of_a_sequence_is_refused_by_a_restarted_worker_with_its_new_epoch():
    async with running_server() as running:
        epoch = (await running.stub.GetWorkerInfo(pb.GetWorkerInfoRequest())).worker_epoch
        prefill = step_request([1, 2, 3], worker_epoch=epoch, router_id=7, step_id=1)
        decode = step_request([6], context_lens=[3], worker_epoch=epoch, router_id=7, step_id=2)
        assert list((await running.stub.ExecuteStep(prefill)).sampled_ids) == [6]
        assert list((await running.stub.ExecuteStep(decode)).sampled_ids) == [12]
    async with running_server() as restarted:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await restarted.stub.ExecuteStep(decode)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        info = await restarted.stub.GetWorkerInfo(pb.GetWorkerInfoRequest())
        assert info.worker_epoch not in (0, epoch)
        assert str(info.worker_epoch) in caught.value.details()
        assert (info.kv_cache.num_blocks, info.kv_cache.block_size) == (30_000, BLOCK_SIZE)
        assert restarted.engine.executed == []


@async_test
async def test_a_reset_starts_a_new_epoch_with_an_empty_cache():
    async with running_server() as running:
        await running.stub.ExecuteStep(step_request([1, 2, 3]))
        epoch = running.server.executor.state().worker_epoch
        answer = await running.stub.ResetKvCache(pb.ResetKvCacheRequest(worker_epoch=epoch))
        assert answer.worker_epoch == running.server.executor.state().worker_epoch != epoch
        # The three tokens in the cache are zeros now.
        assert list((await running.stub.ExecuteStep(step_request([5], context_lens=[3]))).sampled_ids) == [5]


@async_test
async def test_a_step_over_the_step_limits_is_refused_and_the_next_is_fine():
    async with running_server(WorkerSettings(step=StepSettings(max_tokens_per_step=4))) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.stub.ExecuteStep(step_request([1] * 5))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert list((await running.stub.ExecuteStep(step_request([1] * 4))).sampled_ids) == [4]


async def serve_on(host: str, port: int) -> None:
    settings = WorkerSettings(server=ServerSettings(host=host, port=port))
    server = WorkerServer(settings, lambda settings, *_: SumEngine(settings), LogProgress(), on_listening=lambda port: None)
    await server.run()


@async_test
async def test_a_port_that_another_worker_has_is_refused_naming_host_port_and_reason():
    async with running_server() as running:
        with pytest.raises(SetupError, match=rf"can't listen on host 127.0.0.1 port {running.server.port}: Address already in use"):
            await serve_on("127.0.0.1", running.server.port)
        assert list((await running.stub.ExecuteStep(step_request())).sampled_ids) == [6]


@async_test
async def test_a_port_that_another_program_has_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SetupError, match=f"port {port}: Address already in use"):
            await serve_on("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "reason"),
    [("203.0.113.7", "Cannot assign requested address"), ("no.such.host.invalid", "Name or service not known|failure in name")],
)
@async_test
async def test_a_host_that_is_not_this_machine_is_refused_naming_it(host: str, reason: str):
    with pytest.raises(SetupError, match=f"host {host} port 0: ({reason})"):
        await serve_on(host, 0)


@async_test
async def test_a_worker_that_stops_gives_its_port_back():
    async with running_server() as running:
        port = running.server.port
    task = asyncio.create_task(serve_on("127.0.0.1", port))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@async_test
async def test_steps_that_outlast_the_drain_limit_end_as_unavailable_and_the_exit_code_says_so():
    async with running_server(WorkerSettings(server=ServerSettings(drain_seconds=0.2))) as running:
        gate = running.engine.before_step = Gate()
        step = asyncio.ensure_future(running.stub.ExecuteStep(step_request()))
        await gate.wait_entered()
        running.server.request_stop()
        assert await running.task is ExitCode.DRAIN_OVERRUN
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await step
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        gate.open()


@async_test
async def test_a_server_that_can_not_watch_its_engine_any_more_ends_as_after_a_fault(capfd: pytest.CaptureFixture[str]):
    async with running_server() as running:
        update = running.server.health.update

        def fail_once(**states: bool) -> bool:
            running.server.health.update = update
            raise RuntimeError("health is broken")

        running.server.health.update = fail_once
        assert await asyncio.wait_for(running.task, 30) is ExitCode.ENGINE_FAULT
    log = capfd.readouterr().err
    assert "the engine is not watched any more" in log
    assert "RuntimeError: health is broken" in log


def test_the_port_file_is_written_as_a_whole(tmp_path: Path):
    path = tmp_path / "port"
    path.write_text("an old and longer content\n")
    write_port_file(path, 50051)
    assert path.read_text() == "50051\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_port_file_that_cannot_be_written_is_a_setup_error_naming_it(tmp_path: Path):
    with pytest.raises(SetupError, match=f"can't write the port file {tmp_path}/nowhere/port: No such file or directory"):
        write_port_file(tmp_path / "nowhere" / "port", 1)
