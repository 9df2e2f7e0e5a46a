"""Recorded steps, executed again: as they were, in other ways, after tampering, with another model."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from modelworker.graphs.cpu_backend import CpuReplay
from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.client import Client
from modelworker.worker.client.session import FencedSession
from modelworker.worker.client.step import StepSampling, build_step
from modelworker.worker.client.step_tokens import StepTokens
from modelworker.worker.client.stream_session import StreamSession
from modelworker.worker.command_replay import find_recordings, format_report
from modelworker.worker.counters import Counters
from modelworker.worker.engine import Engine
from modelworker.worker.errors import SetupError
from modelworker.worker.recording import (
    ExecutedStep,
    Record,
    RecordingEngine,
    RecordingFile,
    RecordKind,
    StepRecorder,
    encode_header,
    prepare_folder,
    read_steps,
)
from modelworker.worker.replay import ReplayReport, replay_files
from modelworker.worker.scheduler import Scheduler
from modelworker.worker.scheduler.types import Request, Sampling, SchedulerSettings
from modelworker.worker.settings import ExecutionSettings, RecordingSettings, WorkerSettings
from modelworker.worker.wire import parse_step
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.commands import command_in_process
from modelworker_testing.engines import engine_of, tiny_settings
from modelworker_testing.worker_process import WorkerProcess, worker_process

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

NUM_STEPS = 20


class Recorded(NamedTuple):
    """A model, and steps that were recorded with it."""

    model: Path
    folder: Path


def full_settings(model: Path) -> WorkerSettings:
    return replace(tiny_settings(model), execution=ExecutionSettings(optimization_level=2, decode_query_lens=(1, 2)))


def record(
    model: Path,
    folder: Path,
    requests: Callable[[], Iterator[pb.ExecuteStepRequest | None]],
    around_step: Callable[[Engine, int], AbstractContextManager[object]] = lambda engine, step: nullcontext(),
) -> None:
    """Executes requests in an engine with graphs, recorded. None begins an epoch. `around_step` is entered before each step."""
    prepare_folder(folder)
    with engine_of(model, full_settings) as engine:
        settings = replace(full_settings(model), recording=RecordingSettings(record_steps=str(folder)))
        recorder = StepRecorder(settings, engine.description, Counters())
        recorded = RecordingEngine(engine, recorder, str(folder))
        modes = set()
        for step, request in enumerate(requests()):
            if request is None:
                recorded.reset_kv_cache()
                continue
            batch = parse_step(request, engine.description, arrival_ns=0, deadline_ns=None, keeps_request=True)
            with around_step(engine, step):
                modes.add(recorded.step(batch).graph.mode.name)
        recorder.close()
    assert modes == {"FULL", "PIECEWISE"}


def steps_of_two_sequences(temperature: float) -> Iterator[pb.ExecuteStepRequest]:
    """A prompt of two sequences and decodes of them, whose seeds are left open; the second asks for logprobs."""
    random = np.random.default_rng(0)
    sampling = StepSampling(temperature=[temperature, temperature], num_logprobs=[-1, 0])
    tables = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14]]
    lengths = (5, 3)
    for step in range(NUM_STEPS):
        query_lens = lengths if step == 0 else (1, 1)
        yield build_step(
            query_lens=query_lens,
            context_lens=(0, 0) if step == 0 else [length + step - 1 for length in lengths],
            token_ids=random.integers(0, 101, sum(query_lens)),
            block_counts=[7, 7],
            block_ids=[block for table in tables for block in table],
            sampling=sampling,
        )


def two_epochs() -> Iterator[pb.ExecuteStepRequest | None]:
    yield from steps_of_two_sequences(1.0)
    yield None
    yield from steps_of_two_sequences(0.0)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    model, folder = save_tiny(tmp_path_factory.mktemp("tiny")), tmp_path_factory.mktemp("recorded") / "steps"
    record(model, folder, two_epochs)
    return Recorded(model, folder)


@pytest.fixture(scope="module")
def eager(recorded: Recorded) -> Iterator[Engine]:
    with engine_of(recorded.model) as engine:
        yield engine


def tampered(source: Path, target: Path, change: Callable[[int, pb.ExecuteStepRequest, pb.ExecuteStepResponse], None]) -> Path:
    """Copies a recording with changed steps."""
    file = RecordingFile(source)
    content = encode_header(file.header)
    for index, old in enumerate(file.records()):
        request, answer = pb.ExecuteStepRequest.FromString(old.request), pb.ExecuteStepResponse.FromString(old.answer)
        change(index, request, answer)
        content += replace(old, request=request.SerializeToString(), answer=answer.SerializeToString()).encode()
    target.write_bytes(content)
    return target


def replay(engine: Engine, path: Path) -> ReplayReport:
    return replay_files(engine, find_recordings(path))


def test_steps_of_graphs_come_out_equal_by_plain_modules_open_seeds_included(recorded: Recorded, eager: Engine) -> None:
    report = replay(eager, recorded.folder)
    assert report.is_equal
    assert (report.num_files, report.num_steps, report.num_tokens) == (2, 2 * NUM_STEPS, 4 * NUM_STEPS)
    assert report.logprobs.max_difference is not None
    assert report.logprobs.max_difference < 1e-4
    assert (report.logprobs.num_compared, report.logprobs.num_not_compared) == (2 * NUM_STEPS, 0)


def test_random_rows_without_a_seed_really_drew(recorded: Recorded, eager: Engine) -> None:
    """Else the test above would show nothing: with other seeds, tokens are others."""
    random_file, greedy_file = sorted(recorded.folder.iterdir())
    header, records = RecordingFile(random_file).header, list(RecordingFile(random_file).records())
    reseeded = random_file.parent.parent / "reseeded.steps"
    reseeded.write_bytes(encode_header(header) + b"".join(replace(old, seed=old.seed ^ 1).encode() for old in records))
    assert replay(eager, reseeded).num_differing_steps > NUM_STEPS / 2
    assert replay(eager, greedy_file).is_equal


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("step", [0, 7, NUM_STEPS - 1])
def test_a_token_that_was_recorded_wrong_is_named_with_its_place_and_margin(
    recorded: Recorded, eager: Engine, tmp_path: Path, step: int, row: int
) -> None:
    right: list[int] = []

    def change(index: int, request: pb.ExecuteStepRequest, answer: pb.ExecuteStepResponse) -> None:
        if index == step:
            right.append(answer.sampled_ids[row])
            answer.sampled_ids[row] = (answer.sampled_ids[row] + 1) % 101

    report = replay(eager, tampered(recorded.folder / "000002.steps", tmp_path / "bad.steps", change))
    assert report.num_differing_steps == 1
    first = report.first
    assert first is not None
    length = (5, 3)[row]
    assert (first.file, first.step, first.row, first.position) == ("bad.steps", step + 1, row, length + step)
    assert (first.recorded, first.replayed) == ((right[0] + 1) % 101, right[0])
    assert first.margin is not None
    assert first.margin > 0
    assert f"step {step + 1} (unsequenced), row {row}, position {length + step}: recorded token {first.recorded}" in str(first)


def test_a_fault_that_graphs_had_in_the_field_is_found_by_plain_modules(recorded: Recorded, eager: Engine, tmp_path: Path) -> None:
    """A replay that did nothing: the step answered with what its graph had left from the step before, and wrote no keys."""

    def around_step(engine: Engine, step: int) -> ExitStack:
        faults = ExitStack()
        if step == 11 and engine.runner.graphs is not None:
            for key in engine.runner.captured:
                for replayed in engine.runner.graphs.replays(key):
                    assert isinstance(replayed, CpuReplay)
                    faults.enter_context(replayed.replaced(lambda: None))
        return faults

    record(recorded.model, tmp_path / "steps", lambda: steps_of_two_sequences(0.0), around_step)
    report = replay(eager, tmp_path / "steps")
    assert report.first is not None
    assert report.first.step == 12
    assert report.first.margin is not None
    assert report.first.margin > 0.01


def test_a_wrong_context_is_found_where_it_changes_a_token(recorded: Recorded, eager: Engine, tmp_path: Path) -> None:
    def change(index: int, request: pb.ExecuteStepRequest, answer: pb.ExecuteStepResponse) -> None:
        if index == 0:
            request.token_ids[0] += 1

    report = replay(eager, tampered(recorded.folder / "000002.steps", tmp_path / "bad.steps", change))
    assert report.first is not None
    assert report.first.row == 0


def test_a_token_that_is_missing_and_an_error_that_is_new_are_differences(
    recorded: Recorded, eager: Engine, tmp_path: Path
) -> None:
    def drop(index: int, request: pb.ExecuteStepRequest, answer: pb.ExecuteStepResponse) -> None:
        if index == 3:
            answer.sampled_counts[1] = 0
            del answer.sampled_ids[1]

    def add_error(index: int, request: pb.ExecuteStepRequest, answer: pb.ExecuteStepResponse) -> None:
        if index == 3:
            answer.sequence_errors.add(index=1, code="NON_FINITE_LOGITS")

    source = recorded.folder / "000002.steps"
    missing = replay(eager, tampered(source, tmp_path / "a.steps", drop)).first
    assert missing is not None
    assert (missing.step, missing.row, missing.recorded, missing.margin) == (4, 1, "none", None)
    failed = replay(eager, tampered(source, tmp_path / "b.steps", add_error)).first
    assert failed is not None
    assert (failed.step, failed.row, failed.position, failed.replayed) == (4, 1, None, "no error")


def test_tainted_blocks_that_are_others_are_a_difference(recorded: Recorded, eager: Engine, tmp_path: Path) -> None:
    def taint(index: int, request: pb.ExecuteStepRequest, answer: pb.ExecuteStepResponse) -> None:
        if index == 3:
            answer.tainted_block_ids.extend([1, 2])

    report = replay(eager, tampered(recorded.folder / "000002.steps", tmp_path / "a.steps", taint))
    assert not report.is_equal
    assert report.num_differing_steps == 1
    assert str(report.first) == "a.steps: step 4 (unsequenced): recorded tainted blocks [1, 2], replayed no tainted blocks"


def record_prompts(engine: Engine, folder: Path, **fields: Any) -> Path:
    """Records one step of two prompts, five tokens each, in an engine."""
    request = build_step(
        query_lens=[5, 5],
        context_lens=[0, 0],
        token_ids=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10],
        block_counts=[2, 2],
        block_ids=[1, 2, 3, 4],
        **fields,
    )
    prepare_folder(folder)
    settings = replace(WorkerSettings(), recording=RecordingSettings(record_steps=str(folder)))
    recorder = StepRecorder(settings, engine.description, Counters())
    recording = RecordingEngine(engine, recorder, str(folder))
    recording.reset_kv_cache()
    recording.step(parse_step(request, engine.description, arrival_ns=0, deadline_ns=None, keeps_request=True))
    recorder.close()
    return folder / "000001.steps"


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": StepSampling(temperature=[1.0, 0.0])},
        {"sampling": StepSampling(presence=[0.5, 0.0]), "tokens": StepTokens(prompt_ids=[[1, 2, 3, 4, 5], []])},
        {"tokens": StepTokens(logit_bias=[{7: 0.5}, {}])},
        {"tokens": StepTokens(banned_ids=[[7], []])},
        {"tokens": StepTokens(allowed_ids=[[7, 8], []])},
        {"tokens": StepTokens(grammar_rows=[0], grammar_masks=np.ones((1, 101), np.bool_))},
    ],
    ids=["drawn", "penalty", "bias", "banned", "allowed", "grammar"],
)
def test_a_margin_is_given_where_the_largest_logit_as_it_is_decides_the_token_and_nowhere_else(
    eager: Engine, tmp_path: Path, fields: dict[str, Any]
) -> None:
    margins = []
    source = record_prompts(eager, tmp_path / "steps", **fields)
    for row in (0, 1):

        def change(index: int, request: pb.ExecuteStepRequest, answer: pb.ExecuteStepResponse, row: int = row) -> None:
            answer.sampled_ids[row] ^= 1

        first = replay(eager, tampered(source, tmp_path / f"{row}.steps", change)).first
        assert first is not None
        assert first.row == row
        margins.append(first.margin)
    assert margins[0] is None
    assert margins[1] is not None
    assert margins[1] > 0


def test_every_logprob_is_compared_but_those_of_other_tokens_which_are_counted(eager: Engine, tmp_path: Path) -> None:
    """Entries: of each row the chosen token, which is the first of the 4 most probable ones, and of row 1 four prompt tokens."""
    source = record_prompts(eager, tmp_path / "steps", sampling=StepSampling(num_logprobs=[4, 4]), prompt_logprobs=[False, True])

    def replayed(name: str, change: Callable[[pb.ExecuteStepResponse], None]) -> ReplayReport:
        return replay(eager, tampered(source, tmp_path / f"{name}.steps", lambda index, request, answer: change(answer)))

    def other_id(answer: pb.ExecuteStepResponse) -> None:
        ids = answer.logprobs.token_ids
        ids[3] = next(token for token in range(101) if token not in ids[:5])
        answer.logprobs.values[0] += 0.5
        answer.logprobs.values[9] += 0.25

    def other_prompt_value(answer: pb.ExecuteStepResponse) -> None:
        answer.prompt_logprobs.values[3] -= 2.0

    def other_token(answer: pb.ExecuteStepResponse) -> None:
        answer.sampled_ids[0] ^= 1

    same = replayed("same", lambda answer: None)
    assert (same.logprobs.num_compared, same.logprobs.num_not_compared, same.logprobs.max_difference) == (10, 0, 0.0)
    assert (same.prompt_logprobs.num_compared, same.prompt_logprobs.num_not_compared) == (4, 0)
    assert same.prompt_logprobs.max_difference == 0.0
    changed = replayed("changed", other_id)
    assert changed.is_equal
    assert (changed.logprobs.num_compared, changed.logprobs.num_not_compared) == (9, 1)
    assert changed.logprobs.max_difference == pytest.approx(0.5, abs=1e-5)
    assert replayed("prompt", other_prompt_value).prompt_logprobs.max_difference == pytest.approx(2.0, abs=1e-5)
    diverged = replayed("token", other_token)
    assert (diverged.logprobs.num_compared, diverged.logprobs.num_not_compared) == (5, 5)
    assert diverged.prompt_logprobs.num_compared == 4
    lines = format_report(changed).splitlines()
    assert lines[0].startswith("logprobs: 9 compared, which differ by at most 0.5")
    assert lines[1] == "logprobs: 1 not compared, for they are of other tokens than the recorded ones"
    assert lines[2] == "prompt logprobs: 4 compared, which differ by at most 0"


def test_progress_goes_up_to_the_number_of_records(recorded: Recorded, eager: Engine, tmp_path: Path) -> None:
    released = Record(kind=RecordKind.RELEASE, request=np.array([7], "<u8").tobytes()).encode()
    ended = Record(kind=RecordKind.END, request=b"why").encode()
    (tmp_path / "a.steps").write_bytes((recorded.folder / "000002.steps").read_bytes() + released + ended)
    advances: list[int] = []
    files = find_recordings(tmp_path)
    replay_files(eager, files, advance=advances.append)
    assert sum(advances) == files[0].count_records() == NUM_STEPS + 2


def test_looking_at_a_difference_leaves_the_cache_as_it_was(recorded: Recorded, eager: Engine, tmp_path: Path) -> None:
    """The margin is computed by a step of its own."""

    def change(index: int, request: pb.ExecuteStepRequest, answer: pb.ExecuteStepResponse) -> None:
        if index == 2:
            answer.sampled_ids[0] ^= 1

    replay(eager, recorded.folder / "000002.steps")
    right = [cache.clone() for layer in eager.kv_cache.layers for cache in layer]
    replay(eager, tampered(recorded.folder / "000002.steps", tmp_path / "bad.steps", change))
    found = [cache for layer in eager.kv_cache.layers for cache in layer]
    assert all(bool((old == new).all()) for old, new in zip(right, found, strict=True))


def test_a_step_that_failed_when_it_was_recorded_is_noted(recorded: Recorded, eager: Engine, tmp_path: Path) -> None:
    file = RecordingFile(recorded.folder / "000002.steps")
    records = list(file.records())
    records[4] = Record(kind=RecordKind.FAULT, request=records[4].request)
    path = tmp_path / "a.steps"
    path.write_bytes(encode_header(file.header) + b"".join(each.encode() for each in records[:5]))
    report = replay(eager, path)
    assert report.is_equal
    assert report.notes == ["a.steps: step 5 failed after launch when it was recorded, and did not now"]


def test_a_recording_that_ends_early_is_replayed_as_far_as_it_goes(recorded: Recorded, eager: Engine, tmp_path: Path) -> None:
    content = (recorded.folder / "000002.steps").read_bytes()
    (tmp_path / "cut.steps").write_bytes(content[:-1])
    ended = Record(kind=RecordKind.END, request=b"--record-steps-limit is reached").encode()
    (tmp_path / "ended.steps").write_bytes(content + ended)
    cut, whole = replay(eager, tmp_path / "cut.steps"), replay(eager, tmp_path / "ended.steps")
    assert (cut.is_equal, cut.num_steps) == (True, NUM_STEPS - 1)
    assert cut.notes == ["cut.steps: the last record is cut off: the worker was killed while it was written"]
    assert (whole.is_equal, whole.num_steps) == (True, NUM_STEPS)
    assert "the recording ended after step 20, before its epoch: --record-steps-limit is reached" in whole.notes[0]


def test_a_step_that_this_engine_does_not_accept_is_named(recorded: Recorded, eager: Engine, tmp_path: Path) -> None:
    def change(index: int, request: pb.ExecuteStepRequest, answer: pb.ExecuteStepResponse) -> None:
        if index == 1:
            request.token_ids[0] = 1000

    path = tampered(recorded.folder / "000002.steps", tmp_path / "bad.steps", change)
    with pytest.raises(SetupError, match=r"bad\.steps: step 2 is refused by this engine: token_ids\[0\]"):
        replay(eager, path)


# -- the command --


@pytest.fixture
def command() -> Iterator[Callable[..., int]]:
    """Runs the command in this process, which afterwards is as it was before."""
    with command_in_process("replay") as run:
        yield run


def test_the_command_replays_with_the_recorded_settings_and_says_equal(
    recorded: Recorded, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(recorded.folder) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"equal: {2 * NUM_STEPS} steps, {4 * NUM_STEPS} tokens"


def test_the_command_takes_overrides_and_prints_json(
    recorded: Recorded, tmp_path: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    def change(index: int, request: pb.ExecuteStepRequest, answer: pb.ExecuteStepResponse) -> None:
        if index == 9:
            answer.sampled_ids[1] ^= 1

    path = tampered(recorded.folder / "000002.steps", tmp_path / "bad.steps", change)
    assert command(path, "--enforce-eager", "--json") == 1
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["equal"] is False
    assert (report["first"]["step"], report["first"]["row"], report["num_steps"]) == (10, 1, NUM_STEPS)
    assert report["notes"][0] == "replayed with --enforce-eager"
    assert any("graph mode was FULL_AND_PIECEWISE when it was recorded, and is NONE" in note for note in report["notes"])


def test_eager_replays_what_was_recorded_with_graphs_that_were_asked_for(
    recorded: Recorded, tmp_path: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    header, _, steps = (recorded.folder / "000001.steps").read_bytes().partition(b"\n")
    fields = json.loads(header)
    fields["settings"]["execution"] |= {"optimization_level": 0, "graph_mode": "FULL_DECODE_ONLY", "decode_graph_sizes": [2]}
    path = tmp_path / "asked.steps"
    path.write_bytes(json.dumps(fields).encode() + b"\n" + steps)
    assert command(path, "--enforce-eager") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"equal: {NUM_STEPS} steps")


def test_the_command_refuses_another_models_weights(
    recorded: Recorded, tmp_path: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_tiny(tmp_path / "other", seed=1)
    assert command(recorded.folder, "--model", other, "--enforce-eager") == 1
    assert "was recorded with weights_digest sha256:" in capsys.readouterr().err


def test_the_command_refuses_a_folder_without_recordings(
    tmp_path: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(tmp_path) == 1
    assert capsys.readouterr().err == f"modelworker: error: {tmp_path}: has no recordings (*.steps) in it\n"
    assert command(tmp_path / "none") == 1
    assert "can't be read: No such file or directory" in capsys.readouterr().err


@contextmanager
def recording_worker(model: Path, folder: Path) -> Iterator[tuple[WorkerProcess, Client]]:
    flags = ("--num-blocks", "32", "--block-size", "4", "--threads", "1", "--record-steps", str(folder))
    with worker_process(model, *flags) as worker, Client(worker.address) as client:
        yield worker, client


def test_a_pipelined_stream_with_feedback_and_drafts_is_replayed_equal(
    recorded: Recorded, tmp_path: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorded requests hold placeholders for tokens that only the engine knew, guesses, and copies of shared blocks."""
    folder = tmp_path / "steps"
    with recording_worker(recorded.model, folder) as (_, client):
        for num_drafts, depth in ((0, 2), (2, 1)):
            session = StreamSession(client, max_unanswered=depth)
            scheduler = Scheduler(session, SchedulerSettings(num_drafts=num_drafts))
            for seed in (0, 1):
                sampling = Sampling(temperature=float(seed))
                request = Request(prompt_ids=(1, 2, 3, 1, 2, 3, 1), max_tokens=9, sampling=sampling, stop_token_ids=frozenset())
                scheduler.add_continuations(request, 2)
            scheduler.run_until_idle(lambda event: None)
            session.release()
            session.close()
    requests = [step.request for file in find_recordings(folder) for step in read_steps(file) if isinstance(step, ExecutedStep)]
    assert any(-1 in request.token_ids for request in requests)
    assert any(max(request.draft_lens, default=0) > 0 for request in requests)
    assert any(request.HasField("block_copies") for request in requests)
    assert command(folder, "--enforce-eager", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal"]
    assert report["num_steps"] == len(requests)


def test_what_a_real_worker_served_is_replayed_equal(
    recorded: Recorded, tmp_path: Path, command: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Sequenced steps of a router, unsequenced ones, random and greedy ones, and an epoch that began by a reset."""
    folder = tmp_path / "steps"
    with recording_worker(recorded.model, folder) as (worker, client):
        for request in steps_of_two_sequences(0.7):
            client.execute(request)
        session = FencedSession(client)
        scheduler = Scheduler(session)
        for seed in range(5):
            sampling = Sampling(temperature=0.0 if seed == 0 else 1.0)
            scheduler.add(Request(prompt_ids=(1, 2 + seed, 3), max_tokens=8, sampling=sampling, stop_token_ids=frozenset()))
        scheduler.run_until_idle(lambda event: None)
        session.release()
        for request in steps_of_two_sequences(0.0):
            client.execute(request)
        assert client.info().counters["steps_recorded_total"] > NUM_STEPS
        assert "prompts and tokens are in it" in worker.log()
        assert "steps_recorded" in [degradation.reason for degradation in client.info().degradations]
    assert len(list(folder.iterdir())) == 2
    assert command(folder, "--enforce-eager", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal"]
    assert report["num_steps"] >= 2 * NUM_STEPS + 8
