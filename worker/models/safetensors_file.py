"""Reads safetensors files: the header is checked entirely before anything else, tensors are views of the mapped file.

The format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from modelworker.worker.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000
_ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a safetensors file.

    Attributes:
        name: of the tensor.
        path: of the file.
        dtype: as the file spells it, e.g. BF16.
        shape: of the tensor.
        start: offset of its first byte in the file.
        num_bytes: its size.
    """

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    @property
    def is_loadable(self) -> bool:
        """Whether it holds floating-point numbers of a type that can be served."""
        return self.dtype in _DTYPES


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Reads and checks the header of a safetensors file.

    Raises:
        CheckpointError: the file can't be read, is truncated or too long, or its header makes no sense.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                raise CheckpointError(
                    f"{path}: truncated: expected at least the 8 bytes of a safetensors header's length, found {size}"
                )
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path}: is no safetensors file: expected a header of at most {_MAX_HEADER_BYTES} bytes, found {length}"
                )
            if 8 + length > size:
                raise CheckpointError(f"{path}: truncated: expected a header of {length} bytes after the first 8, found {size - 8}")
            header = json.loads(file.read(length), object_pairs_hook=_refuse_repeated_names)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is invalid: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the safetensors header is invalid: expected an object, found {type(header).__name__}")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, value, 8 + length) for name, value in header.items()}
    _check_layout(path, entries, 8 + length, size)
    return entries


def _refuse_repeated_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"the name {name!r} stands there twice")
        result[name] = value
    return result


def _entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    try:
        dtype, shape, (start, end) = value["dtype"], value["shape"], value["data_offsets"]
        is_valid = dtype in _ITEM_BYTES and all(type(number) is int and number >= 0 for number in (*shape, start, end))
    except (TypeError, KeyError, ValueError):
        is_valid = False
    if not is_valid:
        raise CheckpointError(f"{path}: {name}: expected a known dtype, a shape and two data_offsets, found {str(value)[:200]}")
    expected = math.prod(shape) * _ITEM_BYTES[dtype]
    if end - start != expected:
        raise CheckpointError(
            f"{path}: {name}: expected {expected} bytes for {dtype} {list(shape)}, found data_offsets {[start, end]}"
        )
    return TensorEntry(name, path, dtype, tuple(shape), data_start + start, expected)


def _check_layout(path: Path, entries: dict[str, TensorEntry], data_start: int, size: int) -> None:
    """Tensors lie one after another without gaps and fill the file exactly."""
    end = data_start
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.num_bytes)):
        if entry.start != end:
            raise CheckpointError(
                f"{path}: {entry.name}: expected its data at offset {end - data_start}, where the tensor before ends, "
                f"found {entry.start - data_start}"
            )
        end += entry.num_bytes
    if end != size:
        raise CheckpointError(
            f"{path}: {'truncated' if size < end else 'too long'}: expected {end} bytes, as its header says, found {size}"
        )


class SafetensorsFile:
    """A mapped safetensors file. A context manager; tensors must not be used after its end."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        try:
            with self._path.open("rb") as file:
                # Private rather than read-only: torch warns of buffers that it couldn't write to.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise CheckpointError(f"{self._path}: can't be mapped: {error.strerror}") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        # Closed with the last view of it.
        del self._map

    def bytes_of(self, entry: TensorEntry) -> memoryview:
        """The tensor's bytes, as they stand in the file."""
        return memoryview(self._map)[entry.start : entry.start + entry.num_bytes]

    def tensor(self, entry: TensorEntry) -> Tensor:
        """The tensor, without copying it."""
        dtype = _DTYPES[entry.dtype]
        if entry.num_bytes == 0:
            return torch.empty(entry.shape, dtype=dtype, device="cpu")
        data = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.num_bytes, offset=entry.start)
        if entry.start % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(entry.shape)

    def release(self, entry: TensorEntry) -> None:
        """Gives the memory behind a tensor back, so that reading a file never holds more than one."""
        start = -(-entry.start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (entry.start + entry.num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, length)
