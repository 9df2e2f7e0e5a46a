"""Real workers: `modelworker serve` as a process of its own."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from modelworker.worker.client import Client

_START_SECONDS = 300.0
_STOP_SECONDS = 60.0


@dataclass(frozen=True)
class WorkerProcess:
    """A running worker."""

    process: subprocess.Popen[bytes]
    address: str
    log_path: Path

    def log(self) -> str:
        return self.log_path.read_text()


@contextlib.contextmanager
def worker_process(model: Path, *arguments: str, environment: dict[str, str] | None = None) -> Iterator[WorkerProcess]:
    """Starts a worker on a free port and waits until it is ready; afterwards it must drain and exit with 0."""
    with tempfile.TemporaryDirectory() as directory:
        port_file, log_path = Path(directory, "port"), Path(directory, "log")
        command = [
            sys.executable, "-m", "modelworker.worker.cli", "serve", "--model", str(model), "--port", "0",
            "--port-file", str(port_file), "--log-format", "json", *arguments,
        ]  # fmt: skip
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONSAFEPATH": "1", **(environment or {})}
            )
        try:
            worker = WorkerProcess(process, f"127.0.0.1:{_wait_for_port(process, port_file, log_path)}", log_path)
            with Client(worker.address) as client:
                client.wait_ready(_START_SECONDS)
            yield worker
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            assert process.wait(_STOP_SECONDS) == 0, worker.log()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait_for_port(process: subprocess.Popen[bytes], port_file: Path, log_path: Path) -> int:
    while not port_file.exists():
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise AssertionError(f"the worker ended with {process.wait(0.05)}:\n{log_path.read_text()}")
    return int(port_file.read_text())
