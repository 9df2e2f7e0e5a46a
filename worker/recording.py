"""Recording of executed steps, off by default: a wrong token in the field becomes a file for `modelworker replay`.

The engine thread hands each step over (`RecordingEngine`), a thread of its own encodes and writes it (`StepRecorder`). A file
begins with an epoch. From where something is missing on, the rest of the epoch is left out, for its KV would be missing too. The
format stands in `recording_file`.
"""

import contextlib
import logging
import os
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from google.protobuf.message import DecodeError

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.batch import StepBatch, StepResult, UInt64Array
from modelworker.worker.counters import Counters
from modelworker.worker.description import Degradation, WorkerDescription
from modelworker.worker.errors import OverloadedError, PreconditionError, SettingsError, SetupError
from modelworker.worker.executor import StepEngine
from modelworker.worker.recording_file import (
    Record,
    RecordingFile,
    RecordingHeader,
    RecordKind,
    create_file,
    encode_header,
)
from modelworker.worker.settings import WorkerSettings
from modelworker.worker.settings_record import settings_as_record
from modelworker.worker.wire import encode_result

RECORDING_THREAD_NAME = "recording"

_MAX_PENDING_BYTES = 64 * 2**20
_MAX_PENDING_STEPS = 4096
# Kept free for the record that says why a recording ended.
_END_BYTES = 512
_CLOSE_SECONDS = 10.0
_REASON = "steps_recorded"

_log = logging.getLogger(__name__)


class SeededEngine(StepEngine, Protocol):
    """An engine whose random rows can be made to repeat themselves."""

    def seed_open_rows(self, number: int) -> None:
        """Makes the seeds of rows without one, of the steps that follow, a function of a number."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Executed:
    """An executed step, or one that failed (`result` is None)."""

    batch: StepBatch
    result: StepResult | None
    seed: int

    @property
    def num_bytes(self) -> int:
        """Memory that keeping it takes, roughly."""
        return len(self.batch.request) + (0 if self.result is None else self.result.num_bytes)


class _End(NamedTuple):
    """From here on something is missing."""

    reason: str
    message: str


class ReleasedSequences(NamedTuple):
    """Sequences of which the engine forgot the sampled tokens."""

    sequence_ids: UInt64Array


class _NewEpoch(NamedTuple):
    """What follows does not read what was written before."""


class StepRecorder:
    """Writes what it is handed, on a thread of its own.

    Args:
        settings: of the worker.
        description: of the worker.
        counters: where it counts.
        max_pending_bytes: of steps that wait to be written; beyond, the recording of the epoch ends.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        description: WorkerDescription,
        counters: Counters,
        *,
        max_pending_bytes: int = _MAX_PENDING_BYTES,
    ) -> None:
        self._settings = settings_as_record(_as_chosen(settings, description))
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
        self._skips_epoch = False
        counters.increment("degradations_total", reason=_REASON)
        self._thread = threading.Thread(target=self._run, name=RECORDING_THREAD_NAME, daemon=True)
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

    def step(self, batch: StepBatch, result: StepResult | None, seed: int) -> None:
        """Hot path: takes a step that was executed; without a result, it failed after launch."""
        if self._has_ended:
            return
        executed = _Executed(batch=batch, result=result, seed=seed)
        num_bytes = executed.num_bytes
        with self._work:
            is_full = self._pending_bytes + num_bytes > self._max_pending_bytes or len(self._pending) >= _MAX_PENDING_STEPS
            if is_full:
                self._has_ended = True
                self._pending.append(_End("overflow", "steps were executed faster than they could be written"))
            else:
                self._pending_bytes += num_bytes
                self._pending.append(executed)
            self._work.notify()

    def release(self, sequence_ids: UInt64Array) -> None:
        """Takes sequences that were released."""
        with self._work:
            if not self._has_ended and len(self._pending) < _MAX_PENDING_STEPS:
                self._pending.append(ReleasedSequences(sequence_ids.copy()))
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
            if isinstance(item, _Executed):
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
        if not item.batch.request:
            self._end("no_request", "a step came without its request")
            return
        content = b"" if self._file is not None else encode_header(self._header(item.batch))
        content += _record_of(item).encode()
        if len(content) + _END_BYTES > self._bytes_left:
            self._end("limit", "--record-steps-limit is reached")
            return
        if self._file is None:
            self._num_files += 1
            self._file = create_file(self._path)
            self._file_bytes = 0
        self._append(self._file, content)
        self._counters.increment("steps_recorded_total")

    def _header(self, first: StepBatch) -> RecordingHeader:
        return RecordingHeader(
            epoch=first.worker_epoch,
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
            except OSError as error:
                _log.warning("that can't be written into the recording: %s", error.strerror)
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class RecordingEngine:
    """An engine whose steps are recorded."""

    def __init__(self, engine: SeededEngine, recorder: StepRecorder, folder: str) -> None:
        self._engine = engine
        self._recorder = recorder
        self._seeds = np.random.default_rng()
        warning = Degradation(reason=_REASON, message=f"every executed step is written into {folder}: prompts and tokens are in it")
        described = engine.description
        self.description = replace(described, degradations=(*described.degradations, warning))
        _log.warning("degraded: %s: %s", warning.reason, warning.message)

    def step(self, batch: StepBatch) -> StepResult:
        """Hot path: executes a step and hands it to the recorder."""
        seed = int(self._seeds.integers(0, 2**64, dtype=np.uint64))
        self._engine.seed_open_rows(seed)
        try:
            result = self._engine.step(batch)
        except (PreconditionError, OverloadedError):
            raise  # Nothing was executed.
        except Exception:
            self._recorder.step(batch, None, seed)
            raise
        self._recorder.step(batch, result, seed)
        return result

    def release_sequences(self, sequence_ids: UInt64Array) -> int:
        """Forgets the sampled tokens of sequences. Returns how many of them were known."""
        num_released = self._engine.release_sequences(sequence_ids)
        self._recorder.release(sequence_ids)
        return num_released

    def reset_kv_cache(self) -> None:
        """Fills the KV cache with zeros; another epoch begins."""
        self._engine.reset_kv_cache()
        self._recorder.new_epoch()


class RecordedStep(NamedTuple):
    """A record, parsed.

    Attributes:
        request: what was asked for.
        answer: what the step came to; None: it failed after launch.
        seed: what the engine drew the seeds of rows without one from.
    """

    request: pb.ExecuteStepRequest
    answer: pb.ExecuteStepResponse | None
    seed: int


def read_steps(file: RecordingFile) -> Iterator[RecordedStep | ReleasedSequences | str]:
    """Yields the steps of a recording and what was released between them; at the end, if it came before that of the epoch, why.

    Raises:
        SetupError: a record is damaged.
    """
    for record in file.records():
        if record.kind is RecordKind.END:
            yield record.request.decode(errors="replace")
            continue
        if record.kind is RecordKind.RELEASE:
            yield ReleasedSequences(np.frombuffer(record.request, "<u8").astype(np.uint64))
            continue
        try:
            request = pb.ExecuteStepRequest.FromString(record.request)
            answer = pb.ExecuteStepResponse.FromString(record.answer) if record.kind is RecordKind.STEP else None
        except DecodeError as error:
            raise SetupError(f"{file.path}: a record is no step: {error}") from error
        yield RecordedStep(request, answer, record.seed)


def prepare_folder(folder: Path) -> None:
    """Makes sure that a recording can be written into a folder, which is made if there is none.

    Raises:
        SettingsError: it can't, or the folder is not empty.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise SettingsError(f"--record-steps {folder}: is not empty, expected a new or empty folder")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SettingsError(f"--record-steps {folder}: can't be written into: {error.strerror}") from error


def _record_of_release(item: ReleasedSequences) -> Record:
    return Record(kind=RecordKind.RELEASE, request=item.sequence_ids.astype("<u8").tobytes())


def _record_of(item: _Executed) -> Record:
    if item.result is None:
        return Record(kind=RecordKind.FAULT, seed=item.seed, request=item.batch.request)
    answer = encode_result(item.batch, item.result, item.batch.worker_epoch).SerializeToString()
    return Record(kind=RecordKind.STEP, seed=item.seed, request=item.batch.request, answer=answer)


def _as_chosen(settings: WorkerSettings, description: WorkerDescription) -> WorkerSettings:
    """Puts what was chosen at start in the place of what was left open, so that another machine chooses the same."""
    model = Path(settings.model.model)
    return replace(
        settings,
        model=replace(
            settings.model,
            model=str(model.resolve()) if model.exists() else settings.model.model,
            dtype=description.model.dtype,
            max_model_len=description.model.max_model_len,
        ),
        kv_cache=replace(settings.kv_cache, num_blocks=description.kv_cache.num_blocks),
        device=replace(
            settings.device, device=description.execution.device.partition(":")[0], threads=description.execution.num_threads
        ),
    )


def facts_of(description: WorkerDescription) -> dict[str, Any]:
    """Returns what decides, beside the settings, what a worker computes; as headers have it."""
    model, execution = description.model, description.execution
    return {
        "model": model.name,
        "architecture": model.architecture,
        "weights_digest": model.weights_digest,
        "config_digest": model.config_digest,
        "device_name": execution.device_name,
        "attention": execution.attention,
        "optimization_level": execution.optimization_level,
        "graph_mode": execution.graph_mode,
        "ops": {op.name: op.implementation for op in description.ops if op.implementation},
        "versions": dict(description.versions),
    }
