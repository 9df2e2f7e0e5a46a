"""The client against real servers: the worker's own with a small engine, and one that answers with any status."""

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from modelworker.proto import model_worker_pb2 as pb
from modelworker.proto.model_worker_pb2_grpc import ModelWorkerServicer, add_ModelWorkerServicer_to_server
from modelworker.worker.client import (
    AsyncClient,
    BlockCopies,
    CallDeadlineError,
    Client,
    InvalidRequestError,
    KvCacheLostError,
    NotImplementedByWorkerError,
    PreconditionFailedError,
    RowError,
    StepConflictError,
    StepOutOfOrderError,
    StepSampling,
    WorkerBusyError,
    WorkerCallError,
    WorkerFaultError,
    WorkerOwnedError,
    WorkerUnavailableError,
    build_step,
    decode_answer,
)
from modelworker.worker.client.errors import error_of_code
from modelworker.worker.client.session import AsyncFencedSession, FencedSession
from modelworker.worker.client.session_state import StepPendingError
from modelworker.worker.errors import Violation
from modelworker.worker.result import GraphMode, SequenceErrorCode
from modelworker.worker.settings import ServerSettings, WorkerSettings
from modelworker_testing.cable import Cable
from modelworker_testing.serving import VOCAB_SIZE, Gate, async_test, running_server
from modelworker_testing.serving_thread import served_in_thread

TOKENS = [5, 6, 7]


def one_row(tokens: list[int], context_len: int = 0) -> pb.ExecuteStepRequest:
    """A step of one sequence in the blocks 1, 2, 3 ..."""
    num_blocks = -(-(context_len + len(tokens)) // 4)
    return build_step(
        query_lens=[len(tokens)],
        context_lens=[context_len],
        token_ids=tokens,
        block_counts=[num_blocks],
        block_ids=list(range(1, num_blocks + 1)),
    )


# -- imports -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["client", "client.session", "scheduler"])
def test_a_router_that_imports_the_client_gets_neither_torch_nor_structlog(module: str) -> None:
    code = (
        f"import sys, modelworker.worker.{module}; "
        "sys.exit(', '.join({'torch', 'structlog', 'triton', 'transformers'} & sys.modules.keys()) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


# -- building and decoding -----------------------------------------------------------------------------------------------------

int32s = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)
uint64s = st.lists(st.integers(0, 2**64 - 1), max_size=20)
floats = st.lists(st.floats(width=32), max_size=20)
bools = st.lists(st.booleans(), max_size=20)


def as_list(values: list[Any], kind: str) -> Any:
    return values


def as_array(values: list[Any], kind: str) -> Any:
    return np.array(values, kind)


@given(st.data(), st.sampled_from([as_list, as_array]))
def test_a_built_request_is_the_one_that_protobuf_makes_of_the_same_lists(data: st.DataObject, shape: Any) -> None:
    arrays = {name: data.draw(int32s) for name in ("query_lens", "context_lens", "token_ids", "block_counts", "block_ids")}
    sequence_ids, finished_sequence_ids, sample = data.draw(uint64s), data.draw(uint64s), data.draw(bools)
    zeroed, sources, destinations = data.draw(int32s), data.draw(int32s), data.draw(int32s)
    temperature, top_k, seed, has_seed = data.draw(floats), data.draw(int32s), data.draw(uint64s), data.draw(bools)
    modes = data.draw(st.lists(st.integers(0, 1), max_size=20))
    built = build_step(
        **{name: shape(values, "i4") for name, values in arrays.items()},
        sequence_ids=shape(sequence_ids, "u8"),
        finished_sequence_ids=shape(finished_sequence_ids, "u8"),
        zero_block_ids=shape(zeroed, "i4"),
        block_copies=BlockCopies(source_ids=shape(sources, "i4"), destination_ids=shape(destinations, "i4")),
        sample=shape(sample, "?"),
        sampling=StepSampling(
            temperature=shape(temperature, "f4"),
            top_k=shape(top_k, "i8"),
            seed=shape(seed, "u8"),
            has_seed=shape(has_seed, "?"),
            logprobs_mode=shape(modes, "i4"),
        ),
        worker_epoch=2**64 - 1,
        router_id=3,
        step_id=4,
        client_tag=5,
        timeout_ms=6,
        traceparent="7",
    )
    expected = pb.ExecuteStepRequest(
        **arrays,
        sequence_ids=sequence_ids,
        finished_sequence_ids=finished_sequence_ids,
        zero_block_ids=zeroed,
        block_copies=pb.BlockCopies(source_ids=sources, destination_ids=destinations),
        sample=sample,
        sampling=pb.SamplingParams(temperature=temperature, top_k=top_k, seed=seed, has_seed=has_seed, logprobs_mode=modes),
        worker_epoch=2**64 - 1,
        router_id=3,
        step_id=4,
        client_tag=5,
        timeout_ms=6,
        traceparent="7",
    )
    assert built.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("token_ids", [2**31], "token_ids: found values 2147483648 .. 2147483648, expected -2147483648 .. 2147483647"),
        ("token_ids", [2**70], "token_ids: found values"),
        ("token_ids", np.array([-(2**40)]), "token_ids: found values -1099511627776"),
        ("token_ids", [1.5], "token_ids: found an array of float64, expected int32"),
        ("token_ids", [[1, 2]], "token_ids: found an array of 2 dimensions, expected 1"),
        ("token_ids", [True], "token_ids: found an array of bool, expected int32"),
        ("sample", [1], "sample: found an array of int64, expected bool"),
        ("sequence_ids", [-1], "sequence_ids: found values -1 .. -1, expected 0 .. 18446744073709551615"),
        ("sequence_ids", [2**63, -1], "sequence_ids: found values -1"),
    ],
)
def test_a_value_that_does_not_fit_its_field_is_an_error_and_never_another_value(field: str, values: Any, message: str) -> None:
    arrays: dict[str, Any] = {name: [1] for name in ("query_lens", "context_lens", "token_ids", "block_counts", "block_ids")}
    with pytest.raises(ValueError, match=message):
        build_step(**{**arrays, field: values})


@pytest.mark.parametrize("modes", [[128], [200, 1], [-1]])
def test_an_enum_that_takes_more_than_a_byte_is_an_error_and_never_another_number_of_rows(modes: list[int]) -> None:
    with pytest.raises(ValueError, match="logprobs_mode: found values"):
        build_step(
            query_lens=[1],
            context_lens=[0],
            token_ids=[1],
            block_counts=[1],
            block_ids=[1],
            sampling=StepSampling(logprobs_mode=modes),
        )


def test_arrays_of_any_stride_and_byte_order_are_sent_as_the_numbers_they_hold() -> None:
    values = np.arange(10, dtype=">i8")[::3]
    assert list(one_row(values).token_ids) == [0, 3, 6, 9]  # type: ignore[arg-type]


def test_an_answer_is_decoded_into_arrays_and_split_by_row() -> None:
    message = pb.ExecuteStepResponse(
        worker_epoch=1,
        step_id=2,
        client_tag=3,
        sampled_counts=[2, 0, 1],
        sampled_ids=[10, 11, 12],
        tainted_block_ids=[4],
        sequence_errors=[pb.SequenceError(index=1, code=pb.NON_FINITE_LOGITS, message="NaN")],
        graph=pb.GraphExecution(mode=pb.GRAPH_MODE_FULL, padded_tokens=8, padded_sequences=4, compiled=True, fallback_reason=""),
        timings_ns=pb.StepTimings(queue=1, prepare=2, forward=3, sample=4, total=10),
        logprobs=pb.Logprobs(modes=[0, 0, 1], counts=[2, 0, 1], token_ids=[10, 9, 12], values=[-0.5, -1.5, -0.25], ranks=[1, 2, 1]),
    )
    answer = decode_answer(message)
    assert answer.tokens_of_rows == [[10, 11], [], [12]]
    assert answer.row_errors == (RowError(index=1, code=SequenceErrorCode.NON_FINITE_LOGITS, message="NaN"),)
    assert (answer.mode, answer.padded_tokens, answer.compiled, answer.timings.total_ns) == (GraphMode.FULL, 8, True, 10)
    of_tokens = [(ids.tolist(), values.tolist(), ranks.tolist()) for ids, values, ranks in answer.logprobs_of_tokens()]
    assert of_tokens == [([10, 9], [-0.5, -1.5], [1, 2]), ([], [], []), ([12], [-0.25], [1])]
    assert answer.sampled_ids.dtype == answer.tainted_block_ids.dtype == np.int32


def test_an_answer_without_logprobs_has_none_for_any_token() -> None:
    answer = decode_answer(pb.ExecuteStepResponse(sampled_counts=[1, 1], sampled_ids=[3, 4]))
    assert answer.logprobs is None
    assert [len(ids) for ids, _, _ in answer.logprobs_of_tokens()] == [0, 0]


# -- statuses ------------------------------------------------------------------------------------------------------------------


def detail(kind: str) -> Any:
    match kind:
        case "violations":
            return error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(field="block_ids[17]", description="found 0"),
                    error_details_pb2.BadRequest.FieldViolation(field="top_p[1]", description="found 2"),
                ]
            )
        case "retry":
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromMilliseconds(250)
            return retry
        case "help":  # A detail that this client does not know.
            return error_details_pb2.Help()
        case reason:
            return error_details_pb2.ErrorInfo(reason=reason, domain="modelworker", metadata={"expected_step_id": "4"})


class StatusServicer(ModelWorkerServicer):
    """Ends every step with the status that the request names: code, and the kinds of its details."""

    def ExecuteStep(  # noqa: N802
        self, request: pb.ExecuteStepRequest, context: grpc.ServicerContext
    ) -> pb.ExecuteStepResponse:
        code, *kinds = request.traceparent.split()
        status_code = grpc.StatusCode[code]
        if kinds == ["garbage"]:
            context.set_trailing_metadata((("grpc-status-details-bin", b"\xff\xff"),))
        elif kinds:
            status = status_pb2.Status(code=status_code.value[0], message="no: ü")
            for kind in kinds:
                packed = any_pb2.Any()
                packed.Pack(detail(kind))
                status.details.append(packed)
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
        context.abort(status_code, "no: ü")
        raise AssertionError


@pytest.fixture(scope="module")
def status_address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
    add_ModelWorkerServicer_to_server(StatusServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait()


def execute_sync(address: str, request: pb.ExecuteStepRequest) -> None:
    with Client(address) as client:
        client.execute(request, 10)


def execute_async(address: str, request: pb.ExecuteStepRequest) -> None:
    async def execute() -> None:
        async with AsyncClient(address) as client:
            await client.execute(request, 10)

    asyncio.run(execute())


@pytest.mark.parametrize("execute", [execute_sync, execute_async])
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("INVALID_ARGUMENT violations", InvalidRequestError),
        ("FAILED_PRECONDITION KV_CACHE_LOST", KvCacheLostError),
        ("FAILED_PRECONDITION STEP_OUT_OF_ORDER", StepOutOfOrderError),
        ("FAILED_PRECONDITION WORKER_OWNED", WorkerOwnedError),
        ("FAILED_PRECONDITION FENCING_REQUIRED", PreconditionFailedError),
        ("FAILED_PRECONDITION", PreconditionFailedError),
        ("RESOURCE_EXHAUSTED retry", WorkerBusyError),
        ("RESOURCE_EXHAUSTED", WorkerBusyError),
        ("UNAVAILABLE retry", WorkerUnavailableError),
        ("DEADLINE_EXCEEDED", CallDeadlineError),
        ("ALREADY_EXISTS", StepConflictError),
        ("UNIMPLEMENTED", NotImplementedByWorkerError),
        ("INTERNAL", WorkerFaultError),
        ("INTERNAL garbage", WorkerFaultError),
        ("INVALID_ARGUMENT help violations", InvalidRequestError),
        ("CANCELLED", WorkerCallError),
        ("DATA_LOSS", WorkerCallError),
    ],
)
def test_every_status_becomes_its_exception_with_what_its_details_say(
    status_address: str, execute: Callable[[str, pb.ExecuteStepRequest], None], status: str, kind: type[WorkerCallError]
) -> None:
    request = one_row(TOKENS)
    request.traceparent = status
    with pytest.raises(WorkerCallError) as caught:
        execute(status_address, request)
    error = caught.value
    code, *kinds = status.split()
    assert type(error) is kind
    assert error.code is grpc.StatusCode[code]
    assert error.message == "no: ü"
    has_violations = "violations" in kinds
    assert error.violations == ((Violation("block_ids[17]", "found 0"), Violation("top_p[1]", "found 2")) if has_violations else ())
    reason = next((each for each in kinds if each.isupper()), "")
    assert error.reason == reason
    assert error.metadata == ({"expected_step_id": "4"} if reason else {})
    assert error.retry_after == (0.25 if "retry" in kinds else None)
    assert code in str(error)


def test_a_status_that_came_in_band_becomes_the_same_exception() -> None:
    packed = any_pb2.Any()
    packed.Pack(detail("KV_CACHE_LOST"))
    assert type(error_of_code(9, "lost", [packed])) is KvCacheLostError
    assert error_of_code(4711, "?").code is grpc.StatusCode.UNKNOWN


# -- the worker's server -------------------------------------------------------------------------------------------------------


def test_the_blocking_client_speaks_to_the_worker() -> None:
    with served_in_thread() as worker, Client(worker.address) as client:
        client.wait_ready(10)
        info = client.info()
        assert info.model.vocab_size == VOCAB_SIZE
        answer = client.execute(one_row(TOKENS))
        assert answer.tokens_of_rows == [[18]]
        epoch = client.reset_kv_cache(info.worker_epoch)
        assert epoch == client.info().worker_epoch != info.worker_epoch
        with pytest.raises(KvCacheLostError):
            client.reset_kv_cache(info.worker_epoch)
        with pytest.raises(InvalidRequestError) as caught:
            client.execute(one_row([VOCAB_SIZE]))
        assert [violation.field for violation in caught.value.violations] == ["token_ids[0]"]


@async_test
async def test_the_async_client_speaks_to_the_worker() -> None:
    async with running_server() as worker, AsyncClient(worker.address) as client:
        await client.wait_ready(10)
        info = await client.info()
        assert info.model.vocab_size == VOCAB_SIZE
        answer = await client.execute(one_row(TOKENS))
        assert answer.tokens_of_rows == [[18]]
        epoch = await client.reset_kv_cache(info.worker_epoch)
        assert epoch == (await client.info()).worker_epoch != info.worker_epoch
        with pytest.raises(InvalidRequestError):
            await client.execute(one_row([VOCAB_SIZE]))


@async_test
async def test_a_step_over_the_callers_time_ends_with_an_error_that_says_so() -> None:
    gate = Gate()
    async with running_server() as worker, AsyncClient(worker.address) as client:
        worker.engine.before_step = gate
        with pytest.raises(CallDeadlineError):
            await client.execute(one_row(TOKENS), 0.1)
        gate.open()


@async_test
async def test_a_request_over_the_clients_own_message_limit_is_refused_with_the_limit() -> None:
    async with running_server() as worker, AsyncClient(worker.address, max_message_bytes=1000) as client:
        with pytest.raises(WorkerBusyError, match="1000") as caught:
            await client.execute(one_row([1] * 300))
        assert caught.value.retry_after is None


def test_waiting_for_a_worker_that_never_comes_says_what_it_found() -> None:
    states: list[str] = []
    with Client("127.0.0.1:1") as client, pytest.raises(WorkerUnavailableError, match=r"not reachable after 0\.3 s"):
        client.wait_ready(0.3, states.append)
    assert set(states) == {"not reachable"}


@async_test
async def test_waiting_ends_when_the_engine_is_built_and_not_when_the_port_is_open() -> None:
    built = threading.Event()
    states: list[str] = []
    async with running_server() as template:
        engine = template.engine

        def build(*_: object) -> Any:
            assert built.wait(30)
            return engine

        async with running_server(build=build, wait_ready=False) as worker, AsyncClient(worker.address) as client:
            waiting = asyncio.create_task(client.wait_ready(20, states.append))
            while "not ready" not in states:
                await asyncio.sleep(0.01)
            assert not waiting.done()
            with pytest.raises(WorkerUnavailableError, match="starting"):
                await client.info()
            built.set()
            await waiting
            await client.info()


# -- sessions ------------------------------------------------------------------------------------------------------------------


async def survive_cuts(num_cuts: int, num_steps: int, seed: int) -> None:
    """Decodes through a connection that is cut again and again; the worker must see each step once, in order."""
    randomness = random.Random(seed)
    async with running_server() as worker:
        cable = Cable(worker.server.port, iter([randomness.randrange(1, 2500) for _ in range(num_cuts)]))
        async with cable.plugged_in() as address, AsyncClient(address) as client:
            session = await AsyncFencedSession.open(client)
            tokens = [3]
            step = 0
            while step < num_steps or cable.num_cuts < num_cuts:
                answer = await session.execute(one_row(tokens[-1:], step))
                step += 1
                assert answer.step_id == step
                assert answer.tokens_of_rows == [[sum(tokens) % VOCAB_SIZE]]
                tokens.append(answer.tokens_of_rows[0][0])
        assert worker.engine.executed == list(range(1, step + 1))
        assert cable.num_cuts == num_cuts
        # Some cuts came between the execution and the answer.
        assert worker.server.counters.snapshot().get("steps_replayed_total", 0) > 0


def test_each_step_is_executed_once_however_often_the_connection_breaks() -> None:
    asyncio.run(survive_cuts(num_cuts=25, num_steps=60, seed=1))


@pytest.mark.slow
def test_two_hundred_lost_connections_leave_every_step_executed_once() -> None:
    asyncio.run(survive_cuts(num_cuts=200, num_steps=400, seed=2))


def test_the_blocking_session_survives_cuts_too() -> None:
    lengths = iter([300, 900, 500, 1200, 40])

    async def run_proxy(port: int, ready: "asyncio.Future[str]", end: asyncio.Event) -> None:
        async with Cable(port, lengths).plugged_in() as address:
            ready.set_result(address)
            await end.wait()

    with served_in_thread() as worker:
        loop = asyncio.new_event_loop()
        ready: asyncio.Future[str] = loop.create_future()
        end = asyncio.Event()
        thread = threading.Thread(target=lambda: loop.run_until_complete(run_proxy(worker.server.port, ready, end)))
        thread.start()
        while not ready.done():
            time.sleep(0.01)
        with Client(ready.result()) as client:
            session = FencedSession(client)
            for step in range(30):
                answer = session.execute(one_row([1], step))
                assert answer.tokens_of_rows == [[step + 1]]
        loop.call_soon_threadsafe(end.set)
        thread.join()
        loop.close()
        assert worker.engine.executed == list(range(1, 31))


@async_test
async def test_a_step_whose_time_is_up_stays_pending_and_is_settled_by_the_same_request() -> None:
    gate = Gate()
    async with running_server() as worker, AsyncClient(worker.address) as client:
        session = await AsyncFencedSession.open(client, patience=1.5)
        worker.engine.before_step = gate
        with pytest.raises(CallDeadlineError):
            await session.execute(one_row(TOKENS))
        assert session.is_pending
        with pytest.raises(StepPendingError):
            await session.execute(one_row([1]))
        gate.open()
        answer = await session.resume()
        assert answer.tokens_of_rows == [[18]]
        assert not session.is_pending
        assert worker.engine.executed == [1]
        with pytest.raises(StepPendingError, match="no step is pending"):
            await session.resume()


@async_test
async def test_a_refused_step_leaves_its_id_to_the_next_one() -> None:
    async with running_server() as worker, AsyncClient(worker.address) as client:
        session = await AsyncFencedSession.open(client)
        with pytest.raises(InvalidRequestError):
            await session.execute(one_row([VOCAB_SIZE]))
        answer = await session.execute(one_row(TOKENS))
        assert (answer.step_id, session.next_step_id) == (1, 2)


@async_test
async def test_a_reset_behind_the_sessions_back_is_told_and_renewed() -> None:
    async with running_server() as worker, AsyncClient(worker.address) as client:
        session = await AsyncFencedSession.open(client)
        await session.execute(one_row(TOKENS))
        await client.reset_kv_cache(session.worker_epoch)
        with pytest.raises(KvCacheLostError):
            await session.execute(one_row([1], 3))
        before = session.worker_epoch
        info = await session.renew()
        assert session.worker_epoch == info.worker_epoch != before
        assert (await session.execute(one_row(TOKENS))).step_id == 1


@async_test
async def test_a_fault_after_launch_ends_as_a_lost_kv_cache_and_is_not_repeated() -> None:
    async with running_server() as worker, AsyncClient(worker.address) as client:
        launches: list[int] = []

        def fail(batch: Any) -> None:
            launches.append(batch.step_id)
            raise RuntimeError("injected")

        session = await AsyncFencedSession.open(client)
        await session.execute(one_row(TOKENS))
        worker.engine.before_step = fail
        with pytest.raises(KvCacheLostError):
            await session.execute(one_row([1], 3))
        assert launches == [2]


@async_test
async def test_a_second_router_is_refused_until_the_first_gives_the_worker_back() -> None:
    async with running_server() as worker, AsyncClient(worker.address) as client:
        first = await AsyncFencedSession.open(client, router_id=1)
        await first.execute(one_row(TOKENS))
        second = await AsyncFencedSession.open(client, router_id=2)
        with pytest.raises(WorkerOwnedError):
            await second.execute(one_row(TOKENS))
        await second.release()
        await first.execute(one_row([1], 3))
        await first.release()
        await second.renew()
        assert (await second.execute(one_row(TOKENS))).step_id == 1
        with pytest.raises(KvCacheLostError):
            await first.execute(one_row([1], 4))


@async_test
async def test_a_busy_worker_is_asked_again_when_it_says() -> None:
    gate = Gate()
    settings = WorkerSettings(server=ServerSettings(log_level="error"))
    async with running_server(settings) as worker, AsyncClient(worker.address) as client:
        worker.engine.before_step = gate
        limit = (await client.info()).limits.max_steps_in_flight
        others = [asyncio.create_task(client.execute(one_row([7]))) for _ in range(limit)]
        while worker.server.executor.num_steps_in_flight < limit:
            await asyncio.sleep(0.01)
        session = await AsyncFencedSession.open(client)
        waiting = asyncio.create_task(session.execute(one_row(TOKENS)))
        while 'rpcs_total{code="RESOURCE_EXHAUSTED",method="ExecuteStep"}' not in worker.server.counters.snapshot():
            await asyncio.sleep(0.01)
        assert not waiting.done()
        gate.open()
        assert (await waiting).tokens_of_rows == [[18]]
        await asyncio.gather(*others)


@async_test
async def test_patience_ends_with_the_error_that_was_met_last() -> None:
    async with running_server() as worker:
        client = AsyncClient(worker.address)
        session = await AsyncFencedSession.open(client, patience=0.5)
        worker.server.request_stop()
        await worker.task
        with pytest.raises(WorkerUnavailableError):
            await session.execute(one_row(TOKENS))
        assert session.is_pending
        await client.close()
