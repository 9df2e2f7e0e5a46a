"""Fencing as a pure state machine: the sentences of the protocol one by one, then random histories against a model."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelworker.worker.errors import PreconditionError, PreconditionReason, StepIdReusedError
from modelworker.worker.fencing import NOBODY, Fence

IDLE_SECONDS = 30.0
ALICE, BOB = 11, 22


@dataclass(frozen=True)
class IncomingStep:
    step_id: int
    worker_epoch: int
    router_id: int = ALICE
    digest: bytes = b"content"

    @property
    def is_sequenced(self) -> bool:
        return self.step_id > 0


@dataclass
class Clock:
    seconds: float = 1000.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class World:
    require_fencing: bool = False
    max_replays: int = 8
    max_replay_bytes: int = 1000
    clock: Clock = field(default_factory=Clock)
    fence: Fence[str] = field(init=False)

    def __post_init__(self) -> None:
        self.fence = Fence(
            require_fencing=self.require_fencing,
            lease_idle_seconds=IDLE_SECONDS,
            max_replays=self.max_replays,
            max_replay_bytes=self.max_replay_bytes,
            clock=self.clock,
        )

    def step(self, step_id: int, router_id: int = ALICE, digest: bytes = b"content") -> IncomingStep:
        return IncomingStep(step_id, self.fence.epoch, router_id, digest)

    def execute(self, step: IncomingStep, *, num_bytes: int = 1) -> None:
        self.fence.admit(step)
        self.fence.confirm(step)
        self.fence.finish(step, f"answer {step.step_id}", num_bytes)


def refusal(call: object, *arguments: object) -> tuple[PreconditionReason, dict[str, str]]:
    with pytest.raises(PreconditionError) as caught:
        call(*arguments)  # type: ignore[operator]
    return caught.value.reason, caught.value.metadata


def test_epochs_are_random_64_bit_numbers_and_never_zero() -> None:
    epochs = {World().fence.epoch for _ in range(200)}
    assert len(epochs) == 200
    assert all(0 < epoch < 2**64 for epoch in epochs)
    assert max(epochs) > 2**60


def test_every_new_epoch_differs_from_the_one_before() -> None:
    world = World()
    epochs = [world.fence.epoch]
    for _ in range(100):
        world.fence.begin_epoch(holder=NOBODY)
        epochs.append(world.fence.epoch)
    assert len(set(epochs)) == len(epochs)


def test_steps_are_expected_in_the_order_of_their_ids_starting_at_1() -> None:
    world = World()
    assert refusal(world.fence.admit, world.step(2)) == (PreconditionReason.STEP_OUT_OF_ORDER, {"expected_step_id": "1"})
    world.fence.admit(world.step(1))
    world.fence.admit(world.step(2))
    assert refusal(world.fence.admit, world.step(4)) == (PreconditionReason.STEP_OUT_OF_ORDER, {"expected_step_id": "3"})
    assert world.fence.state.next_step_id == 3


def test_a_step_of_another_epoch_is_refused_naming_the_epoch_and_the_expected_id() -> None:
    world = World()
    world.execute(world.step(1))
    reason, metadata = refusal(world.fence.admit, IncomingStep(2, world.fence.epoch ^ 1))
    assert reason is PreconditionReason.KV_CACHE_LOST
    assert metadata == {"worker_epoch": str(world.fence.epoch), "expected_step_id": "2"}


@pytest.mark.parametrize("epoch", [0, 5])
def test_a_sequenced_step_needs_the_very_epoch_and_0_is_none(epoch: int) -> None:
    assert refusal(World().fence.admit, IncomingStep(1, epoch))[0] is PreconditionReason.KV_CACHE_LOST


def test_an_unsequenced_step_may_leave_the_epoch_open_but_not_name_a_wrong_one() -> None:
    world = World()
    world.fence.admit(IncomingStep(0, 0))
    world.fence.admit(IncomingStep(0, world.fence.epoch))
    assert refusal(world.fence.admit, IncomingStep(0, 5))[0] is PreconditionReason.KV_CACHE_LOST


def test_unsequenced_steps_are_refused_where_fencing_is_required() -> None:
    world = World(require_fencing=True)
    assert refusal(world.fence.admit, IncomingStep(0, 0))[0] is PreconditionReason.FENCING_REQUIRED
    world.fence.admit(world.step(1))


def test_the_last_executed_id_moves_when_execution_ends_not_when_it_starts() -> None:
    world = World()
    step = world.step(1)
    world.fence.admit(step)
    world.fence.confirm(step)
    assert world.fence.state.last_executed_step_id == 0
    world.fence.finish(step, "answer", 1)
    assert world.fence.state.last_executed_step_id == 1


def test_a_dropped_step_takes_the_later_ones_along_and_its_id_is_expected_again() -> None:
    world = World()
    for step_id in (1, 2, 3, 4):
        world.fence.admit(world.step(step_id))
    world.fence.drop(world.step(2))
    assert world.fence.state.next_step_id == 2
    world.fence.admit(world.step(2, digest=b"other content is fine: nothing was executed"))


def test_a_retry_of_an_executed_step_gets_its_answer_and_other_content_is_refused() -> None:
    world = World()
    world.execute(world.step(1))
    assert world.fence.recall(world.step(1)) == "answer 1"
    with pytest.raises(StepIdReusedError):
        world.fence.recall(world.step(1, digest=b"other"))


def test_other_content_under_the_id_of_a_step_in_flight_is_refused() -> None:
    world = World()
    world.fence.admit(world.step(1))
    assert world.fence.recall(world.step(1)) is None
    with pytest.raises(StepIdReusedError):
        world.fence.recall(world.step(1, digest=b"other"))


def test_answers_are_kept_up_to_their_number_and_an_older_id_is_out_of_order() -> None:
    world = World(max_replays=8)
    for step_id in range(1, 21):
        world.execute(world.step(step_id))
    assert [world.fence.recall(world.step(step_id)) for step_id in range(11, 21)] == [None, None] + [
        f"answer {step_id}" for step_id in range(13, 21)
    ]
    assert refusal(world.fence.admit, world.step(12)) == (PreconditionReason.STEP_OUT_OF_ORDER, {"expected_step_id": "21"})


def test_answers_are_kept_up_to_their_memory_and_the_newest_one_always() -> None:
    world = World(max_replay_bytes=1000)
    for step_id in (1, 2, 3):
        world.execute(world.step(step_id), num_bytes=400)
    assert [world.fence.recall(world.step(step_id)) for step_id in (1, 2, 3)] == [None, "answer 2", "answer 3"]
    world.execute(world.step(4), num_bytes=5000)
    assert [world.fence.recall(world.step(step_id)) for step_id in (2, 3, 4)] == [None, None, "answer 4"]
    world.execute(world.step(5), num_bytes=1000)
    assert [world.fence.recall(world.step(step_id)) for step_id in (4, 5)] == [None, "answer 5"]


def test_the_first_sequenced_step_takes_the_lease_and_others_are_refused_naming_the_holder() -> None:
    world = World()
    world.fence.admit(world.step(1))
    assert world.fence.state.lease_holder == ALICE
    reason, metadata = refusal(world.fence.admit, world.step(2, BOB))
    assert reason is PreconditionReason.WORKER_OWNED
    assert metadata["lease_holder"] == str(ALICE)
    assert refusal(world.fence.admit, IncomingStep(0, 0))[0] is PreconditionReason.WORKER_OWNED


def test_a_refused_step_takes_no_lease() -> None:
    world = World()
    refusal(world.fence.admit, world.step(7, BOB))
    assert world.fence.state.lease_holder == NOBODY


def test_another_router_is_never_given_the_holders_answers() -> None:
    world = World()
    world.execute(world.step(1))
    assert world.fence.recall(world.step(1, BOB)) is None
    assert refusal(world.fence.admit, world.step(1, BOB))[0] is PreconditionReason.WORKER_OWNED


def test_nobody_takes_over_before_the_lease_has_expired() -> None:
    world = World()
    world.execute(world.step(1))
    world.clock.seconds += IDLE_SECONDS - 0.25
    assert not world.fence.take_over(world.step(2, BOB))
    assert refusal(world.fence.admit, world.step(2, BOB))[1]["expires_in_ms"] == "250"


def test_taking_over_acts_as_a_reset_and_hands_the_lease_on() -> None:
    world = World()
    world.execute(world.step(1))
    late = world.step(2)
    takeover = world.step(2, BOB)
    world.clock.seconds += IDLE_SECONDS
    assert world.fence.take_over(takeover)
    assert world.fence.state.lease_holder == BOB
    assert world.fence.state.next_step_id == 1
    assert world.fence.state.worker_epoch != takeover.worker_epoch
    # Both have to learn that the KV is gone: the new owner, who may have counted on it, and the old one.
    assert refusal(world.fence.admit, takeover)[0] is PreconditionReason.KV_CACHE_LOST
    assert refusal(world.fence.admit, late)[0] is PreconditionReason.KV_CACHE_LOST
    assert world.fence.recall(world.step(1)) is None
    world.fence.admit(world.step(1, BOB))
    assert refusal(world.fence.admit, world.step(2))[0] is PreconditionReason.WORKER_OWNED


def test_a_stale_step_of_another_router_takes_nothing_over() -> None:
    world = World()
    world.execute(world.step(1))
    world.clock.seconds += 10 * IDLE_SECONDS
    assert not world.fence.take_over(IncomingStep(2, world.fence.epoch ^ 1, BOB))
    assert world.fence.state.lease_holder == ALICE


def test_the_holder_of_an_expired_lease_goes_on_if_nobody_took_it_over() -> None:
    world = World()
    world.execute(world.step(1))
    world.clock.seconds += 10 * IDLE_SECONDS
    assert not world.fence.take_over(world.step(2))
    world.execute(world.step(2))
    assert not world.fence.take_over(world.step(3, BOB))


def test_a_lease_never_expires_while_a_step_of_its_holder_is_in_flight() -> None:
    world = World()
    world.fence.admit(world.step(1))
    world.clock.seconds += 10 * IDLE_SECONDS
    assert not world.fence.take_over(world.step(1, BOB))
    world.fence.finish(world.step(1), "answer", 1)
    assert not world.fence.take_over(world.step(2, BOB))
    world.clock.seconds += IDLE_SECONDS
    assert world.fence.take_over(world.step(2, BOB))


def test_a_retry_keeps_the_lease_alive() -> None:
    world = World()
    world.execute(world.step(1))
    world.clock.seconds += IDLE_SECONDS - 1
    assert world.fence.recall(world.step(1)) == "answer 1"
    world.clock.seconds += IDLE_SECONDS - 1
    assert not world.fence.take_over(world.step(2, BOB))


def test_an_unsequenced_step_after_expiry_ends_the_epoch_too_so_that_the_holder_learns_of_it() -> None:
    world = World()
    world.execute(world.step(1))
    old = world.step(2)
    world.clock.seconds += IDLE_SECONDS
    assert world.fence.take_over(IncomingStep(0, 0))
    assert world.fence.state.lease_holder == NOBODY
    world.fence.admit(IncomingStep(0, 0))
    assert refusal(world.fence.admit, old)[0] is PreconditionReason.KV_CACHE_LOST


def test_a_step_that_will_be_refused_anyway_takes_nothing_over() -> None:
    world = World(require_fencing=True)
    world.execute(world.step(1))
    world.clock.seconds += IDLE_SECONDS
    assert not world.fence.take_over(IncomingStep(0, 0))


def test_an_unsequenced_step_admitted_before_the_lease_still_runs() -> None:
    world = World()
    trial = IncomingStep(0, 0)
    world.fence.admit(trial)
    world.fence.admit(world.step(1))
    world.fence.confirm(trial)


@pytest.mark.parametrize("holder", [NOBODY, ALICE, BOB])
def test_nothing_of_an_epoch_survives_it(holder: int) -> None:
    world = World()
    world.execute(world.step(1))
    queued = world.step(2)
    world.fence.admit(queued)
    world.fence.begin_epoch(holder=holder)
    assert refusal(world.fence.confirm, queued)[0] is PreconditionReason.KV_CACHE_LOST
    assert world.fence.state.next_step_id == 1
    assert world.fence.state.last_executed_step_id == 0
    assert world.fence.state.lease_holder == holder


def test_a_step_is_checked_again_before_it_runs() -> None:
    world = World()
    for step_id in (1, 2):
        world.fence.admit(world.step(step_id))
    assert refusal(world.fence.confirm, world.step(2)) == (PreconditionReason.STEP_OUT_OF_ORDER, {"expected_step_id": "1"})
    assert refusal(world.fence.confirm, world.step(1, BOB))[0] is PreconditionReason.WORKER_OWNED


@dataclass
class Line:
    """One line of the model's log of an epoch: the line number is the step id."""

    digest: bytes
    num_bytes: int = 0
    executed: bool = False


class FencingHistory(RuleBasedStateMachine):
    """Random histories of three routers. The model is a log of the epoch from which every expectation is read off.

    The fence keeps counters, a map of what is in flight and a bounded table; the model keeps none of them.
    """

    MAX_REPLAYS = 4
    MAX_BYTES = 100
    ROUTERS = (1, 2, 3)

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.fence: Fence[tuple[int, bytes]] = Fence(
            require_fencing=False,
            lease_idle_seconds=IDLE_SECONDS,
            max_replays=self.MAX_REPLAYS,
            max_replay_bytes=self.MAX_BYTES,
            clock=self.clock,
        )
        self.log: list[Line] = []
        self.owner = NOBODY
        self.heard = self.clock.seconds
        self.epochs = [self.fence.epoch]

    # -- the model --

    def kept(self, step_id: int) -> bool:
        """An executed step's answer is kept while it and the younger ones fit into both bounds."""
        young = [line for line in self.log[step_id - 1 :] if line.executed]
        return len(young) <= self.MAX_REPLAYS and (len(young) == 1 or sum(line.num_bytes for line in young) <= self.MAX_BYTES)

    def num_executed(self) -> int:
        return sum(line.executed for line in self.log)

    def is_expired(self) -> bool:
        return self.num_executed() == len(self.log) and self.clock.seconds - self.heard >= IDLE_SECONDS

    def new_epoch(self, owner: int) -> None:
        self.log = []
        self.owner = owner
        self.heard = self.clock.seconds
        assert self.fence.epoch not in (0, *self.epochs)
        self.epochs.append(self.fence.epoch)

    def expected_refusal(self, step: IncomingStep) -> PreconditionReason | None:
        if step.worker_epoch != self.epochs[-1] and (step.is_sequenced or step.worker_epoch):
            return PreconditionReason.KV_CACHE_LOST
        if self.owner != NOBODY and (not step.is_sequenced or step.router_id != self.owner):
            return PreconditionReason.WORKER_OWNED
        if step.is_sequenced and step.step_id != len(self.log) + 1:
            return PreconditionReason.STEP_OUT_OF_ORDER
        return None

    # -- what happens --

    @rule(
        router=st.sampled_from(ROUTERS),
        offset=st.integers(-6, 2),
        digest=st.sampled_from([b"a", b"b"]),
        stale=st.integers(0, 9).map(lambda number: number == 0),
        sequenced=st.integers(0, 9).map(lambda number: number > 0),
    )
    def a_step_arrives(self, router: int, offset: int, digest: bytes, stale: bool, sequenced: bool) -> None:
        epoch = self.epochs[-2] if stale and len(self.epochs) > 1 else self.epochs[-1]
        if sequenced:
            self.arrive(IncomingStep(max(1, len(self.log) + 1 + offset), epoch, router, digest))
        else:
            self.arrive(IncomingStep(0, epoch if stale else 0, router, b""))

    @rule(digest=st.sampled_from([b"a", b"b"]))
    def the_owners_next_step_arrives(self, digest: bytes) -> None:
        self.arrive(IncomingStep(len(self.log) + 1, self.epochs[-1], self.owner or self.ROUTERS[0], digest))

    def arrive(self, step: IncomingStep) -> None:
        if self.is_a_retry(step):
            return
        takes_over = (
            self.owner != NOBODY
            and self.is_expired()
            and step.worker_epoch in ((self.epochs[-1],) if step.is_sequenced else (0, self.epochs[-1]))
            and (not step.is_sequenced or step.router_id != self.owner)
        )
        assert self.fence.take_over(step) == takes_over
        if takes_over:
            self.new_epoch(step.router_id if step.is_sequenced else NOBODY)
        expected = self.expected_refusal(step)
        if expected is not None:
            assert refusal(self.fence.admit, step)[0] is expected
            return
        self.fence.admit(step)
        if step.is_sequenced:
            self.log.append(Line(step.digest))
            self.owner = step.router_id
            self.heard = self.clock.seconds

    def is_a_retry(self, step: IncomingStep) -> bool:
        """Checks `recall`. Returns whether it has dealt with the step: an answer, or a refusal for its content."""
        mine = step.is_sequenced and step.worker_epoch == self.epochs[-1] and step.router_id == self.owner
        if not mine or step.step_id > len(self.log):
            assert self.fence.recall(step) is None
            return False
        line = self.log[step.step_id - 1]
        if line.executed and not self.kept(step.step_id):
            assert self.fence.recall(step) is None
            return False
        if line.digest != step.digest:
            with pytest.raises(StepIdReusedError):
                self.fence.recall(step)
            return True
        assert self.fence.recall(step) == ((step.step_id, line.digest) if line.executed else None)
        self.heard = self.clock.seconds
        return True

    @precondition(lambda self: self.num_executed() < len(self.log))
    @rule(num_bytes=st.integers(1, 150))
    def the_engine_executes_a_step(self, num_bytes: int) -> None:
        step_id = self.num_executed() + 1
        line = self.log[step_id - 1]
        step = IncomingStep(step_id, self.epochs[-1], self.owner, line.digest)
        self.fence.confirm(step)
        self.fence.finish(step, (step_id, line.digest), num_bytes)
        line.executed, line.num_bytes = True, num_bytes
        self.heard = self.clock.seconds

    @precondition(lambda self: self.num_executed() < len(self.log))
    @rule(data=st.data())
    def a_queued_step_is_dropped(self, data: st.DataObject) -> None:
        step_id = data.draw(st.integers(self.num_executed() + 1, len(self.log)))
        self.fence.drop(IncomingStep(step_id, self.epochs[-1], self.owner, self.log[step_id - 1].digest))
        del self.log[step_id - 1 :]

    @rule()
    def the_kv_cache_is_reset(self) -> None:
        self.fence.begin_epoch(holder=NOBODY)
        self.new_epoch(NOBODY)

    @rule()
    def a_step_fails_on_the_engine(self) -> None:
        self.fence.begin_epoch(holder=self.fence.holder)
        self.new_epoch(self.owner)

    @rule(seconds=st.sampled_from([1.0, 10.0, 29.0, 30.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.seconds += seconds

    @invariant()
    def the_state_tells_what_the_next_step_must_be(self) -> None:
        state = self.fence.state
        assert state.worker_epoch == self.epochs[-1]
        assert state.next_step_id == len(self.log) + 1
        assert state.last_executed_step_id == self.num_executed()
        assert state.lease_holder == self.owner


TestFencingHistory = FencingHistory.TestCase
TestFencingHistory.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
