"""Recorded steps whose tokens the worker kept: when those were dropped is as it was, however long a replay takes."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.batch import FEEDBACK_TOKEN
from modelworker.worker.client.step import build_step
from modelworker.worker.command_replay import find_recordings
from modelworker.worker.counters import Counters
from modelworker.worker.engine import Engine
from modelworker.worker.errors import OverloadedError, PreconditionError
from modelworker.worker.recording import RecordingEngine, StepRecorder, prepare_folder
from modelworker.worker.replay import ReplayReport, replay_files
from modelworker.worker.settings import FeedbackSettings, RecordingSettings, WorkerSettings
from modelworker.worker.wire import parse_step
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.engines import engine_of, tiny_settings_with

IDLE_SECONDS = 0.001
MAX_SEQUENCES = 3
PROMPT = (1, 2, 3, 4, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def settings_with(idle_seconds: float) -> Callable[[Path], WorkerSettings]:
    return tiny_settings_with(feedback=FeedbackSettings(max_feedback_sequences=MAX_SEQUENCES, feedback_idle_seconds=idle_seconds))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    """Is recorded."""
    with engine_of(model, settings_with(IDLE_SECONDS)) as engine:
        yield engine


@pytest.fixture(scope="module")
def hasty(model: Path) -> Iterator[Engine]:
    """Replays, and would drop tokens between any two steps by its own clock."""
    with engine_of(model, settings_with(IDLE_SECONDS)) as engine:
        yield engine


@pytest.fixture(scope="module")
def counters() -> Counters:
    return Counters()


@pytest.fixture(scope="module")
def patient(model: Path, counters: Counters) -> Iterator[Engine]:
    """Replays, and would drop nothing by its own clock."""
    with engine_of(model, settings_with(600.0), counters) as engine:
        yield engine


class Field:
    """An engine that is recorded, under a clock that goes as it is told."""

    def __init__(self, engine: Engine, folder: Path, start_ns: int) -> None:
        prepare_folder(folder)
        settings = WorkerSettings(recording=RecordingSettings(record_steps=str(folder)))
        self.now_ns, self.num_steps = start_ns, 0
        self.inner = engine
        self.recorder = StepRecorder(settings, engine.description, Counters())
        self.engine = RecordingEngine(engine, self.recorder, str(folder), clock_ns=lambda: self.now_ns)
        self.engine.reset_kv_cache()

    def step(self, sequence_ids: Sequence[int], length: int = 0) -> list[int]:
        """Runs the prompt of sequences, or a decode of the token that the worker keeps where they are `length` long."""
        rows = len(sequence_ids)
        request: pb.ExecuteStepRequest = build_step(
            query_lens=[1 if length else len(PROMPT)] * rows,
            context_lens=[length] * rows,
            token_ids=[FEEDBACK_TOKEN] * rows if length else PROMPT * rows,
            block_counts=[4] * rows,
            block_ids=[1 + 4 * (sequence % 7) + block for sequence in sequence_ids for block in range(4)],
            sequence_ids=sequence_ids,
            worker_epoch=1,
            router_id=1,
            step_id=self.num_steps + 1,
        )
        batch = parse_step(request, self.inner.description, arrival_ns=0, deadline_ns=None, keeps_request=True)
        sampled = self.engine.step(batch).sampled_ids.tolist()
        self.num_steps += 1
        return [int(token) for token in sampled]


def replayed(engine: Engine, folder: Path) -> ReplayReport:
    return replay_files(engine, find_recordings(folder))


def test_tokens_that_were_kept_are_there_in_a_replay_that_is_slower(engine: Engine, hasty: Engine, tmp_path: Path) -> None:
    """All steps within one moment: none of them took a thousandth of a second, and here each does."""
    field = Field(engine, tmp_path / "steps", 5)
    field.step([1, 2])
    for length in range(len(PROMPT), 12):
        field.step([1, 2], length)
    field.recorder.close()
    report = replayed(hasty, tmp_path / "steps")
    assert report.is_equal
    assert (report.num_steps, report.num_tokens) == (8, 16)


@pytest.mark.parametrize("start_ns", [0, 2**62])
def test_sequences_that_were_dropped_for_idling_are_dropped_in_a_replay_that_is_faster(
    engine: Engine, patient: Engine, counters: Counters, tmp_path: Path, start_ns: int
) -> None:
    field = Field(engine, tmp_path / "steps", start_ns)
    for first in (1, 11, 21, 31):
        field.step([first, first + 1, first + 2])
        field.now_ns += 3_600_000_000_000
    field.recorder.close()
    evicted = counters.snapshot().get('feedback_evictions_total{reason="idle"}', 0)
    report = replayed(patient, tmp_path / "steps")
    assert report.is_equal
    assert report.num_steps == field.num_steps == 4
    assert counters.snapshot()['feedback_evictions_total{reason="idle"}'] == evicted + 3 * MAX_SEQUENCES


def test_released_sequences_make_room_in_the_replay_as_well(engine: Engine, hasty: Engine, tmp_path: Path) -> None:
    field = Field(engine, tmp_path / "steps", 0)
    for first in (1, 11, 21):
        ids = [first, first + 1, first + 2]
        field.step(ids)
        field.step(ids, len(PROMPT))
        with pytest.raises(OverloadedError):
            field.step([5])
        assert field.engine.release_sequences(np.array(ids, np.uint64)) == MAX_SEQUENCES
        with pytest.raises(PreconditionError):
            field.step(ids, len(PROMPT) + 1)
    field.recorder.close()
    report = replayed(hasty, tmp_path / "steps")
    assert report.is_equal
    assert report.num_steps == 6


def test_a_clock_that_began_anew_between_two_recordings_drops_what_it_dropped(
    engine: Engine, patient: Engine, tmp_path: Path
) -> None:
    """Monotonic clocks count from the machine's start: a later recording may have earlier times."""
    for name, start_ns in (("a", 2**62), ("b", 0)):
        field = Field(engine, tmp_path / name, start_ns)
        for first in (1, 11):
            field.step([first, first + 1, first + 2])
            field.now_ns += 3_600_000_000_000
        field.recorder.close()
    files = [*find_recordings(tmp_path / "a"), *find_recordings(tmp_path / "b")]
    report = replay_files(patient, files)
    assert report.is_equal
    assert report.num_steps == 4
