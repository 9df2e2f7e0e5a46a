"""Where the time of a step goes: every op of every way to run it is in the table, and the sum is the step."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelworker.graphs.cpu_backend import CpuReplay
from modelworker.ops.cpu.recorder import RecordedStep
from modelworker.worker.batch import StepBatch
from modelworker.worker.command_profile import format_profile
from modelworker.worker.engine import Engine
from modelworker.worker.machine_limits import MachineLimits
from modelworker.worker.profile import StepProfile, profile_step
from modelworker.worker.profile_table import HOST, HOST_AND_GENERATED, IDLE, LIST, op_times, shown_ops
from modelworker.worker.result import GraphMode
from modelworker.worker.settings import ExecutionSettings, WorkerSettings
from modelworker.worker.step_bench import StepCase, make_batch, ways_to_run
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.commands import command_in_process
from modelworker_testing.engines import engine_of, tiny_settings

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

NUM_LAYERS = 2
NUM_STEPS = 3
LIMITS = MachineLimits(read_bytes_per_second=1e9, operations_per_second=1e12)
MODES = ("eager", "compiled", "PIECEWISE", "FULL")


def settings(model: Path) -> WorkerSettings:
    return replace(tiny_settings(model), execution=ExecutionSettings(optimization_level=2))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with engine_of(model, settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def batch(engine: Engine) -> StepBatch:
    return make_batch(StepCase(num_sequences=2, query_len=1, context_len=5), engine.description)


@pytest.fixture(scope="module")
def profiles(engine: Engine, batch: StepBatch) -> dict[str, StepProfile]:
    ways = dict(ways_to_run(engine, batch))
    assert tuple(ways) == MODES
    return {name: profile_step(engine, batch, way, LIMITS, num_steps=NUM_STEPS) for name, way in ways.items()}


@pytest.mark.parametrize("mode", MODES)
def test_the_rows_sum_up_to_the_measured_step(profiles: dict[str, StepProfile], mode: str) -> None:
    profile = profiles[mode]
    assert sum(each.ms for each in profile.ops) == pytest.approx(profile.measured_ms, rel=0.01)
    assert profile.prepare_ms + profile.forward_ms + profile.sample_ms <= profile.step_ms * 1.5
    assert profile.execution.mode is {"PIECEWISE": GraphMode.PIECEWISE, "FULL": GraphMode.FULL}.get(mode, GraphMode.NONE)


@pytest.mark.parametrize("mode", MODES)
def test_products_are_told_apart_by_their_weights_and_read_each_of_them_once(
    profiles: dict[str, StepProfile], engine: Engine, mode: str
) -> None:
    products = {each.what: each for each in profiles[mode].ops if each.what}
    layers = {f"layers.*.{name}" for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")}
    assert set(products) == {*layers, "lm_head"}
    assert [products[name].calls for name in layers] == [NUM_LAYERS] * len(layers)
    assert products["lm_head"].calls == 1
    read = sum(weight.nbytes for weight in engine.model.weights_read() if weight.dim() > 1)
    assert sum(each.weight_bytes for each in products.values()) == read
    assert sum(each.floor_ms for each in products.values()) == pytest.approx(1e3 * read / LIMITS.read_bytes_per_second, rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_attention_of_every_layer_is_seen(profiles: dict[str, StepProfile], mode: str) -> None:
    (attention,) = [each for each in profiles[mode].ops if each.op == "paged_attention"]
    assert attention.calls == NUM_LAYERS
    assert attention.ms > 0


def test_only_recorded_lists_have_time_between_kernels_and_every_way_has_host_code(profiles: dict[str, StepProfile]) -> None:
    found = {mode: {each.op: each.calls for each in profile.ops} for mode, profile in profiles.items()}
    assert {mode for mode, ops in found.items() if LIST in ops} == {"PIECEWISE", "FULL"}
    assert found["FULL"][LIST] == 1
    assert found["PIECEWISE"][LIST] == NUM_LAYERS + 1
    assert {mode for mode, ops in found.items() if ops.get(HOST) == 1} == {"eager", "PIECEWISE", "FULL"}
    assert found["compiled"][HOST_AND_GENERATED] == 1


def test_every_kernel_of_every_recorded_list_belongs_to_a_call_and_runs_when_it_is_timed(engine: Engine) -> None:
    runner = engine.runner
    assert runner.graphs is not None
    for key in runner.captured:
        replays = runner.graphs.replays(key)
        assert replays
        for replay in replays:
            assert isinstance(replay, CpuReplay)
            assert isinstance(replay.recorded, RecordedStep)
            with torch.inference_mode():
                runner.stage_blank(key)
                begin_ns = time.monotonic_ns()
                runs = replay.recorded.replay_timed()
                end_ns = time.monotonic_ns()
            assert sum(call.num_kernels for run in runs for call in run.calls) == replay.recorded.num_kernels
            times = [time_ns for run in runs for time_ns in run.times_ns]
            assert [begin_ns, *times, end_ns] == sorted([begin_ns, *times, end_ns])


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_afterwards_graphs_run_as_before_and_tokens_are_the_same(engine: Engine, batch: StepBatch, mode: str) -> None:
    way = dict(ways_to_run(engine, batch))[mode]
    before = engine.step_as(batch, way).sampled_ids.tolist()
    profile_step(engine, batch, way, LIMITS, num_steps=1)
    assert engine.step_as(batch, way).sampled_ids.tolist() == before
    assert engine.runner.graphs is not None
    assert way.choice.key is not None
    for replay in engine.runner.graphs.replays(way.choice.key):
        assert isinstance(replay, CpuReplay)
        assert replay._run == replay.recorded.replay


def check_trace(trace: dict[str, Any]) -> None:
    """What the trace event format demands of what viewers show."""
    assert isinstance(trace["traceEvents"], list)
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["ph"] in ("X", "M", "i", "s", "f")
        assert isinstance(event["ts"], int | float)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert {"pid", "tid"} <= set(event)


@pytest.mark.parametrize("mode", MODES)
def test_the_trace_is_one_that_viewers_open_and_recorded_ops_lie_in_their_steps(
    profiles: dict[str, StepProfile], mode: str
) -> None:
    trace = json.loads(json.dumps(profiles[mode].trace))
    check_trace(trace)
    steps = [event for event in trace["traceEvents"] if event["name"] == "step" and event["ph"] == "X"]
    products = [event for event in trace["traceEvents"] if event["name"].endswith("::linear") and event["ph"] == "X"]
    assert len(steps) == NUM_STEPS
    assert len(products) == NUM_STEPS * 4 * NUM_LAYERS
    for product in products:
        around = [step for step in steps if step["ts"] <= product["ts"] < step["ts"] + step["dur"]]
        assert len(around) == 1


def test_where_a_gpu_computes_its_kernels_and_its_idling_are_the_step() -> None:
    """The host's ops overlap them, and would count twice."""

    def event(name: str, category: str, ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": category, "pid": 1, "tid": 1, "ts": ts, "dur": dur}

    events = [
        event("step", "user_annotation", 0, 1000),
        event("aten::mm", "cpu_op", 10, 50),
        event("gemm", "kernel", 100, 300),
        event("gemm", "kernel", 400, 200),
        event("Memcpy DtoH", "gpu_memcpy", 700, 100),
    ]
    found = op_times(events, {}, LIMITS, 1, 1.0, host=HOST)
    assert [(each.op, each.calls, each.ms) for each in found] == [
        ("gemm", 2, 0.5),
        (IDLE, 1, pytest.approx(0.4)),
        ("Memcpy DtoH", 1, 0.1),
    ]


def test_the_table_has_the_longest_ops_first_and_the_others_in_one_row(profiles: dict[str, StepProfile]) -> None:
    profile = profiles["FULL"]
    shown = list(shown_ops(profile.ops, 3))
    assert [each.ms for each in shown[:3]] == sorted((each.ms for each in profile.ops), reverse=True)[:3]
    assert shown[3].op == f"{len(profile.ops) - 3} other ops"
    assert sum(each.ms for each in shown) == pytest.approx(profile.measured_ms, rel=0.01)
    text = format_profile(profile, LIMITS, 20)
    assert "ran FULL, padded to 2 tokens and 2 sequences" in text
    assert "layers.*.mlp.down_proj" in text


# -- the command --


@pytest.fixture
def command(model: Path) -> Iterator[Callable[..., int]]:
    """Runs the command in this process, which afterwards is as it was before."""
    sizes = ("--block-size", "4", "--num-blocks", "32", "--max-sequences", "4", "--max-tokens-per-step", "16", "--threads", "1")
    with command_in_process("profile", "--model", model, *sizes) as run:
        yield run


def test_the_command_prints_a_table_and_writes_the_trace(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    graphs = ("--optimization-level", 0, "--graph-mode", "FULL_DECODE_ONLY", "--decode-graph-sizes", 2)
    assert command("--batch", 2, "--context", 3, "--steps", 2, "--output", path, *graphs) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("decode 2 x 1, context 3, tiny")
    assert lines[1].startswith("ran FULL")
    assert lines[-1].startswith(f"trace: {path}")
    check_trace(json.loads(path.read_text()))


def test_the_command_as_a_process_prints_only_the_table_and_leaves_no_file(model: Path, tmp_path: Path) -> None:
    """Torch's profiler, which starts once in a process, has lines of its own; and a trace is written where one is asked for."""
    words = [
        "profile",
        "--model",
        str(model),
        "--num-blocks",
        "32",
        "--max-sequences",
        "4",
        "--max-tokens-per-step",
        "16",
        "--enforce-eager",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "modelworker.worker.cli", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[0].startswith("decode 1 x 1, context 63, tiny")
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_json_of_a_prefill_by_plain_modules(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--query-len", 5, "--mode", "eager", "--json", "--enforce-eager", "--output", tmp_path / "t.json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["step"], report["mode"], report["compiled"]) == ("prefill 5", "NONE", False)
    assert sum(each["ms"] for each in report["ops"]) == pytest.approx(report["measured_ms"], rel=0.01)


def test_a_decode_has_the_longest_context_where_the_model_takes_less_than_the_usual_one(
    command: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("--steps", 1, "--json", "--enforce-eager", "--output", tmp_path / "t.json") == 0
    assert json.loads(capsys.readouterr().out)["step"] == "decode 1 x 1, context 63"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--batch", 5), "--batch is 5, and the worker takes at most 4"),
        (("--query-len", 17), "--batch x --query-len is 17, and the worker takes at most 16"),
        (("--context", 64), "--context + --query-len is 65, and the worker takes at most 64"),
        (("--context", -1), "--context is -1, expected 0 or more"),
        (("--mode", "FULL"), "--mode FULL: this step can't be run so here, expected one of auto, eager"),
        (
            ("--batch", 4, "--context", 60, "--num-blocks", 4, "--block-size", 32, "--query-len", 4),
            "--batch, --query-len, --context: decode 4 x 4, context 60: it needs 5 KV cache blocks, the worker has 3",
        ),
        (("--output", "/nowhere/t.json"), "--output /nowhere/t.json: is no place for a file"),
    ],
)
def test_the_command_refuses_what_the_worker_can_not_run(
    command: Callable[..., int], capsys: pytest.CaptureFixture[str], flags: tuple[object, ...], message: str
) -> None:
    assert command("--context", 3, *flags, "--enforce-eager") == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"modelworker: error: {message}"
