"""Writes executed steps into files, on a thread of its own.

A file begins with an epoch. From where something is missing on, the rest of the epoch is left out, for its KV would be missing too.
"""

import contextlib
import errno
import logging
import os
import tempfile
import threading
from collections import deque
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from modelworker.worker.arrays import UInt64Array
from modelworker.worker.batch import StepBatch
from modelworker.worker.counters import Counters
from modelworker.worker.description import WorkerDescription
from modelworker.worker.errors import SettingsError
from modelworker.worker.recording.facts import as_chosen, facts_of
from modelworker.worker.recording.file import Record, RecordingHeader, RecordKind, create_file, encode_header
from modelworker.worker.recording.reader import ReleasedSequences
from modelworker.worker.result import StepResult
from modelworker.worker.settings import WorkerSettings
from modelworker.worker.settings_record import settings_as_record
from modelworker.worker.wire import encode_result

_THREAD_NAME = "recording"
# Reason of the degradation.
STEPS_RECORDED = "steps_recorded"

_MAX_PENDING_BYTES = 64 * 2**20
# Steps and releases.
_MAX_PENDING = 4096
# Kept free for the record that says why a recording ended.
_END_BYTES = 512
_CLOSE_SECONDS = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Executed:
    """An executed step, or one that failed (`result` is None): what is written of it, so that the batch need not be kept for it."""

    request: bytes
    step_id: int
    client_tag: int
    worker_epoch: int
    result: StepResult | None
    seed: int
    time_ns: int

    @property
    def num_bytes(self) -> int:
        """Memory that keeping it takes, roughly."""
        return len(self.request) + (0 if self.result is None else self.result.num_bytes)


class _End(NamedTuple):
    """From here on something is missing."""

    reason: str
    message: str


class _NewEpoch(NamedTuple):
    """What follows does not read what was written before."""


class StepRecorder:
    """Writes what it is handed, on a thread of its own.

    Args:
        settings: of the worker.
        description: of the worker.
        counters: where it counts.
        max_pending_bytes: of steps and releases that wait to be written; beyond, the recording of the epoch ends.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        description: WorkerDescription,
        counters: Counters,
        *,
        max_pending_bytes: int = _MAX_PENDING_BYTES,
    ) -> None:
        self._settings = settings_as_record(as_chosen(settings, description))
        self._worker = facts_of(description)
        self._folder = Path(settings.recording.record_steps)
        self._counters = counters
        self._max_pending_bytes = max_pending_bytes
        self._pending: deque[_Executed | ReleasedSequences | _End | _NewEpoch | None] = deque()
        self._pending_bytes = 0
        self._work = threading.Condition()
        # Of the engine's side: what comes is left out until the next epoch.
        self._has_ended = False
        # Of the writer's side.
        self._bytes_left = settings.recording.record_steps_limit
        self._num_files = 0
        self._file: int | None = None
        self._file_bytes = 0
        self._header: RecordingHeader | None = None
        self._skips_epoch = False
        counters.increment("degradations_total", reason=STEPS_RECORDED)
        self._thread = threading.Thread(target=self._run, name=_THREAD_NAME, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Writes what is pending and ends. A disk that doesn't answer can't hold it up for long."""
        with self._work:
            self._pending.append(None)
            self._work.notify()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            _log.error("the last recorded steps are not written: %s does not answer", self._folder)

    # -- engine thread --

    def step(self, batch: StepBatch, result: StepResult | None, *, seed: int, time_ns: int) -> None:
        """Hot path: takes a step that was executed; without a result, it failed after launch."""
        executed = _Executed(
            request=batch.request,
            step_id=batch.step_id,
            client_tag=batch.client_tag,
            worker_epoch=batch.worker_epoch,
            result=result,
            seed=seed,
            time_ns=time_ns,
        )
        self._append_pending(executed)

    def release(self, sequence_ids: UInt64Array, *, time_ns: int) -> None:
        """Takes sequences that were released."""
        self._append_pending(ReleasedSequences(sequence_ids.copy(), time_ns))

    def _append_pending(self, item: _Executed | ReleasedSequences) -> None:
        """Hands something to the writer. Where too much waits, this epoch's recording ends: nothing is left out of its middle."""
        if self._has_ended:
            return
        with self._work:
            if self._pending_bytes + item.num_bytes > self._max_pending_bytes or len(self._pending) >= _MAX_PENDING:
                self._has_ended = True
                self._pending.append(_End("overflow", "steps were executed faster than they could be written"))
            else:
                self._pending_bytes += item.num_bytes
                self._pending.append(item)
            self._work.notify()

    def new_epoch(self) -> None:
        """Lets what follows go into a file of its own."""
        with self._work:
            self._has_ended = False
            if not self._pending or not isinstance(self._pending[-1], _NewEpoch):
                self._pending.append(_NewEpoch())
            self._work.notify()

    # -- writer --

    def _run(self) -> None:
        while (item := self._take()) is not None:
            try:
                self._write(item)
            except OSError as error:
                self._end("write_failed", f"can't write into {self._folder}: {error.strerror}")
            except Exception:
                # Whatever it is, steps go on, and nobody may believe that they are recorded.
                _log.exception("a step can't be recorded")
                self._end("failed", "a step could not be encoded")
        self._close_file()

    def _take(self) -> _Executed | ReleasedSequences | _End | _NewEpoch | None:
        with self._work:
            self._work.wait_for(lambda: self._pending)
            item = self._pending.popleft()
            if isinstance(item, _Executed | ReleasedSequences):
                self._pending_bytes -= item.num_bytes
            return item

    def _write(self, item: _Executed | ReleasedSequences | _End | _NewEpoch) -> None:
        if isinstance(item, _NewEpoch):
            self._close_file()
            self._skips_epoch = False
        elif isinstance(item, _End):
            self._end(item.reason, item.message)
        elif self._skips_epoch:
            return
        elif isinstance(item, _Executed):
            self._write_step(item)
        elif self._file is not None:  # Before the first step there is nothing to release.
            self._write_within_bound(self._file, _record_of_release(item))

    def _write_step(self, item: _Executed) -> None:
        if not item.request:
            self._end("no_request", "a step came without its request")
            return
        content = _record_of(item).encode()
        if self._file is None:
            self._header = self._header_of(item.worker_epoch)
            content = encode_header(self._header) + content
        if len(content) + _END_BYTES > self._bytes_left:
            self._end("limit", "--record-steps-limit is reached")
            return
        if self._file is None:
            self._num_files += 1
            self._file = create_file(self._path)
            self._file_bytes = 0
        self._append(self._file, content)
        self._counters.increment("steps_recorded_total")

    def _header_of(self, epoch: int) -> RecordingHeader:
        return RecordingHeader(
            epoch=epoch,
            recorded_at=datetime.now(UTC).isoformat(timespec="seconds"),
            settings=self._settings,
            worker=self._worker,
        )

    def _write_within_bound(self, file: int, record: Record) -> None:
        content = record.encode()
        if len(content) + _END_BYTES > self._bytes_left:
            self._end("limit", "--record-steps-limit is reached")
        else:
            self._append(file, content)

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._num_files:06d}.steps"

    def _append(self, file: int, content: bytes) -> None:
        if not os.fstat(file).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "the file was removed", str(self._path))
        view = memoryview(content)
        try:
            while view:
                view = view[os.write(file, view) :]
        except OSError:
            self._take_back(file)
            raise
        self._file_bytes += len(content)
        self._bytes_left -= len(content)

    def _take_back(self, file: int) -> None:
        """Cuts off what was written of a record; a file that has not even a header is no recording, and goes."""
        with contextlib.suppress(OSError):
            os.ftruncate(file, self._file_bytes)
            if not self._file_bytes:
                self._path.unlink()
                self._close_file()

    def _end(self, reason: str, message: str) -> None:
        """Leaves out the rest of the epoch, and says so in the file, a counter and the log."""
        if self._skips_epoch:
            return
        self._skips_epoch = True
        self._counters.increment("recordings_ended_total", reason=reason)
        _log.warning("steps are not recorded any more until the next epoch: %s", message)
        if self._file is not None:
            try:
                self._append(self._file, Record(kind=RecordKind.END, request=message.encode()).encode())
            except OSError:
                self._end_in_header(self._file, message)
        self._close_file()

    def _end_in_header(self, file: int, message: str) -> None:
        """Says in the header why a recording ended: a full disk takes what replaces bytes that are there."""
        assert self._header is not None
        try:
            os.pwrite(file, encode_header(replace(self._header, ended=message)), 0)
        except OSError as error:
            _log.warning("that can't be written into the recording: %s", error.strerror)

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def prepare_folder(folder: Path) -> None:
    """Makes sure that a recording can be written into a folder, which is made if there is none.

    Raises:
        SettingsError: it can't, or the folder is not empty.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise SettingsError(
                f"--record-steps {folder}: is not empty, expected a new or empty folder: a recording is not continued, "
                "so name another folder for this start, or move away what is in it"
            )
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingsError(f"--record-steps {folder}: can't be written into: {error.strerror}") from error


def _record_of_release(item: ReleasedSequences) -> Record:
    return Record(kind=RecordKind.RELEASE, time_ns=item.time_ns, request=item.sequence_ids.astype("<u8").tobytes())


def _record_of(item: _Executed) -> Record:
    if item.result is None:
        return Record(kind=RecordKind.FAULT, seed=item.seed, time_ns=item.time_ns, request=item.request)
    answer = encode_result(item, item.result, item.worker_epoch).SerializeToString()
    return Record(kind=RecordKind.STEP, seed=item.seed, time_ns=item.time_ns, request=item.request, answer=answer)
