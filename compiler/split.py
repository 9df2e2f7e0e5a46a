"""The split of a traced graph into runs of nodes, which become pieces, and splitting ops."""

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from modelworker.compiler.errors import CompileError
from modelworker.compiler.trace import Sizes, Trace, place_of

# They allocate without reading or writing data.
_ALLOCATIONS = frozenset(("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))
# They may return the same memory in another shape.
_VIEWS = frozenset(
    (
        *("chunk", "contiguous", "detach", "expand", "expand_as", "flatten", "getitem", "movedim", "narrow", "permute", "reshape"),
        *("select", "slice", "split", "squeeze", "swapaxes", "t", "to", "transpose", "unbind", "unflatten", "unsqueeze", "view"),
        *("view_as", "type_as", "float", "half", "bfloat16"),
    )
)
# Calls that stand for nothing in a graph that is never differentiated.
_WITHOUT_EFFECT = frozenset(("_log_api_usage_once", "_set_grad_enabled"))


@dataclass(slots=True, eq=False)
class Run:
    """Neighbouring nodes that become one piece, in order."""

    nodes: list[fx.Node] = field(default_factory=list)


Part = Run | fx.Node
"""A run of nodes, or a splitting op."""


@dataclass(frozen=True, slots=True)
class Split:
    """A graph as a list of parts.

    Attributes:
        parts: in order.
        same: for a node whose tensor is an earlier node's tensor (same memory, same shape), that earlier node.
    """

    parts: tuple[Part, ...]
    same: Mapping[fx.Node, fx.Node]

    def reads(self, part: Part) -> list[fx.Node]:
        """Returns the nodes outside of a part whose tensors it reads, in order of use."""
        nodes = part.nodes if isinstance(part, Run) else [part]
        inside = set(nodes)
        found = dict.fromkeys(
            self.same.get(read, read) for node in nodes for read in tensors_in((node.args, node.kwargs)) if read not in inside
        )
        return [node for node in found if node not in inside]


def split_graph(trace: Trace, splitting_ops: Collection[str]) -> Split:
    """Splits a graph at ops.

    Args:
        trace: of the model.
        splitting_ops: qualified names, e.g. "modelworker::paged_attention".
    """
    parts: list[Part] = [Run()]
    home: dict[fx.Node, Part] = {}
    for node in _nodes_with_effect(trace.graph):
        if is_splitting(node, splitting_ops):
            home[node] = node
            parts += [node, Run()]
            continue
        # An item of a tuple stays with what makes the tuple.
        source = _tuple_of(node)
        home[node] = part = parts[-1] if source is None else home[source]
        if isinstance(part, Run):
            part.nodes.append(node)
    _merge_idle_runs(parts)
    return Split(tuple(part for part in parts if not isinstance(part, Run) or part.nodes), _same_tensors(trace))


def is_splitting(node: fx.Node, splitting_ops: Collection[str]) -> bool:
    """Whether a node calls one of the ops, as `torch.ops.ns.op` or as `torch.ops.ns.op.overload`."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    return isinstance(target, torch._ops.OpOverloadPacket) and target._qualified_op_name in splitting_ops


def tensors_in(arguments: Any) -> Iterator[fx.Node]:
    """Yields the nodes among arguments that are tensors, in order."""
    nodes: list[fx.Node] = []
    fx.node.map_arg(arguments, nodes.append)
    yield from (node for node in nodes if isinstance(node.meta.get("example_value"), Tensor))


def overload_of(node: fx.Node) -> torch._ops.OpOverload:
    """Returns the op that a node calls.

    Raises:
        CompileError: it has several overloads and the model does not say which.
    """
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target
    overloads = target.overloads()
    if len(overloads) != 1:
        raise CompileError(f"{target} has the overloads {', '.join(overloads)}: the model must name one{place_of(node)}")
    return getattr(target, overloads[0])  # type: ignore[no-any-return]


def written_arguments(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns the arguments of a call that the op writes to."""
    return [
        args[index] if index < len(args) else kwargs.get(argument.name)
        for index, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def storage_of(node: fx.Node) -> StorageWeakRef:
    """Returns what is equal for nodes whose tensors share memory."""
    return StorageWeakRef(node.meta["example_value"].untyped_storage())


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a tensor lies in its memory, in terms of the step's sizes."""

    shape: tuple[Any, ...]
    strides: tuple[Any, ...]
    offset: Any
    dtype: torch.dtype
    device: torch.device

    @property
    def is_aligned(self) -> bool:
        """Whether the tensor begins at a multiple of 16 bytes of its memory, as kernels with vector loads on a GPU need it."""
        return bool(isinstance(self.offset, sympy.Integer) and self.offset * self.dtype.itemsize % 16 == 0)


def geometry_of(node: fx.Node, sizes: Sizes) -> Geometry:
    """Returns the geometry of a node's tensor.

    Raises:
        CompileError: a size depends on the values of a tensor.
    """
    tensor: Tensor = node.meta["example_value"]
    return Geometry(
        sizes.expressions(tensor.shape, node),
        sizes.expressions(tensor.stride(), node),
        sizes.expression(tensor.storage_offset(), node),
        tensor.dtype,
        tensor.device,
    )


def _name_of(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _nodes_with_effect(graph: fx.Graph) -> list[fx.Node]:
    """Returns the nodes that compute tensors or write to them, without those whose result is not used.

    Sizes are left out: a piece computes those that it needs from its tensors.
    """
    used: set[fx.Node] = set()
    found: list[fx.Node] = []
    for node in reversed(graph.nodes):
        if node.op == "output":
            used.update(node.all_input_nodes)
        elif node.op != "placeholder" and _has_effect(node) and (node in used or not _is_idle(node)):
            used.update(node.all_input_nodes)
            found.append(node)
    return found[::-1]


def _has_effect(node: fx.Node) -> bool:
    value = node.meta.get("example_value")
    if value is None:
        return _name_of(node) not in _WITHOUT_EFFECT
    items = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(item, Tensor) for item in items)


def _is_idle(node: fx.Node) -> bool:
    """Whether a node neither reads nor writes data: an allocation, or a view."""
    if _name_of(node) in _ALLOCATIONS:
        return True
    sources = list(tensors_in(node.args[:1]))
    if _name_of(node) not in _VIEWS or len(sources) != 1:
        return _tuple_of(node) is not None
    value = node.meta["example_value"]
    results = value if isinstance(value, tuple | list) else (value,)
    return all(StorageWeakRef(result.untyped_storage()) == storage_of(sources[0]) for result in results)


def _tuple_of(node: fx.Node) -> fx.Node | None:
    """Returns the node that makes the tuple from which a node takes one tensor."""
    source = node.args[0] if node.target is operator.getitem else None
    is_tuple = isinstance(source, fx.Node) and isinstance(source.meta.get("example_value"), tuple | list)
    return source if is_tuple else None  # type: ignore[return-value]


def _merge_idle_runs(parts: list[Part]) -> None:
    """Empties runs without work, as far as their nodes can go to the run before or after them."""
    for index, part in enumerate(parts):
        if not isinstance(part, Run) or not all(_is_idle(node) for node in part.nodes):
            continue
        before = [at for at in range(index) if (run := parts[at]) and isinstance(run, Run) and run.nodes]
        if before:
            _move_earlier(part, parts[before[-1]], parts[before[-1] + 1 : index])
        if index + 2 < len(parts):
            _move_later(part, parts[index + 2], parts[index + 1])


def _move_earlier(run: Run, target: Part, between: list[Part]) -> None:
    """Moves the nodes that do not depend on the parts between, and are no views of what those write to."""
    assert isinstance(target, Run)
    ops = [part for part in between if isinstance(part, fx.Node)]
    written = {storage_of(node) for op in ops for node in tensors_in(written_arguments(overload_of(op), op.args, op.kwargs))}
    blocked = set(ops)
    kept = []
    for node in run.nodes:
        reads = tensors_in((node.args, node.kwargs))
        if blocked.isdisjoint(_inputs_and_tuples(node)) and (
            _name_of(node) in _ALLOCATIONS or written.isdisjoint(storage_of(read) for read in reads)
        ):
            target.nodes.append(node)
        else:
            blocked.add(node)
            kept.append(node)
    run.nodes[:] = kept


def _move_later(run: Run, target: Part, between: Part) -> None:
    """Moves the nodes that the part between does not use."""
    assert isinstance(target, Run)
    needed: set[fx.Node] = {between} if isinstance(between, fx.Node) else set()
    kept, moved = [], []
    for node in reversed(run.nodes):
        if needed.isdisjoint(node.users):
            moved.append(node)
        else:
            needed.add(node)
            kept.append(node)
    run.nodes[:] = kept[::-1]
    target.nodes[:0] = moved[::-1]


def _inputs_and_tuples(node: fx.Node) -> set[fx.Node]:
    return {*node.all_input_nodes, *(source for read in node.all_input_nodes if (source := _tuple_of(read)) is not None)}


def _same_tensors(trace: Trace) -> dict[fx.Node, fx.Node]:
    """Finds the nodes whose tensor is an earlier node's tensor, e.g. what a method in place returns."""
    first: dict[tuple[StorageWeakRef, Geometry], fx.Node] = {}
    same = {}
    for node in trace.graph.nodes:
        if isinstance(node.meta.get("example_value"), Tensor):
            key = (storage_of(node), geometry_of(node, trace.sizes))
            original = first.setdefault(key, node)
            if original is not node:
                same[node] = original
    return same
