"""Passes over the graph of a piece, between its functionalization and Inductor.

A pass sees ATen ops and registered ops; nothing in the graph writes to anything. This is the place for patterns of several ops
that have one kernel together, such as a norm or an activation followed by quantization: Inductor does not look into registered ops.
"""

import logging
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from modelworker.compiler.counters import CompileCounters
from modelworker.compiler.errors import CompileError
from modelworker.compiler.graph_pass import GraphPass

_logger = logging.getLogger(__name__)

aten = torch.ops.aten


class PassManager:
    """Runs passes in order, and counts what they change.

    Args:
        passes: in order.
        disabled: names of those that are not run.
        counters: of matches.

    Raises:
        CompileError: a disabled pass does not exist.
    """

    def __init__(self, passes: Sequence[GraphPass], *, disabled: Sequence[str], counters: CompileCounters) -> None:
        if unknown := sorted(set(disabled) - {graph_pass.name for graph_pass in passes}):
            names = ", ".join(graph_pass.name for graph_pass in passes)
            raise CompileError(f"there is no graph pass {', '.join(unknown)}; there are {names}")
        self._passes = [graph_pass for graph_pass in passes if graph_pass.name not in disabled]
        self._counters = counters

    def __call__(self, module: fx.GraphModule) -> None:
        """Changes the graph of a module in place."""
        for graph_pass in self._passes:
            matches = graph_pass.apply(module.graph)
            module.graph.eliminate_dead_code()
            self._counters.increment("pass_matches", matches, label=graph_pass.name)
            _logger.debug("pass %s: %d matches", graph_pass.name, matches)
        module.graph.lint()
        module.recompile()


def default_passes() -> tuple[GraphPass, ...]:
    """Returns the passes that are run unless they are disabled."""
    return (
        GraphPass("no_op_elimination", eliminate_no_ops),
        GraphPass("read_past_scatter", read_past_scatter),
        GraphPass("convert_before_cat", convert_before_cat),
    )


_VIEWS = frozenset((aten.view.default, aten.reshape.default, aten._unsafe_view.default))
_SAME_IF_SAME_KIND = _VIEWS | frozenset(
    (
        *(aten.expand.default, aten.slice.Tensor, aten.squeeze.dim, aten.squeeze.dims, aten.alias.default),
        torch.ops.prims.convert_element_type.default,
    )
)


def eliminate_no_ops(graph: fx.Graph) -> int:
    """Removes views, slices and conversions whose result is what they are given, alone or together with the view before them."""
    matches = 0
    for node in graph.nodes:
        if node.target not in _SAME_IF_SAME_KIND:
            continue
        source: Any = node.args[0]
        if node.target in _VIEWS and source.target in _VIEWS:
            node.args = (source.args[0], *node.args[1:])
            source = node.args[0]
        if _is_same(source, node):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            matches += 1
    return matches


def _is_same(source: fx.Node, result: fx.Node) -> bool:
    before, after = source.meta["val"], result.meta["val"]
    return (
        before.dtype == after.dtype
        and before.ndim == after.ndim
        and all(
            statically_known_true(one == other)
            for one, other in zip((*before.shape, *before.stride()), (*after.shape, *after.stride()), strict=True)
        )
    )


def read_past_scatter(graph: fx.Graph) -> int:
    """Lets a slice of a tensor into which another slice was written be read from where it comes from.

    What rotates queries and keys in place, both parts of one tensor, otherwise becomes: write queries into a copy of the whole,
    read keys out of that, write them into another copy. Inductor fuses the copies into the rotation, with masks, not in vectors.
    """
    matches = 0
    for node in list(graph.nodes):
        part = _slice_of(node)
        while part is not None and (origin := _origin(part, graph, node)) is not None:
            node.replace_all_uses_with(origin)
            matches += 1
            node = origin  # noqa: PLW2901
            part = _slice_of(node)
    return matches


class _Slice(NamedTuple):
    """A range of a tensor along one dimension."""

    tensor: fx.Node
    dim: int
    start: int
    end: int


def _slice_of(node: fx.Node) -> _Slice | None:
    """Returns what a node takes out of a tensor, where that is a fixed range."""
    if node.target is aten.slice.Tensor:
        return _range_of(node.args[0], *node.args[1:])
    if node.target is not operator.getitem:
        return None
    split: Any = node.args[0]
    index: Any = node.args[1]
    if split.target is not aten.split_with_sizes.default:
        return None
    sizes: Any = split.args[1]
    dim: Any = split.args[2] if len(split.args) > 2 else 0
    if not all(isinstance(size, int) for size in sizes):
        return None
    start = sum(sizes[:index])
    return _range_of(split.args[0], dim, start, start + sizes[index])


def _range_of(tensor: Any, dim: Any = 0, start: Any = 0, end: Any = None, step: Any = 1) -> _Slice | None:
    size = tensor.meta["val"].shape[dim]
    start, end = start or 0, size if end is None else end
    if step != 1 or not all(isinstance(number, int) for number in (size, start, end)):
        return None
    start, end = (min(max(number + size if number < 0 else number, 0), size) for number in (start, end))
    return _Slice(tensor, dim % tensor.meta["val"].ndim, start, end)


def _origin(part: _Slice, graph: fx.Graph, before: fx.Node) -> fx.Node | None:
    """Returns a node for what a slice of a scattered tensor holds: what was scattered, or a slice of the tensor before."""
    scatter = part.tensor
    if scatter.target is not aten.slice_scatter.default:
        return None
    base: Any = scatter.args[0]
    source: Any = scatter.args[1]
    written = _range_of(base, *scatter.args[2:])
    if written is None or written.dim != part.dim:
        return None
    if (written.start, written.end) == (part.start, part.end):
        return source  # type: ignore[no-any-return]
    if part.end <= written.start or written.end <= part.start:
        with graph.inserting_before(before):
            past = graph.call_function(aten.slice.Tensor, (base, part.dim, part.start, part.end))
        past.meta["val"] = aten.slice.Tensor(base.meta["val"], part.dim, part.start, part.end)
        return past
    return None


def convert_before_cat(graph: fx.Graph) -> int:
    """Converts what is concatenated rather than the result.

    Concatenation writes memory: fp32 halves that are concatenated and then rounded would be written, read and written again.
    """
    matches = 0
    for node in graph.nodes:
        cat = _converted(node)
        if cat is None or cat.target is not aten.cat.default or len(cat.users) > 1:
            continue
        dtype = node.meta["val"].dtype
        parts: Any = cat.args[0]
        with graph.inserting_before(node):
            new = graph.call_function(
                aten.cat.default, ([_convert(graph, part, dtype) for part in parts], *cat.args[1:]), cat.kwargs
            )
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        graph.erase_node(cat)
        matches += 1
    return matches


def _converted(node: fx.Node) -> fx.Node | None:
    """Returns what a node converts to another dtype and changes in no other way."""
    if node.target is torch.ops.prims.convert_element_type.default:
        source: Any = node.args[0]
    elif node.target is aten.copy.default:
        source = node.args[1]
    else:
        return None
    before, after = source.meta["val"], node.meta["val"]
    same_shape = before.ndim == after.ndim and all(
        statically_known_true(one == other) for one, other in zip(before.shape, after.shape, strict=True)
    )
    return source if same_shape and before.dtype != after.dtype else None


def _convert(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    converted = graph.call_function(torch.ops.prims.convert_element_type.default, (node, dtype))
    converted.meta["val"] = node.meta["val"].to(dtype)
    return converted
