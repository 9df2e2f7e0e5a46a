"""A change of the graphs of pieces."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx


@dataclass(frozen=True, slots=True)
class GraphPass:
    """A named change of graphs. A graph holds ATen ops and registered ops; see `passes`.

    Attributes:
        name: for settings and counters.
        apply: changes a graph and returns how often it found something to change.
    """

    name: str
    apply: Callable[[fx.Graph], int]
