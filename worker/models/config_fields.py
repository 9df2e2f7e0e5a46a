"""Typed access to the fields of a configuration file, with errors that name the file, the field, what was found and expected."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from modelworker.worker.errors import CheckpointError

# What follows from them has to fit into 64 bits and into memory.
_LARGEST_INT = 2**31 - 1
_LARGEST_NUMBER = 1e9


class Fields:
    """A JSON object of a configuration file. `null` counts as absent unless a method says otherwise."""

    def __init__(self, path: Path, values: Mapping[str, Any], *, prefix: str = "") -> None:
        self.path = path
        self._values = values
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def names(self) -> tuple[str, ...]:
        """Names of the fields that are present and not null."""
        return tuple(name for name, value in self._values.items() if value is not None)

    def get(self, name: str) -> Any:
        """The value as it stands in the file, None where it is absent."""
        return self._values.get(name)

    def error(self, name: str, found: Any, expected: str) -> CheckpointError:
        """An error about one field."""
        text = repr(found)
        return CheckpointError(
            f"{self.path}: {self._prefix}{name}: expected {expected}, found {text if len(text) <= 100 else text[:97] + '...'}"
        )

    def nested(self, name: str) -> "Fields | None":
        """The object under `name`; None where it is absent.

        Raises:
            CheckpointError: the value is not an object.
        """
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, value, "an object")
        return Fields(self.path, value, prefix=f"{self._prefix}{name}.")

    def either(self, first: str, second: str) -> Any:
        """The value of a field that has two spellings; None where neither is present.

        Raises:
            CheckpointError: both are present and differ.
        """
        values = [self._values[name] for name in (first, second) if self._values.get(name) is not None]
        if len(values) == 2 and values[0] != values[1]:
            names = f"{self._prefix}{first} ({values[0]!r}) and {self._prefix}{second} ({values[1]!r})"
            raise CheckpointError(f"{self.path}: {names} contradict each other")
        return values[0] if values else None

    def positive_int(self, name: str, *, default: int | None = None) -> int:
        """An integer of at least 1.

        Raises:
            CheckpointError: it is not one, or is absent and has no default.
        """
        value = self.optional_positive_int(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, None, "an integer of at least 1")
        return value

    def optional_positive_int(self, name: str, *, absent: int | None = None) -> int | None:
        """An integer of 1 .. 2^31 - 1, None where the file says null, `absent` where it doesn't have the field.

        Raises:
            CheckpointError: it is something else.
        """
        value = self._values.get(name, absent)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(name, value, "an integer of at least 1")
        if value > _LARGEST_INT:
            raise self.error(name, value, f"an integer of at most {_LARGEST_INT}")
        return value

    def non_negative_int(self, name: str, *, default: int) -> int:
        """An integer of 0 .. 2^31 - 1.

        Raises:
            CheckpointError: it is not one.
        """
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST_INT:
            raise self.error(name, value, f"an integer of 0 .. {_LARGEST_INT}")
        return value

    def positive_number(self, name: str, *, default: float | None = None, at_least: float = 0.0) -> float:
        """A number above 0, not below `at_least` and at most 1e9.

        Raises:
            CheckpointError: it is not one, or is absent and has no default.
        """
        value = self._values.get(name)
        if value is None:
            value = default
        expected = f"a number of at least {at_least:g}" if at_least else "a number above 0"
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(name, value, expected)
        if not math.isfinite(value) or value <= 0 or value < at_least:
            raise self.error(name, value, expected)
        if value > _LARGEST_NUMBER:
            raise self.error(name, value, f"a number of at most {_LARGEST_NUMBER:g}")
        return float(value)

    def boolean(self, name: str, *, default: bool) -> bool:
        """A boolean.

        Raises:
            CheckpointError: it is not one.
        """
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value
