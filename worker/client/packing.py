"""Arrays as packed repeated fields of a message."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from modelworker.worker.arrays import BoolArray

IntegersLike = npt.NDArray[np.integer[Any]] | Sequence[int]
FloatsLike = npt.NDArray[np.floating[Any]] | Sequence[float]
BoolsLike = BoolArray | Sequence[bool]

Values = IntegersLike | FloatsLike | BoolsLike

_LENGTH_DELIMITED = 2
_LARGEST_ONE_BYTE_VARINT = 127


def packed(message: type[Message], fields: dict[str, tuple[Values | None, str]]) -> bytes:
    """Encodes arrays as packed repeated fields (https://protobuf.dev/programming-guides/encoding/#packed)."""
    parts: list[bytes] = []
    for name, (values, dtype) in fields.items():
        if values is None:
            continue
        data = _exact(name, values, np.dtype(dtype)).tobytes()
        if data:
            number = message.DESCRIPTOR.fields_by_name[name].number
            parts += (_varint(number << 3 | _LENGTH_DELIMITED), _varint(len(data)), data)
    return b"".join(parts)


def _exact(name: str, values: Values, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Converts to the field's type; an integer that does not fit is an error, never another number."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name}: found an array of {array.ndim} dimensions, expected 1")
    is_list = isinstance(values, Sequence) and array.dtype.kind == "f"
    if is_list and dtype.kind in "iu" and all(isinstance(each, int) for each in values):
        # numpy makes floats of a list that mixes integers above and below 2**63.
        array = np.array(values, object)
    if array.dtype == dtype or array.size == 0 or dtype.kind == "f":
        return array.astype(dtype, copy=False)
    if (array.dtype.kind == "b") != (dtype.kind == "b") or array.dtype.kind not in "iubO":
        raise ValueError(f"{name}: found an array of {array.dtype}, expected {dtype}")
    if dtype.kind in "iu":
        lowest, highest = (0, _LARGEST_ONE_BYTE_VARINT) if dtype == np.uint8 else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        low, high = int(array.min()), int(array.max())
        if low < lowest or high > highest:
            raise ValueError(f"{name}: found values {low} .. {high}, expected {lowest} .. {highest}")
    return array.astype(dtype)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
