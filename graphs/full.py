"""FULL graphs: the whole step in one replay."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor

from modelworker.graphs.backend import GraphBackend, Replay, StaticInputs, Tensors, UnknownKeyError
from modelworker.graphs.shapes import GraphKey


class _Graph(NamedTuple):
    replay: Replay
    inputs: StaticInputs
    outputs: Tensors


class FullGraphs:
    """The FULL graphs of a step.

    Args:
        run: computes a step from its inputs, which are slices of static buffers.
    """

    def __init__(self, run: Callable[..., Tensors]) -> None:
        self._run = run
        self._graphs: dict[GraphKey, _Graph] = {}

    def __call__(self, *inputs: Tensor) -> Tensors:
        """Runs a step without a graph."""
        return self._run(*inputs)

    def capture(self, key: GraphKey, inputs: Sequence[Tensor], backend: GraphBackend) -> None:
        """Captures the step of a key.

        Raises:
            Exception: the step can't be captured.
        """
        replay, outputs = backend.capture(partial(self._run, *inputs))
        static = StaticInputs(str(key), inputs, range(len(inputs)))
        self._graphs[key] = _Graph(replay, static, tuple(map(backend.borrowed, outputs)))

    def replay(self, key: GraphKey, inputs: Sequence[Tensor]) -> Tensors:
        """Hot path: runs the step of a key.

        Args:
            key: that was captured.
            inputs: those of the capture, with new values.

        Returns:
            the step's outputs, valid until anything is replayed again.

        Raises:
            UnknownKeyError: the key was not captured.
            StaleInputError: an input lies elsewhere than at the capture.
        """
        graph = self._graphs.get(key)
        if graph is None:
            raise UnknownKeyError(f"no graph was captured for {key}")
        graph.inputs.check(inputs)
        graph.replay()
        return graph.outputs

    def replays(self, key: GraphKey) -> Sequence[Replay]:
        """Returns what `replay` calls for a key, for measurements."""
        return (self._graphs[key].replay,) if key in self._graphs else ()

    def close(self) -> None:
        """Frees all graphs."""
        while self._graphs:
            self._graphs.popitem()[1].replay.close()
