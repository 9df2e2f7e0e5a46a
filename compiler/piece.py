"""Pieces: a run of nodes as a graph of its own.

A piece's graph takes tensors only. What it needs of the step's sizes it reads off its inputs, and parameters are inputs like any
other, so the pieces of all layers of a model are equal.
"""

import copy
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from modelworker.compiler.canonical_form import canonical_form, symbols_of
from modelworker.compiler.errors import CompileError
from modelworker.compiler.split import Geometry, Run, Split, geometry_of, written_arguments
from modelworker.compiler.trace import Sizes, Trace, place_of


@dataclass(frozen=True, slots=True, eq=False)
class PieceGraph:
    """A run as a graph of its own.

    Attributes:
        graph: takes the inputs, returns a tuple of the outputs.
        inputs: nodes of the model's graph.
        outputs: nodes of the model's graph; what the piece writes to its inputs is not among them.
        geometries: of the inputs.
        max_sizes: of the sizes that vary, in the order of their first use in geometries; None: not known.
        form: the canonical form: equal for pieces that compute the same from inputs of the same kind.
    """

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    geometries: tuple[Geometry, ...]
    max_sizes: tuple[int | None, ...]
    form: str

    def digest(self, returned: Iterable[int]) -> str:
        """Returns what identifies the code of `module(returned)`."""
        text = f"{self.form}\nreturns {','.join(map(str, returned))}"
        return hashlib.sha256(text.encode()).hexdigest()

    def fake_inputs(self) -> "FakeInputs":
        """Makes inputs without memory whose varying sizes are unknown, so that no code can be specialized for one of them."""
        shape_env = ShapeEnv()
        mode = FakeTensorMode(shape_env=shape_env)
        with mode:
            symbols = symbols_of(self.geometries)
            sizes = {symbol: shape_env.create_unbacked_symint() for symbol in symbols}
            for size in sizes.values():
                torch._check(size >= 0)

            def values(expressions: Iterable[sympy.Expr]) -> list[int | torch.SymInt]:
                return [sympy_interp(PythonReferenceAnalysis, sizes, expression) for expression in expressions]

            fakes = [_fake(geometry, values) for geometry in self.geometries]
        # The symbols are sizes of inputs, not something that an operation has just made.
        shape_env.pending_fresh_unbacked_symbols.clear()
        return FakeInputs(mode, fakes, tuple(sizes.values()))

    def mutated_inputs(self) -> dict[int, bool]:
        """Returns the indices of the inputs that the piece writes to, and whether only ATen ops do so."""
        fakes = self.fake_inputs()
        writes = _Writes()
        with torch.no_grad(), fakes.mode, writes:
            fx.Interpreter(fx.GraphModule({}, self.graph)).run(*fakes.tensors)
        storages = [fake.untyped_storage()._cdata for fake in fakes.tensors]
        return {index: storage not in writes.by_kernel for index, storage in enumerate(storages) if storage in writes.all}

    def module(self, mutated: Iterable[int]) -> fx.GraphModule:
        """Returns the graph with inputs that it does not write to: what they would hold afterwards are further outputs.

        Generated code that writes to its inputs keeps apart what is read before and after: it fuses badly, and for some sizes
        Inductor's C++ backend fails to generate it (torch 2.13: KeyError in `try_outer_loop_fusion_with_local_buf`).

        Args:
            mutated: indices of the inputs.
        """
        graph = copy.deepcopy(self.graph)
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        output = next(iter(reversed(graph.nodes)))
        added = []
        for index in mutated:
            with graph.inserting_after(placeholders[-1]):
                clone = graph.call_method("clone", (placeholders[index],))
            placeholders[index].replace_all_uses_with(clone, delete_user_cb=lambda user, clone=clone: user is not clone)
            added.append(clone)
        output.args = ((*output.args[0], *added),)
        return fx.GraphModule({}, graph)


class FakeInputs(NamedTuple):
    """Inputs of a piece without memory.

    Attributes:
        mode: that they belong to.
        tensors: the inputs.
        sizes: that vary, in the order of `PieceGraph.max_sizes`.
    """

    mode: FakeTensorMode
    tensors: list[Tensor]
    sizes: tuple[torch.SymInt, ...]


class _Writes(TorchDispatchMode):
    """Notes the memory that ops write to.

    Attributes:
        all: of every op.
        by_kernel: of ops that are not ATen's, which generated code calls as they are.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.all: set[int] = set()
        self.by_kernel: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in written_arguments(func, args, kwargs):
            items = value if isinstance(value, list | tuple) else (value,)
            storages = {item.untyped_storage()._cdata for item in items if isinstance(item, Tensor)}
            self.all |= storages
            if func.namespace not in ("aten", "prims"):
                self.by_kernel |= storages
        return func(*args, **kwargs)


def build_piece(trace: Trace, split: Split, run: Run, wanted: Iterable[fx.Node]) -> PieceGraph:
    """Makes a graph of a run.

    Args:
        trace: of the model.
        split: of its graph.
        run: one of its runs.
        wanted: the nodes whose tensors are read after it.

    Raises:
        CompileError: it computes with sizes in a way that is not known here, or hands on something other than tensors.
    """
    wanted = set(wanted)
    outputs = [node for node in run.nodes if node in wanted]
    builder = _Builder(trace, split, run)
    for node in run.nodes:
        builder.add(node)
    builder.graph.output(tuple(builder.copies[node] for node in outputs))
    inputs = tuple(builder.inputs)
    geometries = tuple(geometry_of(node, trace.sizes) for node in inputs)
    max_sizes = tuple(trace.max_sizes.get(str(symbol)) for symbol in symbols_of(geometries))
    form = canonical_form(builder.graph, geometries, max_sizes)
    return PieceGraph(builder.graph, inputs, tuple(outputs), geometries, max_sizes, form)


class _Builder:
    """Copies nodes into a graph of their own."""

    def __init__(self, trace: Trace, split: Split, run: Run) -> None:
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.inputs = split.reads(run)
        self._split = split
        self._sizes = trace.sizes
        self._size_nodes: dict[sympy.Expr, fx.Node] = {}
        missing = _symbols_used(run, trace.sizes) - {size for node in self.inputs for size in geometry_of(node, trace.sizes).shape}
        for symbol in sorted(missing, key=str):
            self.inputs.append(_input_with(trace, symbol))
        for node in self.inputs:
            placeholder = self.graph.placeholder(f"input_{len(self.copies)}")
            placeholder.meta = {"example_value": node.meta["example_value"]}
            self.copies[node] = placeholder

    def add(self, node: fx.Node) -> None:
        """Copies a node."""
        if node.target in ("as_strided", torch.as_strided):
            raise CompileError(
                f"as_strided depends on where in its memory a tensor begins, which pieces don't know{place_of(node)}"
            )
        args = tuple(self._argument(argument, node) for argument in node.args)
        kwargs = {name: self._argument(argument, node) for name, argument in node.kwargs.items()}
        new = self.graph.create_node(node.op, node.target, args, kwargs)
        new.meta = {name: node.meta[name] for name in ("example_value", "stack_trace") if name in node.meta}
        self.copies[node] = new

    def _argument(self, argument: Any, node: fx.Node) -> Any:
        return fx.node.map_aggregate(argument, lambda item: self._item(item, node))

    def _item(self, item: Any, node: fx.Node) -> Any:
        if not isinstance(item, fx.Node):
            return item
        value = item.meta.get("example_value")
        if isinstance(value, int | torch.SymInt):
            return self._size(self._sizes.expression(value, node), node)
        if isinstance(value, torch.Size):
            return tuple(self._size(size, node) for size in self._sizes.expressions(value, node))
        copied = self.copies.get(item) or self.copies.get(self._split.same.get(item, item))
        if copied is None:
            raise CompileError(f"{node.name} uses {item.name}, which is not a tensor, from another piece{place_of(node)}")
        return copied

    def _size(self, expression: sympy.Expr, node: fx.Node) -> int | fx.Node:
        if isinstance(expression, sympy.Integer):
            return int(expression)
        if expression not in self._size_nodes:
            symbols = {symbol: fx.Proxy(self._read_size(symbol)) for symbol in expression.free_symbols}
            try:
                computed: fx.Proxy = sympy_interp(PythonReferenceAnalysis, symbols, expression)
            except NotImplementedError as error:
                raise CompileError(f"{node.name} computes a size that pieces can't: {expression}{place_of(node)}") from error
            self._size_nodes[expression] = computed.node
        return self._size_nodes[expression]

    def _read_size(self, symbol: sympy.Symbol) -> fx.Node:
        if symbol not in self._size_nodes:
            node, dim = next((node, shape.index(symbol)) for node in self.inputs if symbol in (shape := self._shape(node)))
            self._size_nodes[symbol] = self.graph.call_function(torch.ops.aten.sym_size.int, (self.copies[node], dim))
        return self._size_nodes[symbol]

    def _shape(self, node: fx.Node) -> tuple[sympy.Expr, ...]:
        return geometry_of(node, self._sizes).shape


def _symbols_used(run: Run, sizes: Sizes) -> set[sympy.Symbol]:
    """Returns the symbols of the sizes among the arguments of a run's nodes."""
    used: set[sympy.Symbol] = set()
    for node in run.nodes:
        for argument in node.all_input_nodes:
            value = argument.meta.get("example_value")
            if isinstance(value, int | torch.SymInt):
                used |= sizes.expression(value, node).free_symbols
            elif isinstance(value, torch.Size):
                used |= {symbol for size in sizes.expressions(value, node) for symbol in size.free_symbols}
    return used


def _input_with(trace: Trace, symbol: sympy.Symbol) -> fx.Node:
    """Returns the first input of the step that has a size."""
    return next(node for _, node in sorted(trace.inputs.items()) if symbol in geometry_of(node, trace.sizes).shape)


def _fake(geometry: Geometry, values: Callable[[Iterable[sympy.Expr]], list[int | torch.SymInt]]) -> Tensor:
    shape, strides = values(geometry.shape), values(geometry.strides)
    fake = torch.empty_strided(shape, strides, dtype=geometry.dtype, device=geometry.device)
    if geometry.is_aligned:
        return fake
    num_elements = fake.untyped_storage().nbytes() // geometry.dtype.itemsize
    return torch.empty(num_elements + 1, dtype=geometry.dtype, device=geometry.device).as_strided(shape, strides, 1)
