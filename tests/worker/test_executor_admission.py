"""The queue in front of the engine: retries, cancellation, deadlines, the in-flight limit, resets and leases."""

import asyncio
import time

import pytest

from modelworker.worker.errors import (
    OverloadedError,
    PreconditionError,
    PreconditionReason,
    StepCancelledError,
    StepDeadlineError,
    StepIdReusedError,
)
from modelworker.worker.ticket import Answer
from modelworker_testing.executor_world import ALICE, BOB, Gate, error_of, reason_of, run, settle, step_of, token, trial, worker

# -- retries --


def test_a_retry_of_an_executed_step_gets_the_same_answer_and_nothing_runs() -> None:
    async def main() -> None:
        async with worker() as world:
            batch = world.sequenced(1, tokens=(1, 2, 3))
            first = await world.executor.submit(batch)
            again = await world.executor.submit(batch)
            assert again.result is first.result
            assert (first.replayed, again.replayed) == (False, True)
            assert again.worker_epoch == first.worker_epoch == world.epoch
            assert world.executed_ids() == [1]
            assert world.count("steps_replayed_total") == 1

    run(main())


def test_other_content_under_an_executed_queued_or_running_id_is_refused() -> None:
    async def main() -> None:
        async with worker() as world:
            await world.executor.submit(world.sequenced(1, tokens=(1,)))
            gate = Gate(world.engine)
            tasks = [world.send(world.sequenced(step_id, tokens=(1,))) for step_id in (2, 3)]
            await gate.arrival()
            for step_id in (1, 2, 3):
                assert isinstance(await error_of(world.executor.submit(world.sequenced(step_id, tokens=(9,)))), StepIdReusedError)
            gate.open()
            await asyncio.gather(*tasks)
            assert world.executed_ids() == [1, 2, 3]

    run(main())


@pytest.mark.parametrize(("max_in_flight", "num_kept"), [(2, 8), (8, 16)])
def test_an_id_older_than_the_kept_answers_is_refused_naming_the_expected_one(max_in_flight: int, num_kept: int) -> None:
    async def main() -> None:
        async with worker(max_steps_in_flight=max_in_flight) as world:
            batches = [world.sequenced(step_id) for step_id in range(1, num_kept + 3)]
            for batch in batches:
                await world.executor.submit(batch)
            for batch in batches[2:]:
                assert (await world.executor.submit(batch)).replayed
            for batch in batches[:2]:
                error = await error_of(world.executor.submit(batch))
                assert isinstance(error, PreconditionError)
                assert error.reason is PreconditionReason.STEP_OUT_OF_ORDER
                assert error.metadata["expected_step_id"] == str(num_kept + 3)

    run(main())


def test_kept_answers_are_bounded_in_memory() -> None:
    async def main() -> None:
        async with worker(max_replay_memory=5000) as world:
            batches = [world.sequenced(step_id) for step_id in range(1, 31)]
            for batch in batches:
                await world.executor.submit(batch)
            outcomes = await settle(*(asyncio.ensure_future(world.executor.submit(batch)) for batch in batches))
            kept = [isinstance(outcome, Answer) for outcome in outcomes]
            assert kept == [False] * 26 + [True] * 4

    run(main())


def test_duplicates_of_a_running_and_of_a_queued_step_join_it() -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            batches = [world.sequenced(1, tokens=(1,)), world.sequenced(2, tokens=(2,), context=1)]
            tasks = [world.send(batch) for batch in batches]
            await gate.arrival()
            tasks += [world.send(batch) for batch in batches for _ in range(3)]
            assert world.executor.num_steps_in_flight == 2
            gate.open()
            answers = await asyncio.gather(*tasks)
            assert len({id(answer.result) for answer in answers}) == 2
            assert world.executed_ids() == [1, 2]
            assert world.count("steps_joined_total") == 6

    run(main())


def test_callers_that_join_one_step_are_bounded_too() -> None:
    async def main() -> None:
        async with worker(max_steps_in_flight=4) as world:
            gate = Gate(world.engine)
            batch = world.sequenced(1)
            tasks = [world.send(batch) for _ in range(4)]
            await asyncio.sleep(0)
            with pytest.raises(OverloadedError):
                world.executor.admit(batch)
            await gate.arrival()
            # A router that gives up and retries, over and over, during one long step never runs into the bound.
            for _ in range(50):
                tasks[0].cancel()
                await settle(tasks[0])
                tasks[0] = world.send(batch)
                await asyncio.sleep(0)
            gate.open()
            await asyncio.gather(*tasks)
            assert world.executed_ids() == [1]

    run(main())


def test_after_a_restart_steps_of_the_old_worker_are_refused_with_the_new_epoch() -> None:
    async def main() -> None:
        async with worker() as before:
            await before.executor.submit(before.sequenced(1))
            late = before.sequenced(2, context=1)
        async with worker() as after:
            error = await error_of(after.executor.submit(late))
            assert isinstance(error, PreconditionError)
            assert error.reason is PreconditionReason.KV_CACHE_LOST
            assert error.metadata["worker_epoch"] == str(after.epoch)
            assert not after.engine.executed

    run(main())


# -- cancellation --


def test_a_queued_step_that_nobody_waits_for_is_dropped_and_those_after_it_are_answered_the_same_way_in_one_turn() -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            tasks = [world.send(world.sequenced(step_id)) for step_id in range(1, 7)]
            await gate.arrival()
            await asyncio.sleep(0)
            tasks[2].cancel()
            done, _ = await asyncio.wait(tasks[3:], return_when=asyncio.FIRST_COMPLETED)
            assert done == set(tasks[3:])
            outcomes = await settle(*tasks[3:])
            assert [type(outcome) for outcome in outcomes] == [StepCancelledError] * 3
            assert "step 3" in str(outcomes[0])
            assert world.executor.state().next_step_id == 3
            assert world.executor.num_steps_in_flight == 2
            tasks[2] = world.send(world.sequenced(3, tokens=(99,)))
            gate.open()
            await asyncio.gather(*tasks[:3])
            assert world.executed_ids() == [1, 2, 3]
            assert world.count('steps_dropped_total{reason="cancelled"}') == 4

    run(main())


def test_a_cancelled_unsequenced_step_takes_no_other_along() -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            tasks = [world.send(trial(tokens=(number,))) for number in range(4)]
            await gate.arrival()
            await asyncio.sleep(0)
            tasks[1].cancel()
            await asyncio.sleep(0)
            gate.open()
            await settle(*tasks)
            assert len(world.engine.executed) == 3
            assert [task.cancelled() for task in tasks] == [False, True, False, False]

    run(main())


def test_a_step_goes_on_while_one_of_its_callers_is_left() -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            blocker, batch = world.send(world.sequenced(1)), world.sequenced(2)
            first, second = world.send(batch), world.send(batch)
            await gate.arrival()
            await asyncio.sleep(0)
            first.cancel()
            gate.open()
            await settle(first)
            assert token(await second) > 0
            await blocker
            assert world.executed_ids() == [1, 2]

    run(main())


def test_a_ticket_that_is_withdrawn_without_being_awaited_counts_as_gone() -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            blocker = world.send(world.sequenced(1))
            await gate.arrival()
            world.executor.admit(world.sequenced(2)).withdraw()
            assert world.executor.state().next_step_id == 2
            gate.open()
            await blocker

    run(main())


def test_a_running_step_finishes_after_its_caller_has_gone_and_its_answer_is_kept() -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            batch = world.sequenced(1, tokens=(5,))
            task = world.send(batch)
            await gate.arrival()
            task.cancel()
            await settle(task)
            assert world.executor.state().last_executed_step_id == 0
            joined = world.send(batch)
            gate.open()
            assert token(await joined) == token(await world.executor.submit(batch))
            assert world.executor.state().last_executed_step_id == 1
            assert world.executed_ids() == [1]

    run(main())


def test_blocks_of_a_cancelled_running_step_can_be_reused_at_once_because_steps_never_overlap() -> None:
    async def main() -> None:
        async with worker() as alone:
            expected = token(await alone.executor.submit(alone.sequenced(1, tokens=(4, 5, 6))))
        async with worker() as world:
            gate = Gate(world.engine)
            abandoned = world.send(world.sequenced(1, tokens=(1, 2, 3)))
            await gate.arrival()
            abandoned.cancel()
            reusing = world.send(world.sequenced(2, tokens=(4, 5, 6)))
            gate.open()
            assert token(await reusing) == expected
            assert world.executed_ids() == [1, 2]

    run(main())


# -- deadlines --


def test_a_step_whose_deadline_has_passed_on_arrival_is_refused_and_its_id_is_free() -> None:
    async def main() -> None:
        async with worker() as world:
            with pytest.raises(StepDeadlineError):
                world.executor.admit(world.sequenced(1, deadline_seconds=-0.001))
            assert world.executor.state().next_step_id == 1
            await world.executor.submit(world.sequenced(1))

    run(main())


def test_a_step_whose_deadline_passes_while_it_is_queued_never_runs_nor_do_those_after_it() -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            running = world.send(world.sequenced(1))
            await gate.arrival()
            late = world.send(world.sequenced(2, deadline_seconds=0.1))
            after = [world.send(world.sequenced(step_id)) for step_id in (3, 4)]
            outcomes = await settle(late, *after)  # answered while the engine is still held
            assert [type(outcome) for outcome in outcomes] == [StepDeadlineError] * 3
            assert world.executor.state().next_step_id == 2
            gate.open()
            await running
            assert world.executed_ids() == [1]
            assert world.count('steps_dropped_total{reason="late"}') == 3

    run(main())


def test_the_engine_itself_refuses_a_late_step_when_the_event_loop_is_too_busy_to_notice() -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            running = world.send(world.sequenced(1))
            await gate.arrival()
            late = [world.send(world.sequenced(2, deadline_seconds=0.1)), world.send(world.sequenced(3))]
            time.sleep(0.12)
            gate.open()
            while world.executor.num_queued:  # the event loop does not get to run
                time.sleep(0.001)
            outcomes = await settle(*late)
            assert [type(outcome) for outcome in outcomes] == [StepDeadlineError] * 2
            await running
            assert world.executed_ids() == [1]

    run(main())


@pytest.mark.parametrize("loop_is_busy", [False, True])
def test_each_caller_has_its_own_deadline_and_the_step_lives_until_the_latest(loop_is_busy: bool) -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            running = world.send(world.sequenced(1))
            await gate.arrival()
            hasty = world.send(world.sequenced(2, deadline_seconds=0.1))
            patient = world.send(world.sequenced(2))
            if loop_is_busy:
                time.sleep(0.12)
                gate.open()
                while world.executor.num_queued:
                    time.sleep(0.001)
            assert isinstance(await error_of(hasty), StepDeadlineError)
            gate.open()
            await asyncio.gather(running, patient)
            assert world.executed_ids() == [1, 2]

    run(main())


def test_a_step_that_has_started_is_answered_even_after_its_deadline() -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            task = world.send(world.sequenced(1, deadline_seconds=1.0))
            await gate.arrival()
            await asyncio.sleep(1.05)
            gate.open()
            assert token(await task) > 0

    run(main())


# -- admission --


@pytest.mark.parametrize("sequenced", [True, False])
def test_with_a_limit_of_4_exactly_16_of_20_steps_at_once_are_refused_within_50_ms(sequenced: bool) -> None:
    async def main() -> None:
        async with worker(max_steps_in_flight=4) as world:
            gate = Gate(world.engine)
            begun = time.thread_time()
            tasks = [
                asyncio.create_task(world.executor.submit(world.sequenced(number) if sequenced else trial()))
                for number in range(1, 21)
            ]
            # Without waiting for anything: all that it may take is turns of the loop, and their CPU time.
            for _ in range(3):
                await asyncio.sleep(0)
            refused = [task for task in tasks if task.done()]
            assert time.thread_time() - begun < 0.05
            assert len(refused) == 16
            assert world.executor.num_steps_in_flight == 4
            for task in refused:
                error = task.exception()
                assert isinstance(error, OverloadedError)
                assert error.retry_after_ms > 0
            await gate.arrival()
            gate.open()
            assert sum(isinstance(outcome, Answer) for outcome in await settle(*tasks)) == 4
            assert len(world.engine.executed) == 4
            assert world.executor.num_steps_in_flight == 0

    run(main())


def test_a_place_is_free_as_soon_as_an_answer_arrives() -> None:
    async def main() -> None:
        async with worker(max_steps_in_flight=1) as world:
            for step_id in range(1, 301):
                await world.executor.submit(world.sequenced(step_id))

    run(main())


def test_the_advice_when_to_retry_follows_the_length_of_the_running_step() -> None:
    async def main() -> None:
        async with worker(max_steps_in_flight=1) as world:
            gate = Gate(world.engine)
            task = world.send(trial())
            await gate.arrival()
            await asyncio.sleep(0.05)
            error = await error_of(world.executor.submit(trial()))
            assert isinstance(error, OverloadedError)
            assert 50 <= error.retry_after_ms < 5000
            gate.open()
            await task

    run(main())


def test_resets_are_bounded_too_and_do_not_take_the_places_of_steps() -> None:
    async def main() -> None:
        async with worker(max_steps_in_flight=2) as world:
            gate = Gate(world.engine)
            running = world.send(trial())
            await gate.arrival()
            resets = [asyncio.create_task(world.executor.reset_kv_cache(world.epoch)) for _ in range(10)]
            await asyncio.sleep(0)
            assert sum(isinstance(task.exception(), OverloadedError) for task in resets if task.done()) == 6
            queued = world.send(trial())
            gate.open()
            outcomes = await settle(*resets)
            assert sum(isinstance(outcome, int) for outcome in outcomes) == 1
            assert sum(isinstance(outcome, PreconditionError) for outcome in outcomes) == 3
            await asyncio.gather(running, queued)

    run(main())


# -- resets, leases, two routers --


def test_a_reset_waits_for_the_steps_before_it_clears_the_cache_and_starts_an_epoch_without_a_lease() -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            old_epoch = world.epoch
            before = [world.send(world.sequenced(step_id)) for step_id in (1, 2)]
            reset = asyncio.create_task(world.executor.reset_kv_cache(old_epoch))
            await asyncio.sleep(0)
            after = world.send(world.sequenced(3))
            await gate.arrival()
            assert world.epoch == old_epoch
            gate.open()
            new_epoch = await reset
            await asyncio.gather(*before)
            assert await reason_of(after) is PreconditionReason.KV_CACHE_LOST
            state = world.executor.state()
            assert new_epoch == state.worker_epoch != old_epoch
            assert (state.next_step_id, state.lease_holder) == (1, 0)
            assert not world.engine.cache.any()
            assert world.executed_ids() == [1, 2]

    run(main())


def test_a_reset_of_another_epoch_does_nothing() -> None:
    async def main() -> None:
        async with worker() as world:
            epoch = world.epoch
            await world.executor.submit(world.sequenced(1))
            assert await reason_of(world.executor.reset_kv_cache(epoch ^ 1)) is PreconditionReason.KV_CACHE_LOST
            assert world.epoch == epoch
            assert world.engine.num_resets == 0
            assert (await world.executor.submit(world.sequenced(1))).replayed

    run(main())


def test_a_reset_whose_caller_has_gone_before_its_turn_does_nothing() -> None:
    async def main() -> None:
        async with worker() as world:
            gate = Gate(world.engine)
            epoch = world.epoch
            running = world.send(world.sequenced(1))
            await gate.arrival()
            reset = asyncio.create_task(world.executor.reset_kv_cache(epoch))
            await asyncio.sleep(0)
            reset.cancel()
            await settle(reset)
            gate.open()
            await running
            await world.executor.submit(world.sequenced(2))
            assert (world.epoch, world.engine.num_resets) == (epoch, 0)

    run(main())


def test_the_second_router_is_refused_takes_over_by_a_reset_and_the_firsts_late_step_is_refused() -> None:
    async def main() -> None:
        async with worker() as world:
            await world.executor.submit(world.sequenced(1))
            late = world.sequenced(2, context=1)
            assert await reason_of(world.executor.submit(world.sequenced(2, router=BOB))) is PreconditionReason.WORKER_OWNED
            assert await reason_of(world.executor.submit(trial())) is PreconditionReason.WORKER_OWNED
            await world.executor.reset_kv_cache(world.epoch)
            await world.executor.submit(world.sequenced(1, router=BOB))
            assert await reason_of(world.executor.submit(late)) is PreconditionReason.KV_CACHE_LOST
            assert await reason_of(world.executor.submit(world.sequenced(2))) is PreconditionReason.WORKER_OWNED
            assert [router for _, router, _ in world.engine.executed] == [ALICE, BOB]

    run(main())


def test_after_the_leases_idle_expiry_another_router_takes_over_a_cleared_cache() -> None:
    async def main() -> None:
        async with worker(lease_idle_seconds=0.03) as world:
            await world.executor.submit(world.sequenced(1, tokens=(1, 2, 3)))
            stale = world.sequenced(2)
            await asyncio.sleep(0.05)
            assert await reason_of(world.executor.submit(world.sequenced(1, router=BOB))) is PreconditionReason.KV_CACHE_LOST
            seen: list[bool] = []
            world.engine.before_step = lambda batch: seen.append(bool(world.engine.cache.any()))
            await world.executor.submit(world.sequenced(1, router=BOB))
            assert seen == [False]
            assert world.executor.state().lease_holder == BOB
            assert await reason_of(world.executor.submit(stale)) is PreconditionReason.KV_CACHE_LOST
            await asyncio.sleep(0.05)
            assert (await world.executor.submit(trial())).worker_epoch == world.epoch
            assert seen == [False, False]
            assert world.executor.state().lease_holder == 0
            assert world.count('kv_cache_resets_total{reason="takeover"}') == 2

    run(main())


def test_a_queued_step_is_checked_again_right_before_it_runs() -> None:
    async def main() -> None:
        async with worker(lease_idle_seconds=0.03) as world:
            gate = Gate(world.engine)
            running, queued = world.send(trial()), world.send(step_of(0, world.epoch, router=0))
            await gate.arrival()
            # A router takes the lease, leaves before its step runs, and the lease expires under the queued step.
            world.executor.admit(world.sequenced(1)).withdraw()
            await asyncio.sleep(0.05)
            assert await reason_of(world.executor.submit(world.sequenced(1, router=BOB))) is PreconditionReason.KV_CACHE_LOST
            gate.open()
            assert await reason_of(queued) is PreconditionReason.KV_CACHE_LOST
            assert (await running).worker_epoch != world.epoch
            assert len(world.engine.executed) == 1

    run(main())


def test_a_step_that_runs_longer_than_the_lease_keeps_it() -> None:
    async def main() -> None:
        async with worker(lease_idle_seconds=0.02) as world:
            gate = Gate(world.engine)
            task = world.send(world.sequenced(1))
            await gate.arrival()
            await asyncio.sleep(0.04)
            assert await reason_of(world.executor.submit(world.sequenced(2, router=BOB))) is PreconditionReason.WORKER_OWNED
            gate.open()
            await task

    run(main())
