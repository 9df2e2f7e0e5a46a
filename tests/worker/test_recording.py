"""What a recording holds, where it begins and ends, and what is refused."""

import contextlib
import errno
import json
import os
import shutil
import stat
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from modelworker.worker.batch import StepBatch
from modelworker.worker.cli import main
from modelworker.worker.counters import Counters
from modelworker.worker.errors import PreconditionError, PreconditionReason, SettingsError, SetupError
from modelworker.worker.recording import (
    ExecutedStep,
    Record,
    RecordingEngine,
    RecordingFile,
    RecordingHeader,
    RecordKind,
    ReleasedSequences,
    StepRecorder,
    create_file,
    encode_header,
    prepare_folder,
    read_steps,
)
from modelworker.worker.result import StepResult
from modelworker.worker.settings import ExecutionSettings, KvCacheSettings, RecordingSettings, WorkerSettings
from modelworker.worker.settings_record import settings_as_record, settings_from_record, with_overrides
from modelworker.worker.wire import parse_step
from modelworker_testing.serving import SumEngine, async_test, running_server, step_request


class SeededSumEngine(SumEngine):
    """A `SumEngine` that notes with which numbers its open rows were seeded, and what time it was told."""

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(settings)
        self.seeds: list[int] = []
        self.times_ns: list[int] = []

    def seed_open_rows(self, number: int) -> None:
        self.seeds.append(number)

    def set_time(self, time_ns: int) -> None:
        self.times_ns.append(time_ns)


def settings_for(folder: Path, limit: int = 2**20) -> WorkerSettings:
    return WorkerSettings(recording=RecordingSettings(record_steps=str(folder), record_steps_limit=limit))


class World:
    """A recorded engine."""

    def __init__(self, folder: Path, *, limit: int = 2**20, max_pending_bytes: int = 2**20) -> None:
        settings = settings_for(folder, limit)
        prepare_folder(folder)
        self.folder = folder
        self.inner = SeededSumEngine(settings)
        self.counters = Counters()
        self.recorder = StepRecorder(settings, self.inner.description, self.counters, max_pending_bytes=max_pending_bytes)
        self.engine = RecordingEngine(self.inner, self.recorder, str(folder))

    def batch(self, tokens: list[int], **fields: object) -> StepBatch:
        request = step_request(tokens, **fields)
        return parse_step(request, self.inner.description, arrival_ns=0, deadline_ns=None, keeps_request=True)

    def step(self, *tokens: int) -> StepResult:
        return self.engine.step(self.batch(list(tokens)))

    def read(self) -> list[list[ExecutedStep | ReleasedSequences | str]]:
        """Closes the recorder, and reads the files in their order."""
        self.recorder.close()
        return [list(read_steps(RecordingFile(path))) for path in sorted(self.folder.iterdir())]


def tokens_of(steps: list[ExecutedStep | ReleasedSequences | str]) -> list[tuple[list[int], list[int]]]:
    """Tokens in and out of each step."""
    return [
        (list(step.request.token_ids), list(step.answer.sampled_ids))
        for step in steps
        if isinstance(step, ExecutedStep) and step.answer is not None
    ]


def fail(error: Exception) -> Callable[[StepBatch], None]:
    def before_step(batch: StepBatch) -> None:
        raise error

    return before_step


def test_steps_are_recorded_in_the_order_of_execution_with_their_answers_and_seeds(tmp_path: Path) -> None:
    world = World(tmp_path / "steps")
    for token in range(50):
        world.step(token, token + 1)
    (steps,) = world.read()
    assert tokens_of(steps) == [([token, token + 1], [2 * token + 1]) for token in range(50)]
    assert [step.seed for step in steps if isinstance(step, ExecutedStep)] == world.inner.seeds
    assert [step.time_ns for step in steps if isinstance(step, ExecutedStep)] == world.inner.times_ns
    assert world.inner.times_ns == sorted(world.inner.times_ns)
    assert len(set(world.inner.seeds)) == 50
    assert world.counters.snapshot()["steps_recorded_total"] == 50


def test_an_epoch_without_steps_makes_no_file_and_each_other_one_a_file_of_its_own(tmp_path: Path) -> None:
    world = World(tmp_path / "steps")
    world.engine.reset_kv_cache()
    world.step(1)
    world.engine.reset_kv_cache()
    world.engine.reset_kv_cache()
    world.step(2)
    world.step(3)
    assert [tokens_of(steps) for steps in world.read()] == [[([1], [1])], [([2], [2]), ([3], [3])]]
    assert [path.name for path in sorted(world.folder.iterdir())] == ["000001.steps", "000002.steps"]


def test_a_refused_step_is_not_recorded_and_a_failed_one_is_as_such(tmp_path: Path) -> None:
    world = World(tmp_path / "steps")
    world.step(1)
    world.inner.before_step = fail(PreconditionError(PreconditionReason.FEEDBACK_MISMATCH, "no"))
    with pytest.raises(PreconditionError):
        world.step(2)
    world.inner.before_step = fail(ValueError("a fault"))
    with pytest.raises(ValueError, match="a fault"):
        world.step(3)
    (steps,) = world.read()
    first, second = steps
    assert isinstance(first, ExecutedStep)
    assert isinstance(second, ExecutedStep)
    assert first.answer is not None
    assert list(first.request.token_ids) == [1]
    assert second.answer is None
    assert list(second.request.token_ids) == [3]


def test_releases_of_sequences_are_recorded_in_their_turn(tmp_path: Path) -> None:
    world = World(tmp_path / "steps")
    ids = np.array([7, 2**64 - 1], np.uint64)
    world.engine.release_sequences(ids)  # Before the first step: nothing is there to be released.
    world.step(1)
    world.engine.release_sequences(ids)
    world.step(2)
    (steps,) = world.read()
    assert [type(step) for step in steps] == [ExecutedStep, ReleasedSequences, ExecutedStep]
    assert isinstance(steps[1], ReleasedSequences)
    assert steps[1].sequence_ids.tolist() == ids.tolist()
    assert steps[1].time_ns == world.inner.times_ns[2]


def test_files_and_a_new_folder_belong_to_the_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        world = World(tmp_path / "a" / "steps")
        world.step(1)
        world.read()
    finally:
        os.umask(old)
    assert stat.S_IMODE(world.folder.stat().st_mode) == 0o700
    assert [stat.S_IMODE(path.stat().st_mode) for path in world.folder.iterdir()] == [0o600]


@pytest.mark.parametrize("limit", [1, 5000, 7000, 20_000])
def test_recording_stops_at_its_bound_in_whole_steps_and_says_so(tmp_path: Path, limit: int) -> None:
    world = World(tmp_path / "steps", limit=limit)
    for token in range(1000):
        assert world.step(token).sampled_ids == [token]
        if token % 400 == 399:
            world.engine.reset_kv_cache()
    files = world.read()
    assert sum(path.stat().st_size for path in world.folder.iterdir()) <= limit
    recorded = [token for steps in files for token, _ in tokens_of(steps)]
    assert recorded == [[token] for token in range(len(recorded))]
    if files:
        assert files[-1][-1] == "--record-steps-limit is reached"
    assert world.counters.snapshot()['recordings_ended_total{reason="limit"}'] >= 1
    assert len(recorded) == world.counters.snapshot().get("steps_recorded_total", 0)


def descriptor_of(path: Path) -> int:
    """The one under which this process has a file open, once it has."""

    def find() -> int | None:
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                if link.readlink() == path:
                    return int(link.name)
        return None

    wait_until(lambda: find() is not None)
    found = find()
    assert found is not None
    return found


class SlowDisk:
    """Takes the place of a file that is written: nothing of it is read, so that after some pages the writer waits in `os.write`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader, writer = os.pipe()
        os.dup2(writer, descriptor_of(path))
        os.close(writer)
        self._thread = threading.Thread(target=self._recover)

    def recover(self) -> None:
        """Begins to take what is written, up to where the file is closed."""
        self._thread.start()

    def join(self) -> None:
        """Puts what it took where it belongs."""
        self._thread.join()

    def _recover(self) -> None:
        with os.fdopen(self._reader, "rb") as pipe, self._path.open("ab") as file:
            file.write(pipe.read())


@pytest.mark.parametrize(
    "flood",
    [
        [("step", 900)],
        [("step", 1)],
        [("release", 900)],
        [("release", 1)],
        [("step", 9), ("release", 900)],
        [("step", 9), ("release", 9)],
    ],
    ids=lambda flood: " and ".join(f"{kind} of {size}" for kind, size in flood),
)
def test_a_disk_that_is_too_slow_ends_the_epochs_recording_and_never_holds_up_a_step(
    tmp_path: Path, flood: list[tuple[str, int]]
) -> None:
    """What was written is all that came before the end: neither a step nor a release is left out of the middle."""
    world = World(tmp_path / "steps", max_pending_bytes=300_000)
    world.engine.step(world.batch([1], client_tag=0))
    disk = SlowDisk(world.folder / "000001.steps")
    num_items = 400 if max(size for _, size in flood) > 100 else 6000
    for number in range(1, num_items):
        kind, size = flood[number % len(flood)]
        if kind == "step":
            world.engine.step(world.batch([1] * size, client_tag=number))
        else:
            world.engine.release_sequences(np.arange(number, number + size, dtype=np.uint64))
    disk.recover()
    wait_until(lambda: 'recordings_ended_total{reason="overflow"}' in world.counters.snapshot())
    world.engine.reset_kv_cache()
    world.step(7)
    world.recorder.close()
    disk.join()
    first, second = (list(read_steps(RecordingFile(path))) for path in sorted(world.folder.iterdir()))
    *kept, end = first
    assert end == "steps were executed faster than they could be written"
    numbers = [
        step.request.client_tag if isinstance(step, ExecutedStep) else int(step.sequence_ids[0])
        for step in kept
        if not isinstance(step, str)
    ]
    assert numbers == list(range(len(numbers)))
    assert 10 < len(numbers) < num_items
    assert tokens_of(second) == [([7], [7])]
    assert world.counters.snapshot()['recordings_ended_total{reason="overflow"}'] == 1


def test_a_step_that_waits_to_be_written_does_not_keep_its_batch(tmp_path: Path) -> None:
    """Its arrays take several times the memory that is accounted for."""
    world = World(tmp_path / "steps")
    world.step(0)
    disk = SlowDisk(world.folder / "000001.steps")
    batches = []
    for _ in range(100):
        batch = world.batch([1] * 900)
        batches.append(weakref.ref(batch))
        world.engine.step(batch)
        del batch
    assert sum(batch() is not None for batch in batches) <= 1  # The writer may be in one.
    disk.recover()
    world.recorder.close()
    disk.join()


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("that never happened")


def test_a_write_that_fails_ends_the_recording_of_the_epoch_and_not_the_worker(tmp_path: Path) -> None:
    world = World(tmp_path / "steps")
    world.step(1)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, descriptor_of(world.folder / "000001.steps"))
    os.close(full)
    assert world.step(2).sampled_ids == [2]
    assert world.step(3).sampled_ids == [3]
    world.engine.reset_kv_cache()
    world.step(4)
    first, second = world.read()
    assert tokens_of(first) == [([1], [1])]
    assert tokens_of(second) == [([4], [4])]
    assert world.counters.snapshot()['recordings_ended_total{reason="write_failed"}'] == 1


def test_a_folder_that_is_removed_ends_the_recording_with_the_next_step_and_one_that_is_back_takes_the_next_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is written into a file that has no name any more is lost without an error."""
    world = World(tmp_path / "steps")
    world.step(1)
    wait_until(lambda: world.counters.snapshot().get("steps_recorded_total") == 1)
    shutil.rmtree(world.folder)
    world.step(2)
    wait_until(lambda: world.counters.snapshot().get('recordings_ended_total{reason="write_failed"}') == 1)
    assert f"can't write into {world.folder}: the file was removed" in caplog.text
    world.folder.mkdir()
    world.engine.reset_kv_cache()
    world.step(3)
    assert [tokens_of(steps) for steps in world.read()] == [[([3], [3])]]


@pytest.mark.parametrize("room", [0, 5, 5000, 5010, 5050])
def test_a_disk_that_becomes_full_leaves_whole_recordings_that_say_why_they_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    left = room

    def write(file: int, content: memoryview) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real_write(file, content[:left])
        left -= written
        return written

    real_write = os.write
    monkeypatch.setattr("modelworker.worker.recording.recorder.os.write", write)
    world = World(tmp_path / "steps")
    for token in range(1, 200):
        world.step(token)
    files = world.read()
    assert world.counters.snapshot()['recordings_ended_total{reason="write_failed"}'] == 1
    num_recorded = world.counters.snapshot().get("steps_recorded_total", 0)
    assert [tokens_of(steps) for steps in files] == [[([token], [token]) for token in range(1, num_recorded + 1)]] * bool(
        num_recorded
    )
    assert bool(files) == (room > 1000)
    assert all(str(steps[-1]).endswith(": No space left on device") for steps in files)
    for path in world.folder.iterdir():
        file = RecordingFile(path)
        list(file.records())
        assert not file.is_cut_off


def test_a_step_without_its_request_ends_the_recording_visibly(tmp_path: Path) -> None:
    world = World(tmp_path / "steps")
    world.step(1)
    world.engine.step(replace(world.batch([2]), request=b""))
    world.step(3)
    (steps,) = world.read()
    assert tokens_of(steps) == [([1], [1])]
    assert steps[-1] == "a step came without its request"
    assert world.counters.snapshot()['recordings_ended_total{reason="no_request"}'] == 1


def test_the_worker_says_that_it_records(tmp_path: Path) -> None:
    world = World(tmp_path / "steps")
    world.read()
    (degradation,) = world.engine.description.degradations
    assert degradation.reason == "steps_recorded"
    assert "prompts" in degradation.message
    assert world.counters.snapshot()['degradations_total{reason="steps_recorded"}'] == 1


@async_test
async def test_a_server_that_records_keeps_the_requests_bytes_as_they_came(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "steps")
    prepare_folder(tmp_path / "steps")
    with contextlib.ExitStack() as at_end:

        def build(settings: WorkerSettings, progress: object, counters: Counters) -> RecordingEngine:
            engine = SeededSumEngine(settings)
            recorder = StepRecorder(settings, engine.description, counters)
            at_end.callback(recorder.close)
            return RecordingEngine(engine, recorder, "steps")

        async with running_server(settings, build=build) as running:
            sent = [step_request([1, 2, token], client_tag=token) for token in range(5)]
            answers = [await running.stub.ExecuteStep(request) for request in sent]
    steps = list(read_steps(RecordingFile(tmp_path / "steps" / "000001.steps")))
    assert [step.request for step in steps if isinstance(step, ExecutedStep)] == sent
    recorded = [step.answer for step in steps if isinstance(step, ExecutedStep)]
    assert [answer.sampled_ids for answer in recorded if answer] == [answer.sampled_ids for answer in answers]


@async_test
async def test_a_server_that_does_not_record_keeps_no_requests() -> None:
    async with running_server() as running:
        kept: list[bytes] = []
        running.engine.before_step = lambda batch: kept.append(batch.request)
        await running.stub.ExecuteStep(step_request())
        assert kept == [b""]


# -- the file --

HEADER = RecordingHeader(epoch=5, recorded_at="now", settings={"model": {"model": "x"}}, worker={"weights_digest": "y"})
records = st.builds(
    Record,
    kind=st.sampled_from(RecordKind),
    seed=st.integers(0, 2**64 - 1),
    time_ns=st.integers(0, 2**64 - 1),
    request=st.binary(max_size=50),
    answer=st.binary(max_size=50),
)


@contextlib.contextmanager
def file_of(folder: Path, content: bytes) -> Iterator[RecordingFile]:
    path = folder / "a.steps"
    path.unlink(missing_ok=True)
    descriptor = create_file(path)
    os.write(descriptor, content)
    os.close(descriptor)
    yield RecordingFile(path)


@given(why=st.text(max_size=400))
@example(why="\U0001f600" * 400)
def test_a_header_has_room_for_why_the_recording_ended(why: str) -> None:
    ended = encode_header(replace(HEADER, ended=why))
    assert len(ended) == len(encode_header(HEADER))
    assert ended.count(b"\n") == 1


@given(written=st.lists(records, max_size=5), data=st.data())
def test_a_file_cut_off_anywhere_gives_the_whole_records_before_the_cut(
    tmp_path_factory: pytest.TempPathFactory, written: list[Record], data: st.DataObject
) -> None:
    header, encoded = encode_header(HEADER), [record.encode() for record in written]
    body = b"".join(encoded)
    cut = data.draw(st.integers(0, len(body)))
    ends = np.cumsum([0, *map(len, encoded)])
    with file_of(tmp_path_factory.getbasetemp(), header + body[:cut]) as file:
        assert file.header == HEADER
        assert list(file.records()) == written[: int((ends[1:] <= cut).sum())]
        assert file.is_cut_off == (cut not in ends)
        assert file.count_records() == len(list(file.records()))


@given(written=st.lists(records, min_size=1, max_size=3), data=st.data())
def test_a_flipped_bit_anywhere_in_a_record_is_found(
    tmp_path_factory: pytest.TempPathFactory, written: list[Record], data: st.DataObject
) -> None:
    body = bytearray(b"".join(record.encode() for record in written))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] ^= 1 << data.draw(st.integers(0, 7))
    with file_of(tmp_path_factory.getbasetemp(), encode_header(HEADER) + body) as file:
        found = []
        with pytest.raises(SetupError, match="damaged at byte"):
            found.extend(file.records())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is no recording"),
        (b"\xff\xfe\x00", "is no recording"),
        (b"[1]\n", "is no recording"),
        (b'{"format": "another"}\n', "is no recording"),
        (b'{"format": "modelworker steps", "version": 1}\n', "has version 1 of the format, expected 2"),
        (b'{"format": "modelworker steps", "version": 2}\n', "the header is not complete"),
    ],
)
def test_a_file_that_is_no_recording_is_refused_with_its_name(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "a.steps").write_bytes(content)
    with pytest.raises(SetupError, match=expected) as refusal:
        RecordingFile(tmp_path / "a.steps")
    assert "a.steps" in str(refusal.value)


# -- the folder --


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(SettingsError, match=f"--record-steps {tmp_path}: is not empty, expected a new or empty folder: .* another"):
        prepare_folder(tmp_path)


@pytest.mark.parametrize("path", ["/proc/steps", "/dev/null/steps", "/dev/null"])
def test_a_folder_that_can_not_be_written_into_is_refused(path: str) -> None:
    with pytest.raises(SettingsError, match=f"--record-steps {path}: can't be written into: "):
        prepare_folder(Path(path))


def test_serve_refuses_such_a_folder_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", str(tmp_path), "--record-steps", "/dev/null"]) == 2
    assert capsys.readouterr().err == "modelworker: error: --record-steps /dev/null: can't be written into: File exists\n"


# -- settings as JSON --


def test_settings_come_back_from_json_as_they_were() -> None:
    settings = WorkerSettings(
        execution=ExecutionSettings(decode_query_lens=(1, 5), decode_graph_sizes=(4,)), kv_cache=KvCacheSettings(num_blocks=9)
    )
    record = json.loads(json.dumps(settings_as_record(settings)))
    assert settings_from_record(WorkerSettings, record) == settings
    del record["kv_cache"]["block_size"], record["server"]
    assert settings_from_record(WorkerSettings, record) == settings


def test_a_setting_of_another_version_is_refused_by_its_name() -> None:
    with pytest.raises(SettingsError, match=r"kv_cache\.colour: this version has no such setting"):
        settings_from_record(WorkerSettings, {"kv_cache": {"colour": 1}})


def test_overrides_reach_their_section_and_nothing_else() -> None:
    changed = with_overrides(WorkerSettings(), {"enforce_eager": True, "num_blocks": 7})
    assert changed == replace(
        WorkerSettings(), execution=ExecutionSettings(enforce_eager=True), kv_cache=KvCacheSettings(num_blocks=7)
    )
