"""Passes over the graph of a piece, between its functionalization and Inductor.

A pass sees ATen ops and registered ops; nothing in the graph writes to anything. This is the place for patterns of several ops
that have one kernel together, such as a norm or an activation followed by quantization: Inductor does not look into registered ops.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
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
            self._counters.increment("pass_matches", matches, label=graph_pass.name)
            _logger.debug("pass %s: %d matches", graph_pass.name, matches)
        module.graph.eliminate_dead_code()
        module.graph.lint()
        module.recompile()


def default_passes() -> tuple[GraphPass, ...]:
    """Returns the passes that are run unless they are disabled."""
    return (GraphPass("no_op_elimination", eliminate_no_ops), GraphPass("convert_before_cat", convert_before_cat))


_SAME_IF_SAME_SHAPE = frozenset(
    (
        *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default, aten.slice.Tensor),
        *(aten.squeeze.dim, aten.squeeze.dims, aten.alias.default, torch.ops.prims.convert_element_type.default),
    )
)


def eliminate_no_ops(graph: fx.Graph) -> int:
    """Removes views, slices and conversions whose result is what they are given."""
    matches = 0
    for node in graph.nodes:
        if node.target in _SAME_IF_SAME_SHAPE and isinstance(node.args[0], fx.Node) and _is_same(node.args[0], node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            matches += 1
    return matches


def _is_same(source: fx.Node, result: fx.Node) -> bool:
    before, after = source.meta.get("val"), result.meta.get("val")
    return (
        isinstance(before, Tensor)
        and isinstance(after, Tensor)
        and before.dtype == after.dtype
        and before.ndim == after.ndim
        and all(
            statically_known_true(one == other)
            for one, other in zip((*before.shape, *before.stride()), (*after.shape, *after.stride()), strict=True)
        )
    )


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
        with graph.inserting_before(node):
            parts = [_convert(graph, part, dtype) for part in _nodes(cat.args[0])]
            new = graph.call_function(aten.cat.default, (parts, *cat.args[1:]), cat.kwargs)
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        graph.erase_node(cat)
        matches += 1
    return matches


def _converted(node: fx.Node) -> fx.Node | None:
    """Returns what a node converts to another dtype and changes in no other way."""
    if node.target is torch.ops.prims.convert_element_type.default:
        source = node.args[0]
    elif node.target is aten.copy.default:
        source = node.args[1]
    else:
        return None
    if not isinstance(source, fx.Node):
        return None
    before, after = source.meta["val"], node.meta["val"]
    same = before.ndim == after.ndim and all(
        statically_known_true(one == other) for one, other in zip(before.shape, after.shape, strict=True)
    )
    return source if same and before.dtype != after.dtype else None


def _convert(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    converted = graph.call_function(torch.ops.prims.convert_element_type.default, (node, dtype))
    converted.meta["val"] = node.meta["val"].to(dtype)
    return converted


def _nodes(argument: Any) -> list[fx.Node]:
    return list(argument)
