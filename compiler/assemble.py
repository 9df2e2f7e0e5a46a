"""From a split graph to a program: unique pieces, slots, and what is checked of memory that tensors share."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from modelworker.compiler.dataflow import PartAccess, check_shared_memory
from modelworker.compiler.errors import CompileError
from modelworker.compiler.piece import PieceGraph, build_piece
from modelworker.compiler.program import Argument, OpStage, PieceStage, Program, SlotArgument, Stage
from modelworker.compiler.split import Run, Split, overload_of, tensors_in, written_arguments
from modelworker.compiler.trace import Trace, place_of


@dataclass(frozen=True, slots=True)
class UniquePiece:
    """A piece to compile.

    Attributes:
        graph: of one of the equal pieces.
        returned: indices of the inputs whose new values the piece returns, after its outputs, instead of writing to them.
        digest: of what is compiled.
    """

    graph: PieceGraph
    returned: tuple[int, ...]
    digest: str


def assemble(trace: Trace, split: Split, inputs: Iterable[str]) -> tuple[Program, tuple[UniquePiece, ...]]:
    """Makes the program of a split graph and says which pieces must be compiled for it.

    Args:
        trace: of the model.
        split: of its graph.
        inputs: names of the step's inputs, in order.

    Raises:
        CompileError: something other than tensors crosses a piece, or tensors share memory in a way that pieces can't keep.
    """
    external = {*trace.inputs.values(), *trace.bound.values()}
    unique: dict[str, UniquePiece] = {}
    accesses = _accesses(trace, split, external, unique)
    check_shared_memory(accesses, trace, external)
    return _number(trace, split, accesses, tuple(inputs), tuple(unique)), tuple(unique.values())


def _accesses(trace: Trace, split: Split, external: set[fx.Node], unique: dict[str, UniquePiece]) -> list[PartAccess]:
    wanted = {split.same.get(output, output) for output in trace.outputs}
    graphs: dict[Run, PieceGraph] = {}
    for part in reversed(split.parts):
        if isinstance(part, Run):
            graphs[part] = build_piece(trace, split, part, wanted)
            wanted.update(graphs[part].inputs)
        else:
            wanted.update(split.reads(part))
    mutated: dict[str, dict[int, bool]] = {}
    accesses = []
    for part in split.parts:
        if isinstance(part, fx.Node):
            accesses.append(_op_access(part, split))
            continue
        graph = graphs[part]
        if graph.form not in mutated:
            mutated[graph.form] = graph.mutated_inputs()
        written = mutated[graph.form]
        returned = tuple(index for index, by_aten in written.items() if by_aten and graph.inputs[index] not in external)
        piece = UniquePiece(graph, returned, graph.digest(returned))
        unique.setdefault(piece.digest, piece)
        makes = (*graph.outputs, *(graph.inputs[index] for index in returned))
        accesses.append(
            PartAccess(part, graph.inputs, tuple(graph.inputs[index] for index in written), makes, list(unique).index(piece.digest))
        )
    return accesses


def _op_access(node: fx.Node, split: Split) -> PartAccess:
    written = tensors_in(written_arguments(overload_of(node), node.args, node.kwargs))
    mutates = tuple(split.same.get(read, read) for read in written)
    return PartAccess(node, tuple(split.reads(node)), mutates, _results_of(node))


def _results_of(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns a node for each result of an op, in order; where one is not used, the op's own node."""
    value = node.meta.get("example_value")
    if value is None:
        return ()
    if isinstance(value, torch.Tensor):
        return (node,)
    users: dict[Any, fx.Node] = {}
    for user in node.users:
        users.setdefault(user.args[1], user)
    return tuple(users.get(index, node) for index in range(len(value)))


def _number(trace: Trace, split: Split, accesses: list[PartAccess], inputs: tuple[str, ...], pieces: tuple[str, ...]) -> Program:
    slots: dict[fx.Node, int] = {node: index for index, node in trace.inputs.items()}
    slots |= {node: len(inputs) + index for index, node in enumerate(trace.bound.values())}
    first_computed = len(inputs) + len(trace.bound)
    outputs = [split.same.get(output, output) for output in trace.outputs]
    last_use: dict[fx.Node, int] = {}
    num_slots = first_computed
    for index, access in enumerate(accesses):
        for node in access.makes:
            if node not in slots:
                slots[node] = num_slots
                num_slots += 1
        last_use |= dict.fromkeys((*access.reads, *access.makes), index)
    stages = []
    for index, access in enumerate(accesses):
        over = [slots[node] for node, last in last_use.items() if last == index and node not in outputs]
        releases = tuple(slot for slot in over if slot >= first_computed)
        stages.append(_stage(access, split, slots, releases))
    return Program(
        inputs=inputs,
        bound=tuple(trace.bound),
        num_slots=num_slots,
        stages=tuple(stages),
        outputs=tuple(slots[output] for output in outputs),
        returns_tensor=trace.returns_tensor,
        pieces=pieces,
    )


def _stage(access: PartAccess, split: Split, slots: dict[fx.Node, int], releases: tuple[int, ...]) -> Stage:
    writes = tuple(slots[node] for node in access.makes)
    if isinstance(access.part, Run):
        return PieceStage(access.piece, tuple(slots[node] for node in access.reads), writes, releases)
    node = access.part

    def argument(value: Any) -> Argument:
        if isinstance(value, fx.Node) and isinstance(value.meta.get("example_value"), torch.Tensor):
            return SlotArgument(slots[split.same.get(value, value)])
        if isinstance(value, list | tuple):
            return [argument(item) for item in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise CompileError(f"{node.name}: {value!r} can't be an argument of a splitting op{place_of(node)}")

    return OpStage(
        op=str(overload_of(node)),
        arguments=tuple(argument(value) for value in node.args),
        keywords=tuple((name, argument(value)) for name, value in sorted(node.kwargs.items())),
        writes=writes,
        releases=releases,
    )
