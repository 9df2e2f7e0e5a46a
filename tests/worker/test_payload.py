"""`modelworker payload`: bodies that a worker executes as they are, and one clear line where it would not."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest
from google.protobuf import json_format

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.cli import main
from modelworker.worker.client import Client, ExecuteStepRequest, build_step
from modelworker.worker.errors import SettingsError
from modelworker.worker.payload import PayloadShape, SamplingShape, WorkerShape, build_payload, check_payload
from modelworker.worker.settings import FencingSettings, ServerSettings, StepSettings, WorkerSettings
from modelworker_testing.ghz import read_binary_file
from modelworker_testing.serving import BLOCK_SIZE, VOCAB_SIZE
from modelworker_testing.serving_thread import server_on_a_thread
from modelworker_testing.steps import varint

OFFLINE = ("--vocab-size", "101", "--block-size", "4", "--num-blocks", "32")
SMALL = WorkerShape(vocab_size=101, block_size=4, num_blocks=32, max_model_len=64, max_sequences=6, max_tokens_per_step=40)
EXECUTE_STEP = "/modelworker.v1.ModelWorker/ExecuteStep"


@dataclass
class Result:
    """What a run wrote, and its exit code."""

    code: int | str | None
    stdout: bytes
    stderr: str


Payload = Callable[..., Result]


@pytest.fixture
def payload(capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Payload:
    """Runs the command with these words and environment variables."""
    for name in os.environ:
        if name.startswith("MODELWORKER_"):
            monkeypatch.delenv(name)

    def run(*words: str, **environment: str) -> Result:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        try:
            code: int | str | None = main(["payload", *words])
        except SystemExit as end:
            code = end.code
        written = capsysbinary.readouterr()
        return Result(code, written.out, written.err.decode())

    return run


def error_of(result: Result, code: int = 2) -> str:
    """The one line on stderr of a run that must have failed and written nothing."""
    assert (result.code, result.stdout) == (code, b""), result
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with server_on_a_thread(WorkerSettings(step=StepSettings(max_sequences=20, max_tokens_per_step=300))) as served:
        yield served


def json_messages(text: bytes) -> list[ExecuteStepRequest]:
    """Each line as grpcurl reads its input: protobuf's JSON, in which unknown names are errors."""
    return [json_format.Parse(line, ExecuteStepRequest()) for line in text.decode().splitlines()]


def send(address: str, body: bytes) -> pb.ExecuteStepResponse:
    """Sends a body byte by byte as it is."""
    with grpc.insecure_channel(address) as channel:
        return pb.ExecuteStepResponse.FromString(channel.unary_unary(EXECUTE_STEP)(body, timeout=30))


SAMPLING = (
    *("--temperature", "0.8", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.05"),
    *("--seed", "18446744073709551614", "--logprobs", "0"),
)
STEPS = [
    (),
    ("--sequences", "16", "--context-len", "128"),
    ("--sequences", "3", "--query-len", "100", "--no-sample"),
    ("--sequences", "4", "--query-len", "7", "--context-len", "9", *SAMPLING),
]


@pytest.mark.parametrize("flags", STEPS, ids=" ".join)
def test_a_worker_executes_every_json_body(payload: Payload, address: str, flags: tuple[str, ...]) -> None:
    result = payload("--address", address, "--count", "3", *flags)
    assert result.code == 0, result.stderr
    requests = json_messages(result.stdout)
    assert len(requests) == 3
    with Client(address) as client:
        for request in requests:
            answer = client.execute(request, timeout=30)
            assert answer.client_tag == request.client_tag
            assert answer.sampled_counts.tolist() == [int("--no-sample" not in flags)] * len(request.query_lens)
            assert answer.row_errors == ()


@pytest.mark.parametrize("flags", STEPS, ids=" ".join)
def test_a_worker_executes_every_binary_body(payload: Payload, address: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "bodies.bin"
    result = payload("--address", address, "--format", "binary", "--count", "3", "--output", str(file), *flags)
    assert result.code == 0, result.stderr
    requests = read_binary_file(file.read_bytes())
    assert [send(address, request.SerializeToString()).client_tag for request in requests] == [1, 2, 3]


def test_binary_and_json_bodies_are_the_same_messages(payload: Payload, tmp_path: Path) -> None:
    flags = (*OFFLINE, "--sequences", "3", "--query-len", "5", "--temperature", "0.7", "--seed", "1", "--count", "4")
    file = tmp_path / "bodies.bin"
    result = payload(*flags, "--format", "binary", "--output", str(file))
    assert result.code == 0, result.stderr
    assert read_binary_file(file.read_bytes()) == json_messages(payload(*flags).stdout)
    assert result.stdout.decode().startswith(f"{file}: 4 steps with 3 sequences, query length 5, context length 0; ")


def test_the_binary_file_is_nothing_but_messages_after_their_lengths(payload: Payload) -> None:
    result = payload(*OFFLINE, "--sequences", "6", "--context-len", "11", "--count", "2", "--format", "binary")
    bodies = [request.SerializeToString() for request in read_binary_file(result.stdout)]
    assert len(bodies) == 2
    assert len(bodies[0]) > 127  # Its length takes two bytes.
    assert result.stdout == b"".join(varint(len(body)) + body for body in bodies)


def test_a_single_message_comes_after_its_length_too(payload: Payload) -> None:
    result = payload(*OFFLINE, "--format", "binary")
    (request,) = read_binary_file(result.stdout)
    body = request.SerializeToString()
    assert result.stdout == varint(len(body)) + body


def test_a_body_is_an_unsequenced_step_of_the_wanted_shape() -> None:
    shape = PayloadShape(num_sequences=3, query_len=6, context_len=7)
    request = build_payload(shape, SMALL, 1)
    assert (request.step_id, request.worker_epoch, request.router_id) == (0, 0, 0)
    assert list(request.query_lens) == [6, 6, 6]
    assert list(request.context_lens) == [7, 7, 7]
    assert len(request.token_ids) == 18
    assert all(0 <= token < 101 for token in request.token_ids)
    assert list(request.block_counts) == [4, 4, 4]  # 13 tokens in blocks of 4.
    assert len(set(request.block_ids)) == 12
    assert all(1 <= block <= 31 for block in request.block_ids)
    assert len(request.sample) == 0
    assert not request.HasField("sampling")


def test_every_block_but_the_null_block_can_be_used() -> None:
    request = build_payload(PayloadShape(num_sequences=31), replace(SMALL, max_sequences=None), 1)
    assert sorted(request.block_ids) == list(range(1, 32))


def test_equal_flags_give_equal_bodies_and_another_number_another_body() -> None:
    shape = PayloadShape(num_sequences=2, query_len=8)
    first, second = (build_payload(shape, SMALL, number) for number in (1, 2))
    assert build_payload(shape, SMALL, 1) == first
    assert list(first.token_ids) != list(second.token_ids)
    assert list(first.block_ids) != list(second.block_ids)


def test_sampling_parameters_that_are_not_given_are_not_in_the_body() -> None:
    shape = PayloadShape(num_sequences=2, sampling=SamplingShape(temperature=0.5, seed=2**64 - 1))
    sampling = build_payload(shape, SMALL, 1).sampling
    assert sampling == pb.SamplingParams(temperature=[0.5, 0.5], seed=[2**64 - 1, 0], has_seed=[True, True])


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"num_sequences": 7}, "found 7 sequences, expected at most 6 (max_sequences)"),
        ({"query_len": 21}, "found 42 new tokens (sequences x query length), expected at most 40 (max_tokens_per_step)"),
        (
            {"num_sequences": 1, "context_len": 64},
            "found 65 tokens in a sequence (context + query length), expected at most 64 (max_model_len)",
        ),
        (
            {"num_sequences": 4, "context_len": 31},
            "found 32 KV cache blocks (sequences x 8), expected at most 31 (num_blocks - 1)",
        ),
    ],
)
def test_a_step_over_a_limit_is_refused_with_the_limit(changes: dict[str, int], part: str) -> None:
    with pytest.raises(SettingsError) as error:
        check_payload(replace(PayloadShape(num_sequences=2), **changes), SMALL)
    assert str(error.value) == f"the worker would refuse these steps: {part}"


def test_steps_at_the_limits_are_not_refused() -> None:
    for shape in (
        PayloadShape(num_sequences=6),
        PayloadShape(num_sequences=2, query_len=20),
        PayloadShape(num_sequences=1, context_len=63),
        PayloadShape(num_sequences=3, context_len=39),
    ):
        check_payload(shape, SMALL)


def test_what_the_worker_does_not_implement_is_refused_by_its_name() -> None:
    worker = replace(SMALL, capabilities=frozenset({"client_tag", "sampling.temperature", "sampling.num_logprobs"}))

    def refusal(**sampling: float) -> str:
        try:
            check_payload(PayloadShape(num_sequences=1, sampling=SamplingShape(**sampling)), worker)  # type: ignore[arg-type]
        except SettingsError as error:
            return str(error).removeprefix("the worker would refuse these steps: ")
        return ""

    assert refusal(temperature=1.0, num_logprobs=0) == refusal(num_logprobs=20) == ""
    assert refusal(top_k=3, seed=1) == "; ".join(
        f"the worker does not implement sampling.{name}" for name in ("has_seed", "seed", "top_k")
    )
    worker = replace(worker, capabilities=frozenset({"client_tag"}))
    assert refusal(num_logprobs=0) == "the worker does not implement sampling.num_logprobs"


def test_a_message_over_the_limit_is_refused() -> None:
    worker = replace(SMALL, max_message_bytes=100)
    assert build_payload(PayloadShape(num_sequences=1), worker, 1).ByteSize() <= 100
    with pytest.raises(SettingsError, match=r"found a message of \d+ bytes, expected at most 100 \(max_message_bytes\)"):
        build_payload(PayloadShape(num_sequences=6), worker, 1)


def test_the_limits_of_the_running_worker_count(payload: Payload, address: str) -> None:
    line = error_of(payload("--address", address, "--sequences", "21", "--query-len", "20"))
    assert line == (
        "modelworker: error: the worker would refuse these steps: found 21 sequences, expected at most 20 (max_sequences); "
        "found 420 new tokens (sequences x query length), expected at most 300 (max_tokens_per_step)"
    )


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--block-size", "8"), f"--block-size: found 8, expected {BLOCK_SIZE}, as the worker has it"),
        (("--vocab-size", "1001"), f"--vocab-size: found 1,001, expected at most {VOCAB_SIZE:,}, as the worker has it"),
        (("--max-sequences", "21"), "--max-sequences: found 21, expected at most 20, as the worker has it"),
    ],
)
def test_a_flag_that_contradicts_the_running_worker_is_refused(
    payload: Payload, address: str, flags: tuple[str, ...], part: str
) -> None:
    assert error_of(payload("--address", address, *flags)) == f"modelworker: error: {part}"


def test_a_flag_narrows_what_the_running_worker_allows(payload: Payload, address: str) -> None:
    result = payload("--address", address, "--num-blocks", "5", "--vocab-size", "2", "--sequences", "4", "--count", "20")
    for request in json_messages(result.stdout):
        assert sorted(request.block_ids) == [1, 2, 3, 4]
        assert set(request.token_ids) <= {0, 1}


def test_nobody_is_asked_where_flags_say_everything(payload: Payload) -> None:
    result = payload("--address", "127.0.0.1:1", *OFFLINE, "--max-sequences", "2", "--sequences", "2")
    assert result.code == 0, result.stderr
    assert "expected at most 2 (max_sequences)" in error_of(payload(*OFFLINE, "--max-sequences", "2", "--sequences", "3"))


def test_a_worker_that_is_not_there_is_one_line_and_code_one(payload: Payload) -> None:
    line = error_of(payload("--address", "127.0.0.1:1", "--vocab-size", "101", "--num-blocks", "32"), code=1)
    assert line.startswith("modelworker: error: worker at 127.0.0.1:1: UNAVAILABLE")
    assert line.endswith("(bodies without a worker need --vocab-size, --block-size, --num-blocks)")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--sequences", "0"), "argument --sequences: '0' is not an integer of 1 .. 2147483647"),
        (("--context-len", "-1"), "argument --context-len: '-1' is not an integer of 0 .. 2147483647"),
        (("--temperature", "1e-6"), "argument --temperature: '1e-6' is not a temperature"),
        (("--temperature", "1e39"), "argument --temperature: '1e39' is not a temperature"),
        (("--temperature", "hot"), "argument --temperature: 'hot' is not a number"),
        (("--top-p", "0"), "argument --top-p: '0.0' is not a number above 0"),
        (("--top-p", "1e-46"), "argument --top-p: '0.0' is not a number above 0"),
        (("--min-p", "0.99999999"), "argument --min-p: '0.99999999' is not a number of at least 0 and below 1"),
        (("--seed", "18446744073709551616"), "is not an integer of 0 .. 18446744073709551615"),
        (("--logprobs", "21"), "argument --logprobs: '21' is not an integer of 0 .. 20"),
        (("--format", "xml"), "argument --format: invalid choice: 'xml'"),
    ],
)
def test_wrong_usage_is_one_line_and_code_two(payload: Payload, flags: tuple[str, ...], part: str) -> None:
    assert part in error_of(payload(*OFFLINE, *flags))


def test_a_file_that_can_not_be_written_is_one_line_and_code_one(payload: Payload, tmp_path: Path) -> None:
    file = tmp_path / "missing" / "bodies.bin"
    assert error_of(payload(*OFFLINE, "--output", str(file)), code=1) == (
        f"modelworker: error: {file}: can't be written: No such file or directory"
    )


def test_a_refused_step_leaves_a_file_as_it_was(payload: Payload, tmp_path: Path) -> None:
    file = tmp_path / "bodies.json"
    file.write_text("kept")
    error_of(payload(*OFFLINE, "--sequences", "32", "--output", str(file)))
    assert file.read_text() == "kept"


def test_binary_is_not_written_to_a_terminal() -> None:
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", "modelworker.worker.cli", "payload", *OFFLINE, "--format", "binary"]
    try:
        result = subprocess.run(
            command, stdout=terminal, stderr=subprocess.PIPE, env={**os.environ, "PYTHONSAFEPATH": "1"}, check=False, timeout=60
        )
    finally:
        os.close(terminal)
        os.close(master)
    assert result.returncode == 2
    assert result.stderr == b"modelworker: error: --format binary is not for a terminal: give --output FILE\n"


def test_bodies_are_written_without_torch() -> None:
    code = f"import sys; from modelworker.worker import cli; cli.main(['payload', *{OFFLINE}]); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.splitlines()[1:] == ["False"]


def test_flags_can_come_from_the_environment(payload: Payload) -> None:
    environment = {"MODELWORKER_VOCAB_SIZE": "101", "MODELWORKER_BLOCK_SIZE": "4", "MODELWORKER_NUM_BLOCKS": "32"}
    result = payload("--query-len", "2", **environment, MODELWORKER_SEQUENCES="3", MODELWORKER_SAMPLE="off")
    (request,) = json_messages(result.stdout)
    assert list(request.query_lens) == [2, 2, 2]
    assert list(request.sample) == [False] * 3


def test_the_owner_of_a_worker_is_warned_of_because_it_shuts_such_steps_out(payload: Payload) -> None:
    settings = WorkerSettings(fencing=FencingSettings(lease_idle_seconds=600), server=ServerSettings(log_level="error"))
    with server_on_a_thread(settings) as address:
        with Client(address) as client:
            step = {"query_lens": [1], "context_lens": [0], "token_ids": [1], "block_counts": [1], "block_ids": [1]}
            epoch = client.info().worker_epoch
            client.execute(build_step(**step, worker_epoch=epoch, router_id=77, step_id=1))  # type: ignore[arg-type]
        result = payload("--address", address)
    assert result.code == 0
    assert result.stderr == ("modelworker: warning: router 77 owns the worker: until that ends, unsequenced steps are refused\n")
    assert len(json.loads(result.stdout)["queryLens"]) == 1
