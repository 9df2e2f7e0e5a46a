"""Counters of the worker: named integers with labels, written by the engine thread and the event loop, read by GetWorkerInfo."""

import threading

_Named = tuple[str | tuple[str, str], ...]

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def counter_key(name: str, labels: dict[str, str]) -> str:
    """Spells a counter as Prometheus does: `steps_total{mode="NONE"}`, labels in the order of their names.

    Source: the Prometheus text exposition format (backslash, double quote and line feed are escaped in label values).
    """
    if not labels:
        return name
    pairs = ",".join(f'{label}="{value.translate(_ESCAPES)}"' for label, value in sorted(labels.items()))
    return f"{name}{{{pairs}}}"


class Counters:
    """Counts events since the worker started. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, int] = {}
        # As callers name counters: as many as there are counters, for labels have few values.
        self._keys: dict[_Named, str] = {}

    def increment(self, name: str, amount: int = 1, /, **labels: str) -> None:
        """Adds to a counter, which starts at 0.

        Args:
            name: of the counter, e.g. `steps_total`.
            amount: >= 0. An amount of 0 makes the counter appear in snapshots.
            labels: they are part of the counter's key, in any order.

        Raises:
            ValueError: the amount is negative; a counter never falls.
        """
        if amount < 0:
            raise ValueError(f"{name} can't be incremented by {amount}: counters never fall")
        named: _Named = (name, *labels.items())
        with self._lock:
            key = self._keys.get(named)
            if key is None:
                key = self._keys[named] = counter_key(name, labels)
            self._values[key] = self._values.get(key, 0) + amount

    def snapshot(self) -> dict[str, int]:
        """Returns all counters by key, in the order of their keys."""
        with self._lock:
            return dict(sorted(self._values.items()))
