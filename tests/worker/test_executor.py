"""The engine thread: starting, faults, draining, stopping, stalls."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from modelworker.worker.batch import StepBatch
from modelworker.worker.counters import Counters
from modelworker.worker.errors import (
    CheckpointError,
    EngineFaultError,
    FatalEngineError,
    PreconditionError,
    PreconditionReason,
    UnavailableError,
)
from modelworker.worker.executor import Executor
from modelworker.worker.settings import FencingSettings
from modelworker.worker.step_queue import StepQueue
from modelworker.worker.ticket import Answer, Outcomes, Step
from modelworker_testing.executor_world import (
    ALICE,
    PATIENCE_SECONDS,
    Gate,
    KvEngine,
    error_of,
    reason_of,
    run,
    settle,
    step_of,
    trial,
    until,
    worker,
)


def test_building_steps_and_resets_all_run_on_one_thread_that_is_not_the_event_loops() -> None:
    async def main() -> None:
        async with worker() as world:
            for step_id in range(1, 51):
                await world.executor.submit(world.sequenced(step_id))
            await world.executor.reset_kv_cache(world.epoch)
            await asyncio.gather(*(world.executor.submit(trial()) for _ in range(50)))
            assert len(world.engine.thread_ids) == 1
            assert threading.get_ident() not in world.engine.thread_ids

    run(main())


def test_the_event_loop_answers_while_the_engine_works() -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            task = world.send(trial())
            await gate.arrival()
            assert world.executor.num_steps_in_flight == 1
            assert not task.done()
            gate.open()
            await task

    run(main())


def test_queue_and_total_times_are_filled_in_and_the_engines_own_are_kept() -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            first, second = world.send(trial()), world.send(trial())
            await gate.arrival()
            held_ns = time.monotonic_ns()
            gate.open()
            timings = [(await task).result.timings for task in (first, second)]
            for times in timings:
                assert 0 < times.queue_ns <= times.total_ns
                assert times.forward_ns == 123
            assert timings[1].queue_ns >= timings[0].queue_ns
            assert timings[1].total_ns < time.monotonic_ns() - held_ns + 10**9

    run(main())


def test_a_step_is_counted_before_its_answer_is_told() -> None:
    counters = Counters()
    counted: list[int] = []

    def tell(outcomes: Outcomes) -> None:
        if any(isinstance(outcome, Answer) for _, outcome in outcomes):
            counted.append(counters.snapshot().get('steps_executed_total{sequenced="false"}', 0))

    async def main() -> None:
        queue = StepQueue(FencingSettings(), counters, tell=tell, clear_kv_cache=lambda: None)
        engine = KvEngine()
        for _ in range(2):
            queue.admit(trial())
            step = queue.take()
            assert isinstance(step, Step)
            queue.finish(step, engine.step(step.batch))

    run(main())
    assert counted == [1, 2]


# -- starting --


def test_before_the_engine_is_built_everything_is_unavailable_and_the_worker_is_alive_but_not_ready() -> None:
    async def main() -> None:
        executor = Executor(settings=FencingSettings(), stall_seconds=0.001, counters=Counters())
        go_on = threading.Event()
        engines: list[KvEngine] = []

        def build() -> KvEngine:
            assert go_on.wait(PATIENCE_SECONDS)
            engines.append(KvEngine())
            return engines[0]

        executor.start(build)
        error = await error_of(executor.submit(trial()))
        assert isinstance(error, UnavailableError)
        assert error.retry_after_ms
        assert isinstance(await error_of(executor.reset_kv_cache(executor.state().worker_epoch)), UnavailableError)
        await asyncio.sleep(0.01)
        assert (executor.is_alive, executor.ready, executor.stalled, executor.description) == (True, False, False, None)
        go_on.set()
        await executor.wait_ready()
        assert (executor.is_alive, executor.ready) == (True, True)
        assert executor.description is engines[0].description
        executor.stop()
        engines[0].thread.join(PATIENCE_SECONDS)

    run(main())


def test_what_build_raises_is_raised_to_whoever_waits_for_readiness() -> None:
    async def main() -> None:
        executor = Executor(settings=FencingSettings(), stall_seconds=60, counters=Counters())

        def build() -> KvEngine:
            raise CheckpointError("config.json is missing")

        executor.start(build)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            await executor.wait_ready()
        assert (executor.is_alive, executor.ready) == (False, False)
        assert isinstance(await error_of(executor.submit(trial())), UnavailableError)

    run(main())


def test_draining_and_stopping_before_the_start_or_during_the_build_end_at_once() -> None:
    async def main() -> None:
        unstarted = Executor(settings=FencingSettings(), stall_seconds=60, counters=Counters())
        unstarted.begin_drain()
        await unstarted.drained()
        unstarted.stop()

        building = Executor(settings=FencingSettings(), stall_seconds=60, counters=Counters())
        go_on = threading.Event()
        threads: list[threading.Thread] = []

        def build() -> KvEngine:
            threads.append(threading.current_thread())
            assert go_on.wait(PATIENCE_SECONDS)
            return KvEngine()

        building.start(build)
        building.begin_drain()
        await building.drained()
        building.stop()
        go_on.set()
        await building.wait_ready()
        threads[0].join(PATIENCE_SECONDS)
        assert not threads[0].is_alive()
        assert not building.ready

    run(main())


# -- faults --


@pytest.mark.parametrize("failing", [1, 3], ids=["unsequenced", "sequenced"])
@pytest.mark.parametrize("error", [RuntimeError("secret"), EngineFaultError("secret"), MemoryError("secret")])
def test_a_step_that_fails_after_launch_acts_as_a_reset_and_the_lease_stays(failing: int, error: Exception) -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            old_epoch = world.epoch
            batches = [trial(), trial(), *(world.sequenced(step_id) for step_id in range(1, 5))]
            tasks = [world.send(batch) for batch in batches]
            for _ in range(failing):
                await gate.arrival()
                gate.let_one_pass()
            await gate.arrival()
            gate.let_one_pass(error)
            fault = await error_of(tasks[failing])
            assert type(fault) is EngineFaultError
            assert "secret" not in str(fault)
            for task in tasks[max(failing + 1, 2) :]:
                assert await reason_of(task) is PreconditionReason.KV_CACHE_LOST
            state = world.executor.state()
            assert state.worker_epoch != old_epoch
            assert (state.next_step_id, state.last_executed_step_id, state.lease_holder) == (1, 0, ALICE)
            # Answers of the old epoch are gone with it; the new one begins on a cleared cache.
            assert await reason_of(world.executor.submit(step_of(1, old_epoch))) is PreconditionReason.KV_CACHE_LOST
            gate.open()
            await world.executor.submit(world.sequenced(1))
            assert world.engine.num_resets == 1
            assert world.count("engine_faults_total") == 1
            assert world.executor.is_alive
            await settle(*tasks)

    run(main())


TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize("error", [RuntimeError("a fault"), FatalEngineError("the device is gone")])
def test_the_log_line_of_a_fault_carries_the_steps_identity_and_its_trace(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> int:
        async with worker() as world:
            gate = Gate(world.engine)
            epoch = world.epoch
            traceparent = f"00-{TRACE_ID}-b7ad6b7169203331-01"
            task = world.send(replace(world.sequenced(1), client_tag=34, traceparent=traceparent))
            await gate.arrival()
            gate.let_one_pass(error)
            await error_of(task)
            return epoch

    epoch = run(main())
    (record,) = (record for record in caplog.records if record.exc_info)
    fields = {name: vars(record)[name] for name in ("step_id", "epoch", "client_tag", "trace_id")}
    assert fields == {"step_id": 1, "epoch": epoch, "client_tag": 34, "trace_id": TRACE_ID}


def test_an_unsequenced_step_that_is_queued_behind_a_failing_one_still_runs() -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            failing, named, queued = world.send(trial()), world.send(step_of(0, world.epoch, router=0)), world.send(trial())
            await gate.arrival()
            gate.let_one_pass(RuntimeError())
            gate.open()
            assert isinstance(await error_of(failing), EngineFaultError)
            assert await reason_of(named) is PreconditionReason.KV_CACHE_LOST
            assert (await queued).worker_epoch == world.epoch

    run(main())


@pytest.mark.parametrize("error", [FatalEngineError("device lost"), SystemExit(3), KeyboardInterrupt()])
def test_a_fatal_error_fails_the_running_step_and_everything_queued_and_nothing_is_served_afterwards(error: BaseException) -> None:
    async def main() -> None:
        async with worker() as world:
            await world.executor.submit(world.sequenced(1))
            gate = Gate(world.engine)
            tasks = [world.send(world.sequenced(step_id)) for step_id in (2, 3, 4)]
            reset = asyncio.create_task(world.executor.reset_kv_cache(world.epoch))
            await gate.arrival()
            assert not world.executor.fatal.done()
            gate.let_one_pass(error)
            assert await world.executor.fatal is error
            outcomes = await settle(*tasks, reset)
            assert [type(outcome) for outcome in outcomes] == [EngineFaultError] + [UnavailableError] * 3
            for call in (world.sequenced(1), world.sequenced(2), trial()):
                assert isinstance(await error_of(world.executor.submit(call)), UnavailableError)
            assert isinstance(await error_of(world.executor.reset_kv_cache(world.epoch)), UnavailableError)
            assert (world.executor.is_alive, world.executor.ready) == (False, False)

    run(main())


@pytest.mark.parametrize("cause", ["fault", "request"])
def test_a_cache_that_can_not_be_cleared_is_fatal(cause: str) -> None:
    async def main() -> None:
        async with worker() as world:
            error = RuntimeError("the device is gone")

            def fail() -> None:
                raise error

            world.engine.before_reset = fail
            if cause == "fault":
                gate = Gate(world.engine)
                gate.let_one_pass(RuntimeError())
                assert isinstance(await error_of(world.executor.submit(trial())), EngineFaultError)
            else:
                assert isinstance(await error_of(world.executor.reset_kv_cache(world.epoch)), EngineFaultError)
            assert await world.executor.fatal is error

    run(main())


def test_what_the_engine_refuses_before_executing_is_not_consumed_and_those_after_it_are_answered_the_same_way() -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            epoch = world.epoch
            tasks = [world.send(world.sequenced(step_id)) for step_id in (1, 2, 3)]
            await gate.arrival()
            gate.let_one_pass()
            await gate.arrival()
            gate.let_one_pass(PreconditionError(PreconditionReason.FEEDBACK_MISMATCH, "row 0 has no such token"))
            await tasks[0]
            for task in tasks[1:]:
                assert await reason_of(task) is PreconditionReason.FEEDBACK_MISMATCH
            assert (world.epoch, world.executor.state().next_step_id) == (epoch, 2)
            gate.open()
            await world.executor.submit(world.sequenced(2))
            assert world.executed_ids() == [1, 2]

    run(main())


# -- draining, stopping, health --


def test_a_drain_finishes_accepted_steps_refuses_new_ones_and_still_answers_retries() -> None:
    async def main() -> None:
        async with worker() as world:
            done = await world.executor.submit(world.sequenced(1))
            gate = Gate(world.engine)
            accepted = [world.send(world.sequenced(step_id)) for step_id in (2, 3, 4)]
            await gate.arrival()
            world.executor.begin_drain()
            drained = asyncio.create_task(world.executor.drained())
            assert (world.executor.ready, world.executor.is_alive) == (False, True)
            assert isinstance(await error_of(world.executor.submit(world.sequenced(5))), UnavailableError)
            assert isinstance(await error_of(world.executor.reset_kv_cache(world.epoch)), UnavailableError)
            assert (await world.executor.submit(world.sequenced(1))).result is done.result
            joined = world.send(world.sequenced(3))
            assert not drained.done()
            gate.open()
            await drained
            assert all(isinstance(outcome, Answer) for outcome in await settle(*accepted, joined))
            assert (await world.executor.submit(world.sequenced(4))).replayed
            assert world.executed_ids() == [1, 2, 3, 4]

    run(main())


@pytest.mark.parametrize("ending", ["idle", "cancelled", "failed"])
def test_a_drain_ends_however_the_last_step_ends(ending: str) -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            tasks = [] if ending == "idle" else [world.send(trial()), world.send(trial())]
            for _ in tasks[:1]:
                await gate.arrival()
            world.executor.begin_drain()
            for task in tasks if ending == "cancelled" else []:
                await asyncio.sleep(0)
                task.cancel()
            gate.let_one_pass(RuntimeError() if ending == "failed" else None)
            gate.let_one_pass()
            await world.executor.drained()
            await settle(*tasks)
            assert world.executor.num_steps_in_flight == 0

    run(main())


def test_stopping_refuses_what_is_queued_and_lets_the_running_step_answer() -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            tasks = [world.send(world.sequenced(step_id)) for step_id in (1, 2)]
            await gate.arrival()
            world.executor.stop()
            assert isinstance(await error_of(tasks[1]), UnavailableError)
            gate.open()
            assert isinstance(await tasks[0], Answer)
            assert isinstance(await error_of(world.executor.submit(trial())), UnavailableError)

    run(main())


def test_an_engine_that_outlives_the_event_loop_ends_quietly() -> None:
    engines: list[KvEngine] = []
    passed = threading.Event()

    async def main() -> None:
        executor = Executor(settings=FencingSettings(), stall_seconds=60, counters=Counters())
        arrived = asyncio.Event()
        loop = asyncio.get_running_loop()

        def hold(batch: StepBatch) -> None:
            loop.call_soon_threadsafe(arrived.set)
            assert passed.wait(PATIENCE_SECONDS)

        def build() -> KvEngine:
            engines.append(KvEngine())
            engines[0].before_step = hold
            return engines[0]

        executor.start(build)
        await executor.wait_ready()
        executor.admit(trial())
        await arrived.wait()
        executor.stop()

    run(main())
    passed.set()
    engines[0].thread.join(PATIENCE_SECONDS)
    assert not engines[0].thread.is_alive()
    assert len(engines[0].executed) == 1


def test_a_step_over_the_limit_is_a_stall_until_it_ends_and_an_idle_worker_is_none() -> None:
    async def main() -> None:
        async with worker(stall_seconds=1.0) as world:
            await asyncio.sleep(1.1)
            assert not world.executor.stalled
            gate = Gate(world.engine)
            tasks = [world.send(trial()), world.send(trial())]
            await gate.arrival()
            assert not world.executor.stalled
            await until(lambda: world.executor.stalled)
            assert world.executor.is_alive
            gate.let_one_pass()
            await gate.arrival()
            assert not world.executor.stalled
            gate.open()
            await asyncio.gather(*tasks)
            await asyncio.sleep(1.1)
            assert not world.executor.stalled

    run(main())


def test_clearing_the_cache_after_a_fault_can_stall_too() -> None:
    async def main() -> None:
        async with worker(stall_seconds=0.2) as world:
            go_on = threading.Event()
            world.engine.before_reset = lambda: go_on.wait(PATIENCE_SECONDS)
            Gate(world.engine).let_one_pass(RuntimeError())
            await error_of(world.executor.submit(trial()))
            await until(lambda: world.executor.stalled)
            go_on.set()

    run(main())
