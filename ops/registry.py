"""The registries of ops and layers: which names there are, and which classes replace which.

They are module-level state by design: decorators must reach them while modules are being imported.
"""

from typing import Final


class Registry:
    """Classes by name."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.entries: dict[str, type] = {}
        self.warned: set[str] = set()

    def add(self, key: str, entry: type) -> None:
        """Adds a class.

        Raises:
            ValueError: the name is taken.
        """
        if key in self.entries:
            raise ValueError(
                f"{self.what} {key!r} is taken by {full_name(self.entries[key])}; {full_name(entry)} can't have it, too"
            )
        self.entries[key] = entry

    def key_of(self, entry: type) -> str | None:
        """Returns the name of a class, None if it has none."""
        return next((key for key, value in self.entries.items() if value is entry), None)

    def warns_first(self, key: str) -> bool:
        """Says whether this is the first warning of its kind, which alone is to be given."""
        first = key not in self.warned
        self.warned.add(key)
        return first


def full_name(entry: type) -> str:
    """Returns a class's name with its module."""
    return f"{entry.__module__}.{entry.__qualname__}"


OPS: Final = Registry("the op name")
"""Ops and layers by their registered names, which settings and reports use."""

REPLACEMENTS: Final = Registry("the replacement of")
"""Out-of-tree classes by the name of the class that they replace."""
