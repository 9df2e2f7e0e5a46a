"""Reading a GGUF file: typed access to its metadata, and its tensors."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from modelworker.worker.errors import CheckpointError


class GgufFile:
    """A GGUF file, memory-mapped. Its format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

    def __init__(self, path: Path) -> None:
        """Opens a file and checks that all of its metadata and tensors are inside it.

        Raises:
            CheckpointError: there is no such file, or it is not a complete little-endian GGUF file.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                magic = file.read(4)
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read: {error.strerror}") from error
        if magic != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file: it starts with {magic!r}, expected b'GGUF'")
        try:
            reader = gguf.GGUFReader(path)
            self._values = {name: field.contents() for name, field in reader.fields.items()}
        except (ValueError, IndexError, KeyError, OverflowError, TypeError, OSError, MemoryError) as error:
            raise CheckpointError(f"{path}: a damaged or truncated GGUF file: {error}") from error
        if reader.byte_order != "I":
            raise CheckpointError(f"{path}: a GGUF file of the other byte order, expected little-endian")
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def keys(self) -> list[str]:
        """The names of the metadata fields."""
        return list(self._values)

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer field. A per-layer array counts as an integer when all of its entries are equal."""
        value = self._value(key, default)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, value, "an integer" + (", the same in every layer" if isinstance(value, list) else ""))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number: the decimal one that was rounded to the float32 of the file, 1e-05 rather than 9.999999747378752e-06."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, value, "a number")
        return shortest_decimal(float(value))

    def flag(self, key: str, default: bool) -> bool:
        """A boolean field."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A text field."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, value, "a text")
        return value

    def array(self, key: str, kind: type, default: list[Any] | None = None) -> list[Any]:
        """An array field whose entries are all of one type."""
        value = self._value(key, default)
        if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
            raise self.wrong(key, value, f"an array of {kind.__name__}")
        return value

    def wrong(self, key: str, found: object, expected: str) -> CheckpointError:
        """The error that says what stands in a field and what was expected."""
        shown = repr(found)
        return CheckpointError(
            f"{self.path}: {key}: found {shown if len(shown) <= 80 else shown[:77] + '...'}, expected {expected}"
        )

    def _value(self, key: str, default: object) -> object:
        value = self._values.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.path}: {key} is missing")
        return value


def shortest_decimal(value: float) -> float:
    """The decimal number with the fewest digits that rounds to the same float32."""
    return float(str(np.float32(value)))
