"""The file of a recording: what a worker executed in one epoch, in the order of execution.

    header     one line of JSON (UTF-8, ends with spaces and a line feed): format, version, and what `RecordingHeader` says
    record     fixed part, little-endian:   kind u8 | seed u64 | time u64 | length of the request u32 | length of the answer u32 |
                                           CRC-32 of these u32
               then the bytes of the request, those of the answer, and the CRC-32 u32 of both, one behind the other
    ...

| kind | record | request | answer |
|---|---|---|---|
| 1 | STEP, executed | ExecuteStepRequest | ExecuteStepResponse (without the times of the queue) |
| 2 | FAULT: the step failed after launch, and ended the epoch | ExecuteStepRequest | empty |
| 3 | END: the recording ended before the epoch did | why, UTF-8 | empty |
| 4 | RELEASE: of sequences, between steps | their ids, u64 each | empty |

`seed` is what the engine drew the seeds of rows without one from; `time`, in ns of the worker's monotonic clock, is the moment that
decided which sequences were idle for so long that their tokens were dropped. A worker that is killed leaves a file whose last
record may be cut off: what lies before it can be read. Where there is no room for END on the disk, the header says why instead:
its spaces are room for that.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO

from modelworker.worker.errors import SetupError

FILE_PATTERN = "*.steps"

_FORMAT = "modelworker steps"
_VERSION = 2
_FIXED = struct.Struct("<BQQII")
_CHECKSUM = struct.Struct("<I")
_FIXED_BYTES = _FIXED.size + _CHECKSUM.size
# A header that is longer than this isn't one.
_MAX_HEADER_BYTES = 2**20
# Of the header, for why the recording ended. JSON takes up to 12 bytes for a character.
_MAX_END_CHARACTERS = 170
_END_ROOM_BYTES = 12 * _MAX_END_CHARACTERS


class RecordKind(IntEnum):
    """What a record is. The numbers are those in the file."""

    STEP = 1
    FAULT = 2
    END = 3
    RELEASE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingHeader:
    """What is needed to execute the steps again.

    Attributes:
        epoch: worker_epoch of the first step; 0: it was unsequenced and named none.
        recorded_at: UTC, ISO 8601.
        settings: of the worker, by section, as `settings_record` writes them; of what is chosen at start, the choice.
        worker: facts that say whether another worker computes the same, such as the digest of the weights; for people and checks.
        ended: why the recording ended before the epoch did, if there was no room for an END record.
    """

    epoch: int
    recorded_at: str
    settings: Mapping[str, Mapping[str, Any]]
    worker: Mapping[str, Any]
    ended: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One record.

    Attributes:
        kind: of it.
        seed: what the engine drew the seeds of rows without one from.
        time_ns: when it was executed, by the worker's monotonic clock.
        request: bytes of the ExecuteStepRequest; of END, why; of RELEASE, the ids.
        answer: bytes of the ExecuteStepResponse; empty unless it is a STEP.
    """

    kind: RecordKind
    seed: int = 0
    time_ns: int = 0
    request: bytes = b""
    answer: bytes = b""

    def encode(self) -> bytes:
        """Returns its bytes in the file."""
        fixed = _FIXED.pack(self.kind, self.seed, self.time_ns, len(self.request), len(self.answer))
        checksum = zlib.crc32(self.answer, zlib.crc32(self.request))
        return b"".join((fixed, _CHECKSUM.pack(zlib.crc32(fixed)), self.request, self.answer, _CHECKSUM.pack(checksum)))


def encode_header(header: RecordingHeader) -> bytes:
    """Returns a header's bytes in the file: as many, whyever the recording ended."""
    size = len(_encode_json(replace(header, ended=""))) + _END_ROOM_BYTES
    return _encode_json(replace(header, ended=header.ended[:_MAX_END_CHARACTERS])).ljust(size) + b"\n"


def _encode_json(header: RecordingHeader) -> bytes:
    return json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(header)}).encode()


def create_file(path: Path) -> int:
    """Creates a file that only its owner can read and write. Returns its descriptor.

    Raises:
        OSError: it can't be created, or is there already.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


class RecordingFile:
    """A recording, read.

    Attributes:
        path: of the file.
        header: of the recording.
        is_cut_off: whether the last record is incomplete; known once all `records` are read.
    """

    def __init__(self, path: Path) -> None:
        """Reads the header.

        Raises:
            SetupError: the file can't be read, or is no recording.
        """
        self.path = path
        self.is_cut_off = False
        try:
            with path.open("rb") as file:
                line = file.readline(_MAX_HEADER_BYTES)
                self._records_start = file.tell()
        except OSError as error:
            raise SetupError(f"{path}: can't be read: {error.strerror}") from error
        self.header = _parse_header(path, line)

    def records(self) -> Iterator[Record]:
        """Yields the records up to the end, or to one that is cut off.

        Raises:
            SetupError: a record is damaged.
        """
        with self.path.open("rb") as file:
            file.seek(self._records_start)
            while (record := self._read_record(file)) is not None:
                yield record

    def count_records(self) -> int:
        """Returns how many whole records there are, without reading what is in them."""
        count, size = 0, self.path.stat().st_size
        with self.path.open("rb") as file:
            file.seek(self._records_start)
            while len(fixed := file.read(_FIXED_BYTES)) == _FIXED_BYTES:
                *_, request_bytes, answer_bytes = _FIXED.unpack_from(fixed)
                count += file.seek(request_bytes + answer_bytes + _CHECKSUM.size, os.SEEK_CUR) <= size
        return count

    def _read_record(self, file: BinaryIO) -> Record | None:
        at = file.tell()
        fixed = file.read(_FIXED_BYTES)
        if not fixed:
            return None
        if len(fixed) == _FIXED_BYTES:
            kind, seed, time_ns, request_bytes, answer_bytes = _FIXED.unpack_from(fixed)
            self._check(at, fixed[: _FIXED.size], fixed[_FIXED.size :])
            if kind not in set(RecordKind):
                raise SetupError(f"{self.path}: damaged at byte {at}: found a record of kind {kind}, expected 1, 2, 3 or 4")
            num_bytes = request_bytes + answer_bytes
            content = file.read(num_bytes + _CHECKSUM.size)
            if len(content) == num_bytes + _CHECKSUM.size:
                self._check(at, content[:num_bytes], content[num_bytes:])
                request, answer = content[:request_bytes], content[request_bytes:num_bytes]
                return Record(kind=RecordKind(kind), seed=seed, time_ns=time_ns, request=request, answer=answer)
        self.is_cut_off = True
        return None

    def _check(self, at: int, content: bytes, checksum: bytes) -> None:
        if _CHECKSUM.pack(zlib.crc32(content)) != checksum:
            raise SetupError(f"{self.path}: damaged at byte {at}: the record has not the checksum that was written with it")


def _parse_header(path: Path, line: bytes) -> RecordingHeader:
    try:
        found = json.loads(line)
        if not isinstance(found, dict) or found.pop("format", None) != _FORMAT:
            raise ValueError("no header")
    except ValueError:
        raise SetupError(f"{path}: is no recording of steps: expected a first line of JSON with format {_FORMAT!r}") from None
    if (version := found.pop("version", None)) != _VERSION:
        raise SetupError(f"{path}: has version {version} of the format, expected {_VERSION}")
    try:
        header = RecordingHeader(**found)
    except TypeError as error:
        raise SetupError(f"{path}: the header is not complete: {error}") from None
    if not isinstance(header.ended, str):
        raise SetupError(f"{path}: the header's `ended` is {header.ended!r}, expected a text")
    return header
