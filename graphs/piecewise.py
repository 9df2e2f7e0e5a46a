"""PIECEWISE graphs: the pieces of a split model are replayed, the ops between them run on the real batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from modelworker.graphs.backend import GraphBackend, Replay, StaticInputs, Tensors, UnknownKeyError
from modelworker.graphs.shapes import GraphKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage of a split model.

    Tensors pass between stages in numbered slots: the step's inputs are in the first ones, tensors that are the same in every step
    in those that follow, and a stage may fill any slot, also one that was filled before.

    Attributes:
        name: for messages.
        run: takes the tensors of `arguments`, in a list that it may empty, and returns those of `results`.
        arguments: slots that it reads.
        results: slots that it fills.
        is_piece: whether it is captured; else it is a splitting op, which runs on the step's real metadata.
    """

    name: str
    run: Callable[[list[Tensor]], Tensors]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    is_piece: bool


_Values = list[Any]
"""Per value its tensor, or None before it is computed and after its last reader."""


class _PlannedStage(NamedTuple):
    """A stage over values instead of slots: of what a slot holds one after the other, each is a value of its own.

    Attributes:
        stage: the stage.
        reads: the values of its arguments.
        writes: the value of each result, and whether a piece reads it, which will look for it where it was at the capture.
        dead: values that nothing reads any more.
    """

    stage: Stage
    reads: tuple[int, ...]
    writes: tuple[tuple[int, bool], ...]
    dead: tuple[int, ...]


class _Graph(NamedTuple):
    """The graphs of one key.

    Attributes:
        inputs: those that pieces read.
        steps: per stage, its replay, or None for a splitting op.
        values: where each was at the capture; None where that differs from step to step.
    """

    inputs: StaticInputs
    steps: tuple[tuple[Replay | None, _PlannedStage], ...]
    values: _Values


class PiecewiseGraphs:
    """The PIECEWISE graphs of a split model.

    Inputs that pieces read are padded to the key's tokens and lie in static buffers. Inputs that only splitting ops read may be of
    any size at every step. Results of pieces lie in the pool, where the next stage, captured or not, finds them. A splitting op
    sees them padded: its metadata says which rows are real, and it leaves finite values in the others. What a splitting op returns
    is copied to where it lay at the capture, if a piece reads it: a piece never reads an address that nobody writes any more.

    Args:
        stages: in order.
        num_inputs: of a step; slots 0 .. num_inputs - 1.
        bound: the tensors that are the same in every step, such as weights and caches; the slots that follow.
        outputs: slots that hold at the end what the model returns.

    Raises:
        ValueError: a slot is read that nothing fills.
    """

    def __init__(self, stages: Sequence[Stage], *, num_inputs: int, outputs: Sequence[int], bound: Sequence[Tensor] = ()) -> None:
        self._plan, self._outputs, num_values = _plan(stages, num_inputs + len(bound), outputs)
        self._num_inputs = num_inputs
        self._initial: _Values = [*[None] * num_inputs, *bound, *[None] * (num_values - num_inputs - len(bound))]
        read_by_pieces = {value for planned in self._plan if planned.stage.is_piece for value in planned.reads}
        self._static_inputs = sorted(value for value in read_by_pieces if value < num_inputs)
        self._graphs: dict[GraphKey, _Graph] = {}

    def __call__(self, *inputs: Tensor) -> Tensors:
        """Hot path: runs the model without graphs, at the inputs' own sizes."""
        values = self._begin(self._initial, inputs)
        for planned in self._plan:
            _store(values, planned, planned.stage.run([values[value] for value in planned.reads]))
        return self._returned(values)

    def capture(self, key: GraphKey, inputs: Sequence[Tensor], backend: GraphBackend) -> None:
        """Captures each piece for a key, in order, and runs the splitting ops between them.

        The results of a piece are kept only as long as stages read them, so that later pieces, and later keys, use the same memory.

        Raises:
            Exception: a piece can't be captured. No graph of the key is left.
        """
        values = self._begin(self._initial, inputs)
        static = self._initial.copy()
        replays: list[Replay | None] = []
        try:
            for planned in self._plan:
                run = partial(_run, planned.stage, [values[value] for value in planned.reads])
                if planned.stage.is_piece:
                    replay, results = backend.capture(run)
                    replays.append(replay)
                    for (value, _), result in zip(planned.writes, results, strict=True):
                        static[value] = backend.borrowed(result)
                else:
                    results = run()
                    replays.append(None)
                    for (value, is_fixed), result in zip(planned.writes, results, strict=True):
                        static[value] = result if is_fixed else None
                _store(values, planned, results)
        except BaseException:
            _close(replays)
            raise
        steps = tuple(zip(replays, self._plan, strict=True))
        self._graphs[key] = _Graph(StaticInputs(str(key), inputs, self._static_inputs), steps, static)

    def replay(self, key: GraphKey, inputs: Sequence[Tensor]) -> Tensors:
        """Hot path: runs the model with the graphs of a key.

        Args:
            key: that was captured.
            inputs: those that pieces read are those of the capture, with new values.

        Returns:
            the model's outputs, valid until anything is replayed again.

        Raises:
            UnknownKeyError: the key was not captured.
            StaleInputError: an input that a piece reads lies elsewhere than at the capture.
        """
        graph = self._graphs.get(key)
        if graph is None:
            raise UnknownKeyError(f"no graph was captured for {key}")
        graph.inputs.check(inputs)
        values = self._begin(graph.values, inputs)
        for replay, (stage, reads, writes, _) in graph.steps:
            if replay is not None:
                replay()
                continue
            results = stage.run([values[value] for value in reads])
            for (value, is_fixed), result in zip(writes, results, strict=True):
                if is_fixed:
                    _copy_to_captured(stage, result, values[value])
                else:
                    values[value] = result
        return self._returned(values)

    def replays(self, key: GraphKey) -> Sequence[Replay]:
        """Returns the pieces that `replay` calls for a key, in order, for measurements."""
        return [replay for replay, _ in self._graphs[key].steps if replay is not None] if key in self._graphs else ()

    def close(self) -> None:
        """Frees all graphs."""
        while self._graphs:
            _close([replay for replay, _ in self._graphs.popitem()[1].steps])

    def _begin(self, initial: _Values, inputs: Sequence[Tensor]) -> _Values:
        if len(inputs) != self._num_inputs:
            raise ValueError(f"the model takes {self._num_inputs} inputs, not {len(inputs)}")
        values = initial.copy()
        values[: self._num_inputs] = inputs
        return values

    def _returned(self, values: _Values) -> Tensors:
        return tuple([values[value] for value in self._outputs])


def _run(stage: Stage, arguments: Sequence[Tensor]) -> Tensors:
    return stage.run(list(arguments))


def _store(values: _Values, planned: _PlannedStage, results: Tensors) -> None:
    for (value, _), result in zip(planned.writes, results, strict=True):
        values[value] = result
    for value in planned.dead:
        values[value] = None


def _copy_to_captured(stage: Stage, result: Tensor, captured: Tensor) -> None:
    if result.shape != captured.shape or result.dtype != captured.dtype:
        raise ValueError(f"{stage.name} returned {result.dtype} {list(result.shape)}, unlike at the capture")
    if result.data_ptr() != captured.data_ptr():
        captured.copy_(result)
    elif result.stride() != captured.stride():
        raise ValueError(f"{stage.name} returned strides {list(result.stride())} where the capture had {list(captured.stride())}")


def _close(replays: Sequence[Replay | None]) -> None:
    for replay in replays:
        if replay is not None:
            replay.close()


def _plan(stages: Sequence[Stage], num_given: int, outputs: Sequence[int]) -> tuple[list[_PlannedStage], tuple[int, ...], int]:
    """Numbers the values that pass between stages: those given first, then each result of each stage.

    Returns:
        the stages over values, the values of the outputs, and the number of values.
    """
    value_in = {slot: slot for slot in range(num_given)}
    num_values = num_given
    numbered: list[tuple[Stage, tuple[int, ...], tuple[int, ...]]] = []
    for stage in stages:
        reads = _values_in(value_in, stage.arguments, f"{stage.name} reads")
        writes = tuple(range(num_values, num_values + len(stage.results)))
        value_in |= zip(stage.results, writes, strict=True)
        num_values += len(writes)
        numbered.append((stage, reads, writes))
    returned = _values_in(value_in, outputs, "the model returns")
    read_by_pieces = {value for stage, reads, _ in numbered if stage.is_piece for value in reads}
    read_later = set(returned)
    plan = []
    for stage, reads, writes in reversed(numbered):
        dead = {*reads, *writes} - read_later
        plan.append(_PlannedStage(stage, reads, tuple((value, value in read_by_pieces) for value in writes), tuple(sorted(dead))))
        read_later.update(reads)
    return plan[::-1], returned, num_values


def _values_in(value_in: dict[int, int], slots: Sequence[int], who: str) -> tuple[int, ...]:
    for slot in slots:
        if slot not in value_in:
            raise ValueError(f"{who} slot {slot}, which nothing fills")
    return tuple(value_in[slot] for slot in slots)
