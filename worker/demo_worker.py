"""A worker as a child process: started on a free port, watched until it is ready, drained at the end."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from modelworker.worker.client import Client, WorkerUnavailableError
from modelworker.worker.errors import SetupError

_KEPT_LINES = 30
_POLL_SECONDS = 0.05
_DRAIN_SECONDS = 60.0


class WorkerProcess:
    """`modelworker serve` as a child process. Its log is shown while it starts, and the last lines are kept.

    On a terminal the worker gets one of its own, so that it draws its progress bars; else its log events are shown, one a line.
    """

    def __init__(self, model: Path, flags: Sequence[str], out: TextIO) -> None:
        self._out = out
        self._is_starting = True
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._directory = tempfile.TemporaryDirectory(prefix="modelworker-demo-")
        self._port_file = Path(self._directory.name) / "port"
        is_terminal = out.isatty()
        # On a terminal the bars say it all; log lines would only break them up.
        log_flags = ["--log-format", "console", "--log-level", "warning"] if is_terminal else ["--log-format", "json"]
        command = [sys.executable, "-m", "modelworker.worker.cli", "serve", "--model", str(model), "--port", "0"]
        command += ["--port-file", str(self._port_file), *log_flags, *flags]
        self._log, child = pty.openpty() if is_terminal else os.pipe()
        if is_terminal:
            fcntl.ioctl(child, termios.TIOCSWINSZ, fcntl.ioctl(out.fileno(), termios.TIOCGWINSZ, bytes(8)))
        # A session of its own: Ctrl-C reaches the demo alone, which then stops the worker in order.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=child, stderr=child, start_new_session=True)
        os.close(child)
        self._reader = threading.Thread(target=self._read, args=(is_terminal,), name="worker-log", daemon=True)
        self._reader.start()

    @property
    def last_lines(self) -> list[str]:
        """The end of the worker's log."""
        return list(self._lines)

    def wait_ready(self, timeout: float) -> Client:
        """Waits until the worker's health service says that it is ready. Returns a client of it.

        Raises:
            SetupError: it ended, or takes too long.
        """
        deadline = time.monotonic() + timeout
        while not self._port_file.exists():
            self._check_alive()
            if time.monotonic() > deadline:
                raise SetupError(f"the worker does not listen after {timeout:g} s")
            time.sleep(_POLL_SECONDS)
        client = Client(f"127.0.0.1:{self._port_file.read_text(encoding='ascii').strip()}")
        try:
            client.wait_ready(deadline - time.monotonic(), lambda state: self._check_alive())
        except WorkerUnavailableError as error:
            client.close()
            raise SetupError(error.message) from error
        self._is_starting = False
        return client

    def stop(self) -> int:
        """Drains the worker with SIGTERM and waits for its end; kills it when that takes too long. Returns its exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(_DRAIN_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._reader.join(1.0)
        self._directory.cleanup()
        return code

    def _check_alive(self) -> None:
        code = self._process.poll()
        if code is not None:
            self._reader.join(1.0)
            raise SetupError(f"the worker ended with exit code {code} before it was ready")

    def _read(self, is_terminal: bool) -> None:
        unfinished = b""
        while True:
            try:
                piece = os.read(self._log, 65536)
            except OSError:  # How a pseudo-terminal says that its other end is closed.
                piece = b""
            if not piece:
                os.close(self._log)
                return
            if is_terminal and self._is_starting:
                self._out.write(piece.decode("utf-8", "replace"))
                self._out.flush()
            *lines, unfinished = (unfinished + piece).split(b"\n")
            for line in lines:
                self._take_line(line.decode("utf-8", "replace").rstrip("\r"), show=self._is_starting and not is_terminal)

    def _take_line(self, line: str, *, show: bool) -> None:
        self._lines.append(line)
        if show:
            self._out.write(f"worker: {_event_of(line)}\n")
            self._out.flush()


def _event_of(line: str) -> str:
    """Returns the event of a JSON log line, or the line itself if it is none."""
    try:
        return str(json.loads(line)["event"])
    except (ValueError, KeyError, TypeError):
        return line
