"""An image's root folder, run as a container engine would run it, without an engine."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
_START_SECONDS, _STOP_SECONDS = 600.0, 40.0

# As an engine sets a container up: a read-only root; proc, dev and shm; the model read-only; the cache writable.
_START = """
set -eu
root=$1 model=$2 user=$3; shift 3
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 dev "$root/dev"
for node in null zero full random urandom; do : >"$root/dev/$node"; mount --bind "/dev/$node" "$root/dev/$node"; done
mkdir "$root/dev/shm"
mount -t tmpfs -o size=64m,mode=1777 shm "$root/dev/shm"
mount -t tmpfs -o mode=755,uid="${user%:*}",gid="${user#*:}" cache "$root/cache"
mount --bind "$model" "$root/model"
mount -o remount,bind,ro "$root/model"
mount -o remount,bind,ro "$root"
exec setpriv --no-new-privs chroot --userspec="$user" --groups= "$root" "$@"
"""


class CheckError(Exception):
    """The image, or this machine, is not as it has to be."""


def require(condition: bool, what: str) -> None:
    """Ends the check if the condition doesn't hold."""
    if not condition:
        raise CheckError(what)


class Container:
    """The image, running. Its network is the machine's. It ends with the process that started it, however that ends."""

    def __init__(self, root: Path, config: dict[str, Any], model: Path, variables: list[str], log: Path) -> None:
        self.user: str = config["User"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._environment = [
            "env",
            "-i",
            f"--chdir={config['WorkingDir']}",
            *config["Env"],
            f"MODELWORKER_PORT={self.port}",
            *variables,
        ]
        command = [*self._environment, *config["Entrypoint"], *config["Cmd"]]
        namespaces = ["--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--ipc", "--uts"]
        self.log_path = log
        with log.open("w") as out:
            self._unshare = subprocess.Popen(
                [
                    "setpriv",
                    "--pdeathsig",
                    "KILL",
                    "unshare",
                    *namespaces,
                    "sh",
                    "-c",
                    _START,
                    "sh",
                    str(root),
                    str(model),
                    self.user,
                    *command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.started = time.monotonic()
        self.channel = grpc.insecure_channel(self.address)

    @property
    def pid(self) -> int:
        """The process that is number 1 in the container, as this machine counts it."""
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children").read_text().split()
        require(len(children) == 1, f"the container has no process 1:\n{self.log_path.read_text()}")
        return int(children[0])

    def health(self, name: str) -> int | None:
        """Probes a name as kubelet does; None: no answer."""
        with contextlib.suppress(grpc.RpcError):
            request = health_pb2.HealthCheckRequest(service=name)
            status: int = health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=5).status
            return status
        return None

    def wait_serving(self, name: str) -> float:
        """Waits until a name is SERVING; returns the seconds since the start."""
        while self.health(name) != SERVING:
            require(self._unshare.poll() is None, f"the worker ended with {self._unshare.poll()}:\n{self.log_path.read_text()}")
            require(time.monotonic() - self.started < _START_SECONDS, f"{name} is not SERVING after {_START_SECONDS:g} s")
            time.sleep(0.05)
        return time.monotonic() - self.started

    def run(self, *command: str) -> str:
        """Runs a command in the container, as its user; returns what it prints."""
        user, group = self.user.split(":")
        enter = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--ipc", "--uts", "--root", "--setuid", user]
        done = subprocess.run(
            [*enter, "--setgid", group, *self._environment, *command], capture_output=True, text=True, check=False, timeout=300
        )
        require(done.returncode == 0, f"{command} in the container ended with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def terminate(self) -> None:
        """Sends SIGTERM to process 1."""
        os.kill(self.pid, signal.SIGTERM)

    def wait_end(self) -> int:
        """Waits for the end; returns the exit code."""
        try:
            return self._unshare.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise CheckError(f"the worker still runs {_STOP_SECONDS:g} s after SIGTERM") from error

    def close(self) -> None:
        """Ends what still runs."""
        self.channel.close()
        if self._unshare.poll() is None:
            self._unshare.kill()
            self._unshare.wait()
