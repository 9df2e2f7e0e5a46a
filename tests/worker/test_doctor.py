"""The doctor: finds what would stop a worker, one finding at a time, without loading the model."""

import argparse
import json
import math
import os
import re
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelworker.worker.command_doctor import add_parser
from modelworker.worker.command_serve import examine_worker
from modelworker.worker.doctor import Report, Surroundings, examine, format_json, format_report
from modelworker.worker.doctor_machine import check_compiler, check_cpu, check_threads
from modelworker.worker.errors import SetupError
from modelworker.worker.examination import Check, Status
from modelworker.worker.flags import CommandParser
from modelworker.worker.settings import DeviceSettings, KvCacheSettings, ModelSettings, WorkerSettings
from modelworker_testing.checkpoints import TINY, save_tiny
from modelworker_testing.engines import engine_of

NEED_CONFIG = {"tokenizer", "dtype", "products", "max_model_len", "model", "weights", "memory", "kv_cache", "step_memory"}


@pytest.fixture(autouse=True)
def _without_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("MODELWORKER_"):
            monkeypatch.delenv(name)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    directory = save_tiny(tmp_path / "tiny")
    vocabulary = {f"t{token_id}": token_id for token_id in range(100)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": [{"id": 100}]}))
    return directory


def parse(*flags: str) -> argparse.Namespace:
    parser = CommandParser(prog="modelworker")
    add_parser(parser.add_subparsers())
    return parser.parse_args(["doctor", *flags])


def diagnose(model: Path | str, *flags: str) -> Report:
    return examine_worker(parse("--port", "0", "--model", str(model), *flags))


def named(report: Report) -> dict[str, Check]:
    return {check.name: check for check in report.checks}


def with_status(report: Report, *statuses: Status) -> set[str]:
    return {check.name for check in report.checks if check.status in statuses}


def edit(directory: Path, **changes: Any) -> None:
    """Replaces tensors; None removes one."""
    path = directory / "model.safetensors"
    tensors = {**load_file(path), **{name.replace("__", "."): tensor for name, tensor in changes.items()}}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_a_whole_model_is_go(tiny: Path) -> None:
    report = diagnose(tiny)
    assert with_status(report, Status.FAILED, Status.SKIPPED) == set()
    assert report.go
    checks = named(report)
    for name, parts in {
        "packages": ["torch 2.", "grpcio 1.", "protobuf 7."],
        "threads": ["OMP_NUM_THREADS="],
        "config": ["LlamaForCausalLM: 2 layers, hidden size 64, 4 query and 2 KV heads of size 16, vocabulary 101"],
        "tokenizer": ["ids up to 100"],
        "dtype": ["float32: the checkpoint is in float32; a product of 512 x 512 takes", "ms in bfloat16 and"],
        "products": ["accumulate in fp32"],
        "max_model_len": ["64 tokens"],
        "ops": ["custom_ops is all"],
        "files": ["model.safetensors: 21 tensors", "of F32"],
        "weights": ["all 21 tensors that the model needs are there"],
        "memory": ["weights in float32 take"],
        "kv_cache": ["blocks of 32 tokens"],
        "step_memory": ["the largest step takes at most"],
    }.items():
        for part in parts:
            assert part in checks[name].finding


def test_a_worker_becomes_what_the_doctor_says(tiny: Path) -> None:
    flags = ("--kv-cache-memory", "2M", "--block-size", "8", "--max-model-len", "48", "--dtype", "bfloat16", "--device", "cpu")
    findings = {name: check.finding for name, check in named(diagnose(tiny, *flags)).items()}
    settings = WorkerSettings(
        model=ModelSettings(model=str(tiny), max_model_len=48, dtype="bfloat16"),
        kv_cache=KvCacheSettings(block_size=8, kv_cache_memory=2 * 2**20),
        device=DeviceSettings(device="cpu"),
    )
    with engine_of(tiny, lambda _: settings) as engine:
        said = engine.description
    assert findings["kv_cache"].startswith(f"{said.kv_cache.num_blocks:,} blocks of 8 tokens")
    assert findings["max_model_len"].startswith(f"{said.model.max_model_len} tokens")
    assert findings["dtype"].startswith(f"{said.model.dtype}: --dtype bfloat16")
    assert findings["threads"].startswith(f"{said.execution.num_threads}:")
    assert findings["device"].startswith(f"{said.execution.device},")
    assert findings["model"].startswith(f"{said.model.num_parameters / 1e6:.1f} million parameters")
    assert findings["cpu"].startswith(said.execution.device_name)
    for name, version in said.versions.items():
        assert f"{name} {version}" in findings["packages"]


def test_a_missing_tensor_is_named_and_everything_else_is_examined(tiny: Path) -> None:
    edit(tiny, model__layers__1__mlp__down_proj__weight=None)
    report = diagnose(tiny)
    assert not report.go
    assert with_status(report, Status.FAILED, Status.SKIPPED) == {"weights"}
    assert "model.layers.1.mlp.down_proj.weight is missing" in named(report)["weights"].finding


def test_a_wrong_shape_is_named_with_both_shapes(tiny: Path) -> None:
    edit(tiny, model__norm__weight=torch.ones(63))
    report = diagnose(tiny)
    assert with_status(report, Status.FAILED, Status.SKIPPED) == {"weights"}
    assert "model.norm.weight: expected the shape [64], found [63]" in named(report)["weights"].finding


def test_a_truncated_file_is_named_with_both_sizes(tiny: Path) -> None:
    path = tiny / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 1024)
    report = diagnose(tiny)
    assert with_status(report, Status.FAILED) == {"files"}
    assert with_status(report, Status.SKIPPED) == {"weights"}
    assert f"{path}: truncated: expected {size} bytes, as its header says, found {size - 1024}" in named(report)["files"].finding


def test_an_unsupported_architecture_is_named_and_files_and_machine_are_examined(tmp_path: Path) -> None:
    report = diagnose(save_tiny(tmp_path, architectures=["GPT2LMHeadModel"]))
    assert with_status(report, Status.FAILED) == {"config"}
    assert with_status(report, Status.SKIPPED) == NEED_CONFIG
    assert "GPT2LMHeadModel is not supported; supported are LlamaForCausalLM" in named(report)["config"].finding
    assert named(report)["files"].status is Status.OK


def test_a_directory_that_is_not_there_is_one_finding(tmp_path: Path) -> None:
    report = diagnose(tmp_path / "nowhere")
    assert with_status(report, Status.FAILED) == {"model_directory"}
    assert with_status(report, Status.SKIPPED) == NEED_CONFIG | {"config", "files"}
    assert "nowhere: is not a directory" in named(report)["model_directory"].finding
    assert named(report)["device"].status is Status.OK


def test_without_a_model_the_machine_is_examined() -> None:
    report = examine_worker(parse("--port", "0"))
    assert with_status(report, Status.FAILED) == {"model_directory"}
    assert "give --model DIR" in named(report)["model_directory"].finding


@pytest.mark.parametrize(
    ("flags", "failed", "part"),
    [
        (("--custom-ops", "+rms"), "ops", "no op has the name 'rms'; did you mean rms_norm?"),
        (("--kv-cache-memory", "1T"), "kv_cache", "--kv-cache-memory 1099511627776 needs"),
        (("--num-blocks", "2"), "kv_cache", "one sequence of max_model_len 64 needs 3"),
        (("--max-model-len", "65"), "max_model_len", "is more than the model was made for (64)"),
    ],
)
def test_settings_that_do_not_fit_are_one_finding_each(tiny: Path, flags: tuple[str, ...], failed: str, part: str) -> None:
    report = diagnose(tiny, *flags)
    assert with_status(report, Status.FAILED) == {failed}
    assert with_status(report, Status.SKIPPED) <= {"kv_cache", "step_memory"}
    assert part in named(report)[failed].finding


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_files_are_held_against_the_model_even_where_no_device_can_be_chosen(tiny: Path) -> None:
    report = diagnose(tiny, "--device", "cuda")
    assert with_status(report, Status.FAILED) == {"device"}
    assert named(report)["weights"].status is Status.OK


def test_a_step_that_may_not_fit_is_warned_of(tiny: Path) -> None:
    report = diagnose(tiny, "--max-tokens-per-step", "1000000000")
    assert report.go
    assert named(report)["step_memory"].status is Status.WARNING
    assert "lower --max-model-len, --max-tokens-per-step" in named(report)["step_memory"].finding


def test_a_port_that_is_taken_is_a_finding_with_advice(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        report = diagnose(tiny, "--port", str(port))
        assert with_status(report, Status.FAILED, Status.SKIPPED) == {"port"}
        assert f"can't listen on host 127.0.0.1 port {port}: Address already in use" in named(report)["port"].finding
        assert "--port 0" in named(report)["port"].advice
    report = diagnose(tiny, "--port", str(port))
    assert named(report)["port"].finding == f"127.0.0.1:{port} is free"


def test_a_misspelled_variable_is_warned_of_with_the_right_one(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELWORKER_MAX_SEQUENCE", "8")
    monkeypatch.setenv("MODELWORKER_BLOCK_SIZE", "16")
    report = diagnose(tiny)
    assert report.go
    assert named(report)["variables"].status is Status.WARNING
    assert "MODELWORKER_MAX_SEQUENCE (did you mean MODELWORKER_MAX_SEQUENCES?)" in named(report)["variables"].finding
    assert "blocks of 16 tokens" in named(report)["kv_cache"].finding


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (None, "tokenizer.json is missing"),
        ("{", "can't be read"),
        ("{}", "can't be read"),
        (json.dumps({"model": {"vocab": {"a": 101}}}), "ids up to 101, but the model's vocabulary ends at 100"),
        (json.dumps({"model": {"vocab": [["a", 0.1]] * 500}}), "ids up to 499"),
        (json.dumps({"model": {"vocab": {}}, "added_tokens": [{"id": 200}]}), "ids up to 200"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_a_warning_as_the_worker_needs_none(tiny: Path, content: str | None, part: str) -> None:
    (tiny / "tokenizer.json").unlink()
    if content is not None:
        (tiny / "tokenizer.json").write_text(content)
    report = diagnose(tiny)
    assert report.go
    assert named(report)["tokenizer"].status is Status.WARNING
    assert part in named(report)["tokenizer"].finding


def test_what_reading_the_config_warns_of_is_a_finding(tmp_path: Path) -> None:
    check = named(diagnose(save_tiny(tmp_path, eos_token_id=[2, 999])))["config"]
    assert check.status is Status.WARNING
    assert "eos_token_id 999 is left out" in check.finding


def test_a_torch_that_is_broken_hides_no_other_finding(tiny: Path) -> None:
    def load() -> Any:
        raise OSError("libc10.so: cannot open shared object file")

    surroundings = Surroundings(variables=frozenset(), environment={}, find_model=lambda settings: settings, load_model_checks=load)
    report = examine(WorkerSettings(model=ModelSettings(model=str(tiny))), surroundings)
    assert not report.go
    assert named(report)["torch"].finding == "OSError: libc10.so: cannot open shared object file"
    assert named(report)["model"].status is Status.SKIPPED
    assert named(report)["model_directory"].status is Status.OK


def test_a_torch_that_is_not_installed_is_a_finding_with_the_extra_to_install(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "modelworker.worker.doctor_model", raising=False)
    report = diagnose(tiny)
    assert with_status(report, Status.FAILED) == {"torch"}
    assert named(report)["torch"].finding == "`serve` needs the package torch: pip install 'modelworker[worker]'"


def test_more_threads_than_the_container_may_use_are_warned_of(tmp_path: Path) -> None:
    for name, text in {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000"}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = check_threads(DeviceSettings(threads=2), tmp_path)
    assert found.status is Status.WARNING
    assert found.text == "2: --threads 2, but the process may use 1.5 CPUs"
    assert check_threads(DeviceSettings(threads=1), tmp_path).status is Status.OK


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="about features of x86")
def test_a_cpu_without_avx2_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "proc" / "cpuinfo"
    path.parent.mkdir()
    path.write_text("model name\t: Old\nflags\t\t: sse4_2 avx\n")
    found = check_cpu(tmp_path)
    assert found.status is Status.WARNING
    assert found.text == "Old: AVX2 no, AVX-512 no, bfloat16 no, AMX no"


def test_a_missing_or_broken_compiler_is_a_warning(tmp_path: Path) -> None:
    missing = check_compiler({"PATH": str(tmp_path)})
    assert (missing.status, missing.text) == (Status.WARNING, "g++ was not found")
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    assert "does not run" in check_compiler({"CXX": str(broken)}).text
    working = check_compiler(os.environ)
    assert working.status is Status.OK
    assert re.search(r"\d+\.\d+", working.text)


def test_the_table_wraps_long_findings_and_ends_with_the_verdict() -> None:
    checks = (
        Check(name="port", status=Status.FAILED, finding="taken " * 40, advice="take another"),
        Check(name="cpu", status=Status.OK, finding="fast"),
        Check(name="memory", status=Status.SKIPPED, finding="not known"),
    )
    text = format_report(Report(go=False, checks=checks))
    assert max(map(len, text.splitlines())) <= 130
    assert text.splitlines()[0].split() == ["check", "status", "finding"]
    assert "-> take another" in text
    assert text.endswith("\n\nno-go: 1 failed, 1 skipped")
    assert format_report(Report(go=True, checks=checks[1:2])).endswith("go: every check is ok")


def test_json_has_everything_that_the_table_has() -> None:
    check = Check(name="port", status=Status.FAILED, finding="taken", advice="take another")
    assert json.loads(format_json(Report(go=False, checks=(check,)))) == {
        "go": False,
        "checks": [{"name": "port", "status": "failed", "finding": "taken", "advice": "take another"}],
    }


def test_the_command_prints_json_and_returns_no_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = parse("--port", "0", "--json", "--model", str(tmp_path))
    assert arguments.run(arguments) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["go"] is False
    assert {"name": "config", "status": "failed", "finding": f"{tmp_path / 'config.json'}: is missing", "advice": ""} in report[
        "checks"
    ]


def save_sparse(directory: Path, config: dict[str, Any]) -> Path:
    """A checkpoint in bfloat16 whose data are holes: it takes no space, and as long as a real one to read."""
    hidden, inner, kv = config["hidden_size"], config["intermediate_size"], config["num_key_value_heads"] * config["head_dim"]
    shapes = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (config["vocab_size"], hidden))
    shapes["model.norm.weight"] = (hidden,)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
        }.items():  # fmt: skip
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    path = directory / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded)
    os.truncate(path, 8 + len(encoded) + end)
    return directory


_PEAK = """
import re, sys
from pathlib import Path
from modelworker.worker.cli import main
code = main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1), file=sys.stderr)
sys.exit(code)
"""


def dry_run(model: Path) -> tuple[int, int, str, float]:
    """Runs `serve --dry-run`; returns exit code, peak memory in bytes, output and seconds."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, "serve", "--dry-run", "--port", "0", "--model", str(model)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    return done.returncode, int(done.stderr) * 1024, done.stdout, time.monotonic() - begun


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_model_of_a_terabyte_is_examined_in_seconds_and_in_the_memory_of_a_tiny_one(tiny: Path, tmp_path: Path) -> None:
    huge = save_sparse(
        tmp_path / "huge",
        TINY | {"hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 120, "num_attention_heads": 128,
                "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 200_000, "max_position_embeddings": 32768,
                "torch_dtype": "bfloat16"},
    )  # fmt: skip
    assert (huge / "model.safetensors").stat().st_size > 2**39
    code, tiny_bytes, output, tiny_seconds = dry_run(tiny)
    assert code == 0, output
    code, huge_bytes, output, huge_seconds = dry_run(huge)
    assert code == 1
    assert "the weights need" in output
    assert "all 1083 tensors that the model needs are there" in " ".join(output.split())
    assert huge_bytes - tiny_bytes < 100 * 2**20
    assert huge_seconds - tiny_seconds < 30


def test_a_head_beside_a_tied_embedding_is_not_read(tmp_path: Path) -> None:
    """Its holes could not be told from the embedding without reading both."""
    config = TINY | {"tie_word_embeddings": True, "vocab_size": 2**25, "num_hidden_layers": 1}
    directory = save_sparse(tmp_path / "tied", config)
    assert (directory / "model.safetensors").stat().st_size > 2**33
    begun = time.monotonic()
    report = diagnose(directory)
    assert named(report)["weights"].status is Status.OK
    assert time.monotonic() - begun < 10


def test_a_setup_error_of_finding_the_model_is_a_finding(tmp_path: Path) -> None:
    def find(settings: WorkerSettings) -> WorkerSettings:
        raise SetupError("owner/name: not in the cache")

    surroundings = Surroundings(
        variables=frozenset(), environment={}, find_model=find, load_model_checks=lambda: lambda *arguments: None
    )
    report = examine(WorkerSettings(model=ModelSettings(model="owner/name")), surroundings)
    assert named(report)["model_directory"].finding == "owner/name: not in the cache"
