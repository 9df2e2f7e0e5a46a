"""Collects what is wrong with a request."""

from collections.abc import Callable, Sized

from modelworker.worker.arrays import Int64Array
from modelworker.worker.errors import InvalidStepError, Violation


class Violations:
    """What is wrong with one request: the first `LIMIT` findings, and the names of all fields that had any.

    A check asks `"query_lens" in violations` to skip what a bad field has made meaningless.
    """

    LIMIT = 16

    def __init__(self) -> None:
        self._violations: list[Violation] = []
        self._fields: set[str] = set()

    def __contains__(self, field: str) -> bool:
        return field in self._fields

    @property
    def is_empty(self) -> bool:
        """Whether nothing was found."""
        return not self._violations

    @property
    def is_full(self) -> bool:
        """Whether further findings would not be told."""
        return len(self._violations) >= self.LIMIT

    def add(self, path: str, description: str) -> None:
        """Records one violation; beyond `LIMIT` only the field's name is kept."""
        self._fields.add(path.partition("[")[0])
        if not self.is_full:
            self._violations.append(Violation(path, description))

    def add_entries(self, field: str, indices: Int64Array, describe: Callable[[int], str]) -> None:
        """Records entries `indices` of an array field, each with what `describe` says of that entry."""
        for index in indices[: self.LIMIT].tolist():
            self.add(f"{field}[{index}]", describe(index))

    def raise_if_any(self) -> None:
        """Ends the request if something was found.

        Raises:
            InvalidStepError: with all that was recorded.
        """
        if self._violations:
            raise InvalidStepError(self._violations)


def check_length(field: str, array: Sized, expected: int, violations: Violations, per: str = "one per entry of query_lens") -> bool:
    """Checks how many entries a field has, and tells whether it is that many."""
    if len(array) != expected:
        violations.add(field, f"found {len(array)} entries, expected {expected}, {per}")
        return False
    return True


def check_optional_length(field: str, array: Sized, num_sequences: int, violations: Violations) -> bool:
    """Checks that a field is empty or has one entry per row, and tells whether it has one per row."""
    return len(array) > 0 and check_length(field, array, num_sequences, violations, "one per entry of query_lens, or none")
