"""The compiled model: a flat list of stages over numbered slots. Neither Dynamo nor Inductor is anywhere near it."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelworker.compiler.program import Argument, OpStage, PieceStage, Program, SlotArgument

RunPiece = Callable[[list[Tensor]], Sequence[Tensor]]
"""Takes a piece's inputs, in a list that it may empty, and returns its outputs."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """One call of a compiled piece in the model.

    Attributes:
        index: among the model's pieces, in order.
        unique: among the unique ones; equal pieces share their code.
        inputs: slots that it reads.
        outputs: slots that it writes.
        static: which of the inputs are bound tensors, the same in every step.
        run: the code.
    """

    is_piece: ClassVar[bool] = True

    index: int
    unique: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    static: tuple[bool, ...]
    run: RunPiece

    @property
    def name(self) -> str:
        """For messages."""
        return f"piece {self.index}"

    def __call__(self, arguments: list[Tensor]) -> Sequence[Tensor]:
        """Hot path: runs the piece on its inputs, in a list that it may empty."""
        return self.run(arguments)


@dataclass(frozen=True, slots=True, eq=False)
class SplittingOp:
    """One call of a splitting op in the model.

    Attributes:
        name: qualified, with the overload, e.g. "modelworker.store_kv.default".
        inputs: slots that it reads.
        outputs: slots that it writes.
        run: takes the tensors of the inputs.
    """

    is_piece: ClassVar[bool] = False

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    run: RunPiece


class CompiledModel:
    """A model as stages that are called one after the other.

    Attributes:
        program: the stages as data.
        stages: pieces and splitting ops, in order.
        bound: the tensors of `program.bound`.
    """

    def __init__(
        self,
        program: Program,
        codes: Sequence[RunPiece],
        bound: Mapping[str, Tensor],
        *,
        plain_codes: Sequence[RunPiece] | None = None,
    ) -> None:
        """Binds a program to its code and tensors.

        Args:
            program: of the model.
            codes: of each unique piece.
            bound: the tensors that the program names, and perhaps others.
            plain_codes: the code that calls the ops of each unique piece one by one; None: `codes` does that.
        """
        self.program = program
        self.bound = tuple(bound[name] for name in program.bound)
        self._plain_codes = plain_codes
        self.stages = _make_stages(program, codes)
        self._num_inputs = len(program.inputs)
        self._slots: list[Tensor | None] = [None] * program.num_slots
        first = len(program.inputs)
        self._slots[first : first + len(program.bound)] = self.bound
        self._calls = [
            (stage.run, stage.inputs, stage.outputs, data.releases) for stage, data in zip(self.stages, program.stages, strict=True)
        ]

    def with_pieces(self, wrap: Callable[[Piece], RunPiece]) -> "CompiledModel":
        """Returns the model with other code in place of each piece's, over the same tensors.

        Args:
            wrap: makes it; called for every piece of the model, in order.
        """
        other = object.__new__(CompiledModel)
        other.program = self.program
        other.bound = self.bound
        other._plain_codes = self._plain_codes
        other._num_inputs = self._num_inputs
        other._slots = self._slots
        other.stages = tuple(replace(stage, run=wrap(stage)) if isinstance(stage, Piece) else stage for stage in self.stages)
        other._calls = [(stage.run, *call[1:]) for stage, call in zip(other.stages, self._calls, strict=True)]
        return other

    def plain(self) -> "CompiledModel":
        """Returns the model with pieces that call their ops one by one, over the same tensors."""
        codes = self._plain_codes
        return self if codes is None else self.with_pieces(lambda piece: codes[piece.unique])

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces, in order."""
        return tuple(stage for stage in self.stages if isinstance(stage, Piece))

    def __call__(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Hot path: runs a step.

        Args:
            inputs: the step's inputs in the order of `program.inputs`, with the dtypes and, but for the varying sizes, the shapes
                that the model was compiled for; contiguous.

        Returns:
            what the model returns.
        """
        slots = self._slots.copy()
        slots[: self._num_inputs] = inputs
        for run, reads, writes, releases in self._calls:
            results = run([slots[slot] for slot in reads])  # type: ignore[misc]
            for slot, result in zip(writes, results):  # noqa: B905
                slots[slot] = result
            for slot in releases:
                slots[slot] = None
        outputs = self.program.outputs
        if self.program.returns_tensor:
            return slots[outputs[0]]  # type: ignore[return-value]
        return tuple(slots[slot] for slot in outputs)  # type: ignore[misc]


def _make_stages(program: Program, codes: Sequence[RunPiece]) -> tuple[Piece | SplittingOp, ...]:
    bound = range(len(program.inputs), len(program.inputs) + len(program.bound))
    stages: list[Piece | SplittingOp] = []
    num_pieces = 0
    for stage in program.stages:
        if isinstance(stage, PieceStage):
            static = tuple(slot in bound for slot in stage.reads)
            stages.append(Piece(num_pieces, stage.piece, stage.reads, stage.writes, static, codes[stage.piece]))
            num_pieces += 1
        else:
            inputs, run = _bind_op(stage)
            stages.append(SplittingOp(stage.op, inputs, stage.writes, run))
    return tuple(stages)


def _bind_op(stage: OpStage) -> tuple[tuple[int, ...], RunPiece]:
    """Returns the slots that an op reads, and a function that calls it with those tensors and its constants."""
    op = operator.attrgetter(stage.op)(torch.ops)
    slots: list[int] = []
    for argument in (*stage.arguments, *(value for _, value in stage.keywords)):
        slots += _slots_in(argument)
    call = _call_of(op, stage)
    if len(stage.writes) == 1:
        return tuple(slots), lambda tensors: (call(tensors),)
    if stage.writes:
        return tuple(slots), call

    def call_for_effect(tensors: list[Tensor]) -> tuple[()]:
        call(tensors)
        return ()

    return tuple(slots), call_for_effect


def _call_of(op: Callable[..., Any], stage: OpStage) -> Callable[[list[Tensor]], Any]:
    num_tensors = sum(isinstance(argument, SlotArgument) for argument in stage.arguments)
    constants = stage.arguments[num_tensors:]
    if not stage.keywords and not any(_slots_in(argument) for argument in constants):
        # The usual form: tensors first.
        return lambda tensors: op(*tensors, *constants)

    def call(tensors: list[Tensor]) -> Any:
        remaining = iter(tensors)
        arguments = [_filled(argument, remaining) for argument in stage.arguments]
        return op(*arguments, **{name: _filled(argument, remaining) for name, argument in stage.keywords})

    return call


def _slots_in(argument: Argument) -> list[int]:
    if isinstance(argument, list):
        return [slot for item in argument for slot in _slots_in(item)]
    return [argument.slot] if isinstance(argument, SlotArgument) else []


def _filled(argument: Argument, tensors: Iterator[Tensor]) -> Any:
    if isinstance(argument, list):
        return [_filled(item, tensors) for item in argument]
    return next(tensors) if isinstance(argument, SlotArgument) else argument
