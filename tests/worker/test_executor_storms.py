"""Random disconnects, cancellations, deadlines, faults and resets against the executor."""

import asyncio
import itertools
import random
import time

import pytest

from modelworker.worker.batch import StepBatch
from modelworker.worker.errors import PreconditionError, WorkerError
from modelworker.worker.ticket import Answer
from modelworker_testing.executor_world import ALICE, BOB, NUM_BLOCKS, World, run, settle, step_of, token, trial, worker

NUM_DISCONNECTS = 200
NUM_SEQUENCES = 4
NUM_ROUNDS = 150
PROMPTS = ((1, 2, 3), (4, 5), (6,), (7, 8, 9, 10))
BLOCKS_PER_SEQUENCE = (NUM_BLOCKS - 1) // NUM_SEQUENCES


def decode_step(index: int, sampled: list[int], epoch: int) -> StepBatch:
    """Returns the step of an index: the sequences take turns, each feeds what was sampled for it four steps before."""
    row, number = index % NUM_SEQUENCES, index // NUM_SEQUENCES
    blocks = tuple(range(1 + row * BLOCKS_PER_SEQUENCE, 1 + (row + 1) * BLOCKS_PER_SEQUENCE))
    if number == 0:
        return step_of(index + 1, epoch, tokens=PROMPTS[row], blocks=blocks)
    last = (sampled[index - NUM_SEQUENCES],)
    return step_of(index + 1, epoch, tokens=last, context=len(PROMPTS[row]) + number - 1, blocks=blocks)


async def undisturbed() -> list[int]:
    async with worker() as world:
        sampled: list[int] = []
        for index in range(NUM_SEQUENCES * NUM_ROUNDS):
            sampled.append(token(await world.executor.submit(decode_step(index, sampled, world.epoch))))
        return sampled


class Router:
    """Keeps three steps in flight, loses its connection at random points of their lives, and resumes by step id."""

    def __init__(self, world: World, chance: random.Random) -> None:
        self._world = world
        self._chance = chance
        self._epoch = world.epoch
        self.sampled: list[int] = []

    def send(self, index: int) -> "asyncio.Task[Answer]":
        return asyncio.ensure_future(self._world.executor.submit(decode_step(index, self.sampled, self._epoch)))

    def send_next(self, count: int) -> list["asyncio.Task[Answer]"]:
        end = min(len(self.sampled) + count, NUM_SEQUENCES * NUM_ROUNDS)
        return [self.send(index) for index in range(len(self.sampled), end)]

    async def lose_connection(self) -> None:
        """Sends three steps, cancels them, and keeps the answers that had arrived."""
        tasks = self.send_next(3)
        for _ in range(self._chance.choice((0, 1, 1, 2, 3, 10))):
            await asyncio.sleep(0)
        await asyncio.sleep(self._chance.choice((0, 0, 0.0003, 0.001)))
        # Now and then the new connection is faster than the news of the old one's end.
        early = self.send_next(self._chance.choice((0, 0, 1, 2)))
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        for outcome in itertools.takewhile(lambda outcome: isinstance(outcome, Answer), await settle(*tasks)):
            self.sampled.append(token(outcome))
        await settle(*early)

    async def finish(self) -> None:
        while tasks := self.send_next(3):
            self.sampled += [token(answer) for answer in await asyncio.gather(*tasks)]


@pytest.mark.parametrize("seed", range(3))
def test_a_router_that_loses_its_connection_200_times_resumes_with_the_tokens_of_an_undisturbed_run(seed: int) -> None:
    async def main() -> None:
        chance = random.Random(seed)
        expected = await undisturbed()
        async with worker() as world:
            router = Router(world, chance)
            epoch = world.epoch
            pauses = random.Random(seed)  # The engine thread's own.
            world.engine.before_step = lambda batch: time.sleep(pauses.choice((0, 0, 0.0005)))
            for _ in range(NUM_DISCONNECTS):
                assert len(router.sampled) < len(expected)
                await router.lose_connection()
            await router.finish()
            assert router.sampled == expected
            # Each step exactly once, in order, in one epoch.
            assert world.engine.executed == [(epoch, ALICE, step_id) for step_id in range(1, len(expected) + 1)]
            assert world.count('steps_executed_total{sequenced="true"}') == len(expected)
            # The disconnects hit steps that were queued, running and executed.
            assert world.count('steps_dropped_total{reason="cancelled"}') > 0
            assert world.count("steps_joined_total") > 0
            assert world.count("steps_replayed_total") > 0

    run(main())


@pytest.mark.parametrize("seed", range(4))
def test_in_a_storm_of_cancellations_deadlines_faults_and_resets_every_call_ends_and_no_step_runs_twice(seed: int) -> None:
    async def main() -> None:
        chance = random.Random(seed)
        async with worker(max_steps_in_flight=8) as world:
            numbers = itertools.count(1)
            pauses = random.Random(seed)  # The engine thread's own.

            def disturb(batch: StepBatch) -> None:
                if next(numbers) % 40 == 0:
                    raise RuntimeError("every 40th step fails")
                time.sleep(pauses.choice((0, 0, 0.0005)))

            world.engine.before_step = disturb

            async def call() -> object:
                kind = chance.random()
                deadline_seconds = chance.choice((None, None, 0.0005, 0.003))
                state = world.executor.state()
                if kind < 0.03:
                    return await world.executor.reset_kv_cache(state.worker_epoch)
                if kind < 0.2:
                    return await world.executor.submit(trial(deadline_seconds=deadline_seconds))
                step_id = max(1, state.next_step_id + chance.choice((-2, -1, 0, 0, 0, 0, 1)))
                router = chance.choice((ALICE, ALICE, ALICE, BOB))
                return await world.executor.submit(
                    step_of(step_id, state.worker_epoch, router=router, deadline_seconds=deadline_seconds)
                )

            tasks: list[asyncio.Task[object]] = []
            for _ in range(1500):
                tasks.append(asyncio.create_task(call()))
                await asyncio.sleep(chance.choice((0, 0, 0, 0, 0, 0, 0, 0.001)))
                if chance.random() < 0.3:
                    chance.choice(tasks[-8:]).cancel()
            outcomes = await settle(*tasks)
            assert all(isinstance(outcome, Answer | int | WorkerError | asyncio.CancelledError) for outcome in outcomes)
            assert {Answer, asyncio.CancelledError, PreconditionError} <= {type(outcome) for outcome in outcomes}

            world.executor.begin_drain()
            await world.executor.drained()
            assert (world.executor.num_queued, world.executor.num_steps_in_flight) == (0, 0)
            executed = [(epoch, router, step_id) for epoch, router, step_id in world.engine.executed if step_id > 0]
            epochs = {epoch for epoch, _, _ in executed}
            assert len(epochs) > 3
            for epoch in epochs:
                ids = [step_id for its_epoch, _, step_id in executed if its_epoch == epoch]
                assert ids == list(range(1, len(ids) + 1))
                assert len({router for its_epoch, router, _ in executed if its_epoch == epoch}) == 1

    run(main())
