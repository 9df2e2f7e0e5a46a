"""The command `modelworker`, as people and scripts call it."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import json_format

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.cli import main
from modelworker.worker.command_info import format_info
from modelworker_testing.serving import running_server


def modelworker(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MODELWORKER_")}
    return subprocess.run(
        [sys.executable, "-m", "modelworker.worker.cli", *words],
        env={**inherited, "PYTHONSAFEPATH": "1", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A worker that runs on a thread of its own."""
    ready: list[str] = []
    is_ready, end = threading.Event(), threading.Event()

    async def serve() -> None:
        async with running_server() as running:
            ready.append(running.address)
            is_ready.set()
            await asyncio.to_thread(end.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert is_ready.wait(30)
    yield ready[0]
    end.set()
    thread.join()


def test_help_names_every_command():
    result = modelworker("--help")
    assert result.returncode == 0
    for command in ("serve", "doctor", "info", "generate", "demo", "payload", "profile", "replay", "import-gguf"):
        assert command in result.stdout


def test_version_is_that_of_the_distribution():
    assert modelworker("--version").stdout.startswith("modelworker 0.")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("sevre",), "invalid choice: 'sevre'"),
        (("serve", "--prot", "5"), "unrecognized arguments: --prot 5"),
        (("serve", "--port", "x"), "argument --port: 'x' is not a port"),
        (("serve",), "no model: give --model DIR or set MODELWORKER_MODEL"),
        (("info", "--timeout", "0"), "argument --timeout: '0' is not a number above 0"),
        # What would not fit into WorkerInfo, into gRPC's options, or into the machine.
        (
            ("serve", "--max-sequences", "3000000000"),
            "argument --max-sequences: '3000000000' is not an integer of 1 .. 1073741824",
        ),
        (("serve", "--max-steps-in-flight", str(2**30 + 1)), "argument --max-steps-in-flight"),
        (
            ("serve", "--lease-idle-seconds", "1e17"),
            "argument --lease-idle-seconds: '1e17' is not a number above 0",
        ),
        (("serve", "--max-message-size", "3G"), "argument --max-message-size: '3G' is too large"),
        (("serve", "--threads", "100000"), "argument --threads: '100000' is not a number of threads"),
    ],
)
def test_wrong_usage_is_one_line_and_code_two(words: tuple[str, ...], part: str):
    result = modelworker(*words)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("modelworker: error: ")
    assert part in line


@pytest.mark.parametrize("host", ["x" * 300, "é..é", "no such host"])
def test_a_host_that_is_no_name_is_one_line_and_code_one(host: str):
    result = modelworker("serve", "--port", "0", "--host", host, "--model", ".", MODELWORKER_LOG_LEVEL="error")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("modelworker: error: can't listen on host ")


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.4, 1.0])
def test_a_signal_in_the_first_moments_ends_the_worker_in_order(smollm2_dir: Path, seconds: float):
    words = ["serve", "--model", str(smollm2_dir), "--port", "0", "--log-level", "error"]
    # What comes before `main` is Python's own start, which no program can change.
    program = f"import modelworker.worker.cli as cli; print('up', flush=True); raise SystemExit(cli.main({words!r}))"
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.05 + seconds)
        process.terminate()
        assert process.wait(30) == 0


def test_a_model_that_is_not_there_is_one_line_and_code_one():
    result = modelworker("serve", "--port", "0", "--model", "/no/such/directory", MODELWORKER_LOG_LEVEL="error")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("modelworker: error: ")
    assert "/no/such/directory" in line


def test_a_gguf_file_as_model_is_one_line_that_says_how_to_import_it(tmp_path: Path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    result = modelworker("serve", "--model", str(path))
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert "import-gguf" in line


def test_a_misspelled_variable_is_warned_of_with_the_right_one():
    (warning, _) = modelworker("serve", MODELWORKER_MODLE="x").stderr.splitlines()
    assert warning == (
        "modelworker: warning: environment variable MODELWORKER_MODLE is not read by `modelworker serve`: "
        "did you mean MODELWORKER_MODEL?"
    )


def test_info_imports_neither_torch_nor_structlog():
    code = (
        "import sys; from modelworker.worker import cli; code = cli.main(['info', '127.0.0.1:1', '--timeout', '5']); "
        "print(code, 'torch' in sys.modules, 'structlog' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.split() == ["1", "False", "False"]


def test_info_of_a_worker_that_is_not_there_is_one_line_and_code_one():
    result = modelworker("info", "127.0.0.1:1")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("modelworker: error: worker at 127.0.0.1:1: UNAVAILABLE")


def test_info_shows_a_table_with_units(address: str, capsys: pytest.CaptureFixture[str]):
    assert main(["info", address]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in (
        "architecture SumForCausalLM",
        "blocks 29,999 usable of 4 tokens = 119,996 tokens",
        "message 64.0 MiB",
        "lease holder nobody",
    ):
        assert line in lines


def test_info_as_json_is_the_message(address: str, capsys: pytest.CaptureFixture[str]):
    assert main(["info", address, "--json"]) == 0
    text = capsys.readouterr().out
    info = json_format.Parse(text, pb.WorkerInfo())
    assert info.limits.max_message_bytes == 64 * 2**20
    assert json.loads(text)["lastExecutedStepId"] == "0"


def test_the_address_can_come_from_the_environment(address: str):
    result = modelworker("info", "--json", MODELWORKER_ADDRESS=address)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["model"]["name"] == "sum"


def test_info_shows_everything_that_a_worker_may_say():
    info = pb.WorkerInfo(
        worker_epoch=5,
        lease_holder=9,
        last_executed_step_id=3,
        execution=pb.ExecutionInfo(
            device="cuda:0",
            device_name="H200",
            captured=[
                pb.CapturedSize(mode=1, num_tokens=16, cost_ms=3.5),
                pb.CapturedSize(mode=2, num_tokens=8, num_sequences=8, uniform_query_len=1, cost_ms=1.25),
                pb.CapturedSize(mode=2, num_tokens=4, num_sequences=4, uniform_query_len=1, cost_ms=1.0),
                pb.CapturedSize(mode=2, num_tokens=6, num_sequences=2, uniform_query_len=3, cost_ms=1.5),
                pb.CapturedSize(mode=2, num_tokens=32, num_sequences=8, cost_ms=4.0),
            ],
        ),
        self_check=pb.SelfCheck(passed=False, findings=["logits differ"]),
        degradations=[pb.Degradation(reason="no_compiler", message="install g++")],
        versions={"torch": "2.13.0"},
        counters={'steps_total{mode="NONE"}': 1234},
    )
    lines = [" ".join(line.split()) for line in format_info(info).splitlines()]
    for line in (
        "lease holder 9",
        "device cuda:0 (H200)",
        "FULL, query length 1, ms by tokens: 4: 1.00, 8: 1.25",
        "FULL, query length 3, ms by tokens: 6: 1.50",
        "FULL, up to 8 sequences, ms by tokens: 32: 4.00",
        "PIECEWISE, ms by tokens: 16: 3.50",
        "self-check NOT PASSED",
        "logits differ",
        "no_compiler install g++",
        "torch 2.13.0",
        'steps_total{mode="NONE"} 1,234',
    ):
        assert line in lines
    assert lines.index("no_compiler install g++") < lines.index("model")


@pytest.mark.parametrize("columns", [80, 120])
def test_info_fits_a_terminal_without_cutting_words_or_numbers(columns: int):
    captured = [pb.CapturedSize(mode=1 + index % 2, num_tokens=8 * index, cost_ms=index * 10.25) for index in range(1, 90)]
    info = pb.WorkerInfo(
        execution=pb.ExecutionInfo(captured=captured),
        degradations=[pb.Degradation(reason="no_cpu_kernels", message="no compiler: install g++ " * 12)],
        capabilities=[f"sampling.number_{index}" for index in range(40)],
    )
    text = format_info(info, columns)
    assert max(map(len, text.splitlines())) <= columns
    for size in captured:
        assert f"{size.num_tokens}: {size.cost_ms:.2f}" in text
    for capability in info.capabilities:
        assert capability in text


def test_a_reader_that_goes_away_is_no_traceback(address: str):
    command = f"set -o pipefail; {sys.executable} -m modelworker.worker.cli info {address} | true"
    result = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "PYTHONSAFEPATH": "1"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stderr == ""
