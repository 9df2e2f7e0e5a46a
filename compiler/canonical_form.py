"""The canonical form of a piece: its text without names, by which equal pieces are found."""

from collections.abc import Iterable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx

from modelworker.compiler.split import Geometry


def canonical_form(graph: fx.Graph, geometries: Iterable[Geometry], max_sizes: Iterable[int | None]) -> str:
    """Writes a graph down without names: what it calls with which arguments, and the kinds of its inputs.

    Where in its memory an input begins is not part of it, but for its alignment: packed weights share one block of memory.
    """
    geometries = tuple(geometries)
    names = {symbol: sympy.Symbol(f"s{index}") for index, symbol in enumerate(symbols_of(geometries))}

    def spell(expressions: Iterable[sympy.Expr]) -> str:
        return ",".join(str(expression.xreplace(names)) for expression in expressions)

    lines = [
        f"{geometry.dtype} {geometry.device} [{spell(geometry.shape)}] [{spell(geometry.strides)}] {geometry.is_aligned}"
        for geometry in geometries
    ]
    lines.append(f"at most {list(max_sizes)}")
    numbers = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node.op != "placeholder":
            arguments = (*node.args, *sorted(node.kwargs.items()))
            lines.append(f"{node.op} {_target_name(node)} {_spell_argument(arguments, numbers)}")
    return "\n".join(lines)


def _target_name(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return node.target._qualified_op_name
    return f"{node.target.__module__}.{node.target.__qualname__}"


def _spell_argument(argument: Any, numbers: dict[fx.Node, str]) -> str:
    if isinstance(argument, fx.Node):
        return numbers[argument]
    if isinstance(argument, tuple | list):
        return f"({','.join(_spell_argument(item, numbers) for item in argument)})"
    if isinstance(argument, slice):
        return f"slice{_spell_argument((argument.start, argument.stop, argument.step), numbers)}"
    return repr(argument)


def symbols_of(geometries: Iterable[Geometry]) -> list[sympy.Symbol]:
    """Returns the symbols of geometries in order of first use."""
    expressions = [size for geometry in geometries for size in (*geometry.shape, *geometry.strides)]
    return list(dict.fromkeys(symbol for size in expressions for symbol in sorted(size.free_symbols, key=str)))
