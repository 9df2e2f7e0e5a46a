"""The split model as data: what runs one after the other, and which tensors each stage reads and writes.

A tensor lives in a numbered slot. The first slots hold the step's inputs, the next ones the tensors bound once (parameters,
buffers, KV caches), the rest what the stages compute. A program names no object of torch, so it can be kept on disk.
"""

from dataclasses import dataclass

import torch

Dim = int | str
"""A size: fixed, or the name of one that varies from step to step, e.g. "num_tokens"."""


@dataclass(frozen=True, slots=True)
class StepInput:
    """A tensor that is given anew in every step.

    Attributes:
        shape: its sizes; equal names are equal sizes.
        dtype: of its elements.
        device: where it lives.
    """

    shape: tuple[Dim, ...]
    dtype: torch.dtype
    device: torch.device = torch.device("cpu")  # noqa: RUF009


@dataclass(frozen=True, slots=True)
class SlotArgument:
    """An argument that is the tensor in a slot."""

    slot: int


Argument = SlotArgument | None | bool | int | float | str | list["Argument"]
"""An argument of a splitting op."""


@dataclass(frozen=True, slots=True)
class PieceStage:
    """A call of a compiled piece.

    Attributes:
        piece: index of the unique piece.
        reads: slots of its inputs.
        writes: slots of its outputs.
        releases: slots that nothing reads afterwards.
    """

    piece: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    releases: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class OpStage:
    """A call of a splitting op.

    Attributes:
        op: qualified name with the overload, e.g. "modelworker.store_kv.default".
        arguments: positional ones.
        keywords: the others.
        writes: slots of its outputs.
        releases: slots that nothing reads afterwards.
    """

    op: str
    arguments: tuple[Argument, ...]
    keywords: tuple[tuple[str, Argument], ...]
    writes: tuple[int, ...]
    releases: tuple[int, ...] = ()


Stage = PieceStage | OpStage


@dataclass(frozen=True, slots=True)
class Program:
    """A split model.

    Attributes:
        inputs: names of the step's inputs, in the order of the call; slot i is input i.
        bound: names of the bound tensors, in the slots that follow.
        num_slots: all slots.
        stages: in order.
        outputs: slots of the results.
        returns_tensor: whether the model returns the only result itself; else a tuple.
        pieces: of each unique piece, the digest of its canonical form.
    """

    inputs: tuple[str, ...]
    bound: tuple[str, ...]
    num_slots: int
    stages: tuple[Stage, ...]
    outputs: tuple[int, ...]
    returns_tensor: bool
    pieces: tuple[str, ...]
