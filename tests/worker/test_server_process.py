"""Signals, ports, exit codes and logs of a worker as a process of its own."""

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from modelworker.proto import model_worker_pb2 as pb
from modelworker.proto import model_worker_pb2_grpc
from modelworker_testing.serving import NOT_SERVING, SERVING, step_request
from modelworker_testing.slowness import slowness
from modelworker_testing.sum_worker import DEVICE_FAULT_TOKEN

SUPPORT = Path(__file__).parents[1] / "support"
ENVIRONMENT = {
    **os.environ,
    "PYTHONSAFEPATH": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")])),
}
ROUTER = 7


class Worker:
    """A `sum_worker` process, with a channel to it."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.port_file = directory / "port"
        self.log_path = directory / "log"
        self._gate = directory / "gate"
        command = [
            sys.executable,
            "-m",
            "modelworker_testing.sum_worker",
            "--port-file",
            str(self.port_file),
            "--log-format",
            "json",
            "--gate",
            str(self._gate),
        ]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", "0", *flags], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self.wait(self.port_file.exists)
        self.port = int(self.port_file.read_text())
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self.stub = model_worker_pb2_grpc.ModelWorkerStub(self.channel)

    def wait(self, condition) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.01)

    def health(self, name: str = "readiness") -> int:
        request = health_pb2.HealthCheckRequest(service=name)
        return health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=20, wait_for_ready=True).status

    def wait_ready(self) -> None:
        self.wait(lambda: self.health() == SERVING)

    def info(self) -> pb.WorkerInfo:
        return self.stub.GetWorkerInfo(pb.GetWorkerInfoRequest())

    def step(self, step_id: int) -> pb.ExecuteStepRequest:
        """A step of the worker's epoch whose token is its id."""
        return step_request([step_id], worker_epoch=self.info().worker_epoch, router_id=ROUTER, step_id=step_id)

    def wait_admitted(self, step_id: int) -> None:
        self.wait(lambda: self.info().next_step_id == step_id + 1)

    def open_gate(self) -> None:
        """Lets steps end."""
        self._gate.touch()

    def log(self) -> str:
        return self.log_path.read_text()

    def events(self) -> list[str]:
        return [json.loads(line)["event"] for line in self.log().splitlines()]

    def end(self) -> tuple[int, float]:
        """Waits for the end; returns the exit code and the seconds it took."""
        started = time.monotonic()
        return self.process.wait(20), time.monotonic() - started


@contextlib.contextmanager
def worker(directory: Path, *flags: str) -> Iterator[Worker]:
    running = Worker(directory, *flags)
    try:
        yield running
    finally:
        running.channel.close()
        if running.process.poll() is None:
            running.process.kill()
        running.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_accepted_steps_finish_refuses_new_ones_and_ends_with_zero(tmp_path: Path, number: signal.Signals):
    with worker(tmp_path, "--drain-seconds", "200") as running:
        running.wait_ready()
        accepted = []
        for step_id in (1, 2, 3):
            accepted.append(running.stub.ExecuteStep.future(running.step(step_id)))
            running.wait_admitted(step_id)
        running.process.send_signal(number)
        running.wait(lambda: running.health() == NOT_SERVING)
        assert running.health("liveness") == SERVING
        with pytest.raises(grpc.RpcError) as caught:
            running.stub.ExecuteStep(step_request())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        running.open_gate()
        assert [step.result(20).sampled_ids[0] for step in accepted] == [1, 2, 3]
        code, seconds = running.end()
        assert code == 0
        assert seconds < 3 * slowness()
        assert "drained" in running.events()


def test_a_second_signal_ends_the_worker_at_once_with_another_code(tmp_path: Path):
    with worker(tmp_path) as running:
        running.wait_ready()
        step = running.stub.ExecuteStep.future(running.step(1))
        running.wait_admitted(1)
        running.process.send_signal(signal.SIGTERM)
        running.wait(lambda: running.health() == NOT_SERVING)
        assert running.process.poll() is None
        running.process.send_signal(signal.SIGTERM)
        code, seconds = running.end()
        assert code == 128 + signal.SIGTERM
        assert seconds < 1 * slowness()
        assert step.exception(20).code() is grpc.StatusCode.UNAVAILABLE


def test_calls_of_every_kind_that_outlast_the_drain_cost_one_line_of_the_log_and_no_traceback(tmp_path: Path):
    """gRPC itself would print one for each of them."""
    with worker(tmp_path, "--drain-seconds", "0.2") as running:
        running.wait_ready()
        is_over = threading.Event()

        def steps() -> Iterator[pb.ExecuteStepRequest]:
            yield running.step(2)
            is_over.wait(60)

        def questions() -> Iterator[reflection_pb2.ServerReflectionRequest]:
            yield reflection_pb2.ServerReflectionRequest(list_services="")
            is_over.wait(60)

        single = running.stub.ExecuteStep.future(running.step(1))
        running.wait_admitted(1)
        stream = running.stub.ExecuteSteps(steps())
        running.wait_admitted(2)
        asking = reflection_pb2_grpc.ServerReflectionStub(running.channel).ServerReflectionInfo(questions())
        assert next(asking).HasField("list_services_response")
        running.process.send_signal(signal.SIGTERM)
        code, seconds = running.end()
        is_over.set()
        assert code == 4
        # The drain, and 2 s for the last answers.
        assert seconds < 2.2 + 0.7 * slowness()
        assert single.exception(20).code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.RpcError) as caught:
            list(stream)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        lines = [json.loads(line) for line in running.log().splitlines()]
        (error,) = (line for line in lines if line["level"] not in ("debug", "info"))
        assert error["event"] == "drain limit passed with steps unfinished"
        assert error["steps"] == 2


def test_a_signal_while_the_engine_is_being_built_ends_the_worker_promptly(tmp_path: Path):
    with worker(tmp_path, "--build-seconds", "15") as running:
        assert (running.health("liveness"), running.health("readiness")) == (SERVING, NOT_SERVING)
        with pytest.raises(grpc.RpcError) as caught:
            running.stub.GetWorkerInfo(pb.GetWorkerInfoRequest())
        assert caught.value.details() == "starting: loading weights 43 %"
        running.process.send_signal(signal.SIGTERM)
        code, seconds = running.end()
        assert code == 0
        assert seconds < 10
        assert "ready" not in running.events()


def test_a_build_that_fails_is_one_clear_line_and_code_one_and_never_ready(tmp_path: Path):
    with worker(tmp_path, "--build-error", "DIR: model.safetensors is truncated") as running:
        seen: list[int] = []

        def watch() -> None:
            with contextlib.suppress(grpc.RpcError):
                request = health_pb2.HealthCheckRequest(service="readiness")
                seen.extend(answer.status for answer in health_pb2_grpc.HealthStub(running.channel).Watch(request))

        watcher = threading.Thread(target=watch)
        watcher.start()
        running.wait(lambda: seen)
        running.open_gate()
        code, _ = running.end()
        watcher.join(10)
        assert code == 1
        assert set(seen) == {NOT_SERVING}
        (line,) = (line for line in running.log().splitlines() if not line.startswith("{"))
        assert line == "modelworker: error: DIR: model.safetensors is truncated"


def test_a_dead_device_ends_the_process_within_five_seconds_with_its_own_code(tmp_path: Path):
    with worker(tmp_path) as running:
        running.wait_ready()
        with pytest.raises(grpc.RpcError) as caught:
            running.stub.ExecuteStep(step_request([DEVICE_FAULT_TOKEN]))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        code, seconds = running.end()
        assert code == 3
        assert seconds < 5


def test_a_second_worker_on_one_port_ends_with_one_line_that_names_it(tmp_path: Path):
    with worker(tmp_path) as first:
        second = subprocess.run(
            [sys.executable, "-m", "modelworker_testing.sum_worker", "--port", str(first.port)],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert second.returncode == 1
        assert second.stderr == f"modelworker: error: can't listen on host 127.0.0.1 port {first.port}: Address already in use\n"
        assert first.process.poll() is None


def test_the_chosen_port_is_printed_and_all_log_lines_are_json(tmp_path: Path):
    with worker(tmp_path) as running:
        running.wait_ready()
        running.process.send_signal(signal.SIGTERM)
        assert running.end()[0] == 0
        assert running.process.stdout.read() == f"modelworker: listening on 127.0.0.1:{running.port}\n"
        assert running.events()[0] == "listening"


def test_on_a_terminal_start_up_is_a_progress_line_and_logs_are_coloured_text(tmp_path: Path):
    controller, terminal = os.openpty()
    port_file = tmp_path / "port"
    process = subprocess.Popen(
        [sys.executable, "-m", "modelworker_testing.sum_worker", "--port", "0", "--port-file", str(port_file)],
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
    )
    os.close(terminal)
    shown = b""
    try:
        while b"] ready " not in _without_colours(shown):
            assert select.select([controller], [], [], 20)[0], shown
            shown += os.read(controller, 4096)
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
        os.close(controller)
    text = shown.decode()
    assert "loading weights [" in text
    assert "loading weights: 0." in text
    assert "\x1b[32m" in text
    assert not text.startswith("{")


def _without_colours(text: bytes) -> bytes:
    return re.sub(rb"\x1b\[[0-9;]*m", b"", text)
