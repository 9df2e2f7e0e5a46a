"""Runs the decoder over a step: through the best graph that fits, or without one."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from modelworker.graphs.backend import UnknownKeyError
from modelworker.graphs.dispatch import Choice, Dispatcher, Reason
from modelworker.graphs.graph_set import GraphSet
from modelworker.graphs.settings import RuntimeMode
from modelworker.graphs.shapes import GraphKey, StepShape, fits, step_shape
from modelworker.worker.batch import GraphExecution, GraphMode, StepBatch
from modelworker.worker.step_buffers import RunDecoder, StepBuffers, StepInputs

GRAPH_MODES: Mapping[RuntimeMode, GraphMode] = MappingProxyType(
    {RuntimeMode.NONE: GraphMode.NONE, RuntimeMode.PIECEWISE: GraphMode.PIECEWISE, RuntimeMode.FULL: GraphMode.FULL}
)


class Way(NamedTuple):
    """How a step is run.

    Attributes:
        choice: of the graph.
        is_plain: whether plain modules run it, although there may be compiled pieces; then no graph is chosen.
    """

    choice: Choice
    is_plain: bool = False


# By plain modules, without a graph.
PLAIN_WAY = Way(Choice(None, Reason.NONE), is_plain=True)


class DecodedStep(NamedTuple):
    """What the decoder made of a step.

    Attributes:
        hidden_states: [num_tokens, hidden_size], after the final norm; valid until the next step.
        execution: how it ran.
    """

    hidden_states: Tensor
    execution: GraphExecution


def padded_sizes(batch: StepBatch, key: GraphKey | None) -> tuple[int, int]:
    """Returns the numbers of tokens and sequences that a step is padded to for a graph; its own without one."""
    if key is None:
        return batch.num_tokens, batch.num_sequences
    # Without a number, attention runs on the real batch.
    return key.num_tokens, batch.num_sequences if key.num_sequences is None else key.num_sequences


class StepRunner:
    """Stages steps and runs the decoder over them.

    Args:
        buffers: for the inputs.
        block_size: of the KV cache.
        dispatcher: knows what is captured.
        graphs: what is captured; None: nothing.
        without_graph: runs the decoder at the step's real size.
        plain: the same by plain modules.
        compiled_modes: modes under which generated code runs.
    """

    def __init__(
        self,
        *,
        buffers: StepBuffers,
        block_size: int,
        dispatcher: Dispatcher,
        graphs: GraphSet | None,
        without_graph: RunDecoder,
        plain: RunDecoder,
        compiled_modes: frozenset[RuntimeMode],
    ) -> None:
        self.dispatcher = dispatcher
        self.graphs = graphs
        self.compiled_modes = compiled_modes
        self._buffers = buffers
        self._block_size = block_size
        self._without_graph = without_graph
        self._plain = plain
        # Of graphs that fix both sizes of a step.
        self._graph_inputs: dict[GraphKey, StepInputs] = {}
        self._decode_query_lens = dispatcher.settings.decode_query_lens

    @property
    def captured(self) -> tuple[GraphKey, ...]:
        """What can be replayed, in the order of capture."""
        return () if self.graphs is None else tuple(self.graphs.hits)

    def choose(self, batch: StepBatch) -> Choice:
        """Hot path: says which graph runs a step, and why not a better one."""
        return self.dispatcher.choose(self._shape(batch))

    def choose_mode(self, batch: StepBatch, mode: RuntimeMode) -> Choice | None:
        """Returns the smallest graph of a mode that fits a step, None if there is none; for measurements."""
        shape = self._shape(batch)
        fitting = [key for key in self.captured if key.mode is mode and fits(key, shape)]
        return Choice(min(fitting, key=lambda key: key.num_tokens), Reason.NONE) if fitting else None

    def _shape(self, batch: StepBatch) -> StepShape:
        return step_shape(batch.query_lens, batch.context_lens, batch.draft_lens, self._decode_query_lens)

    def stage(self, batch: StepBatch, key: GraphKey | None) -> StepInputs:
        """Hot path: writes a step into the buffers, padded for a graph, and returns what the graph or the decoder is given."""
        num_tokens, num_sequences = padded_sizes(batch, key)
        self._buffers.stage(batch, self._block_size, num_tokens=num_tokens, num_sequences=num_sequences)
        if key is None or key.num_sequences is None:
            return self._buffers.inputs(num_tokens, num_sequences)
        inputs = self._graph_inputs.get(key)
        if inputs is None:
            inputs = self._graph_inputs[key] = self._buffers.inputs(num_tokens, num_sequences)
        return inputs

    def stage_blank(self, key: GraphKey) -> StepInputs:
        """Writes a step that fits a graph and changes nothing."""
        num_sequences = key.num_sequences or 0
        self._buffers.stage_blank(num_tokens=key.num_tokens, num_sequences=num_sequences)
        return self._buffers.inputs(key.num_tokens, num_sequences)

    def decode(self, batch: StepBatch, inputs: StepInputs, way: Way) -> DecodedStep:
        """Hot path: runs the decoder over the staged step.

        Args:
            batch: the step.
            inputs: what `stage` returned for it and the chosen graph.
            way: how it is run.
        """
        choice, num_tokens = way.choice, batch.num_tokens
        padded_tokens, padded_sequences = padded_sizes(batch, choice.key)
        hidden_states = self.run(inputs, way)[0]
        execution = GraphExecution(
            mode=GRAPH_MODES[choice.mode],
            padded_tokens=padded_tokens,
            padded_sequences=padded_sequences,
            compiled=choice.mode in self.compiled_modes and not way.is_plain,
            fallback_reason=choice.reason.value,
        )
        return DecodedStep(hidden_states if padded_tokens == num_tokens else hidden_states[:num_tokens], execution)

    def run(self, inputs: StepInputs, way: Way) -> Sequence[Tensor]:
        """Hot path: runs the decoder over staged inputs. What it returns has a row for each padded token, too."""
        if way.choice.key is not None:
            return self.replay(way.choice.key, inputs)
        return self._plain(*inputs) if way.is_plain else self._without_graph(*inputs)

    def replay(self, key: GraphKey, inputs: StepInputs) -> Sequence[Tensor]:
        """Hot path: runs the graph of a key over what `stage` or `stage_blank` returned for it.

        Raises:
            UnknownKeyError: it was not captured.
        """
        if self.graphs is None:
            raise UnknownKeyError(f"nothing is captured, so there is no graph for {key}")
        return self.graphs.run(key, inputs)

    def disable(self, mode: RuntimeMode, reason: Reason) -> None:
        """Takes a mode out of service and frees its graphs. Mode NONE is the compiled pieces: plain modules run in their place."""
        self.dispatcher.disable(mode, reason)
        self.compiled_modes -= {mode}
        if mode is RuntimeMode.NONE:
            self._without_graph = self._plain
        elif self.graphs is not None:
            self.graphs.drop(mode)
