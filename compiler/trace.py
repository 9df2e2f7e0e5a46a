"""The trace of the whole model by Dynamo: one graph, no guards, no size that is known only in this trace."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
import torch._dynamo
from torch import Tensor, fx
from torch._C._dynamo.eval_frame import reset_code
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.exc import TorchDynamoException
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from modelworker.compiler.errors import CompileError
from modelworker.compiler.model_source import ModelSource
from modelworker.compiler.program import Dim, StepInput

# The values of example inputs are never read, and no size of theirs is remembered; these only have to differ.
_FIRST_EXAMPLE_SIZE = 11


@dataclass(frozen=True, slots=True)
class Trace:
    """The graph of a model.

    Attributes:
        graph: of torch's functions and methods; every node has its fake value in meta["example_value"].
        inputs: the step's inputs that the graph reads, by index.
        bound: the bound tensors that it reads, by name, in order of first use.
        outputs: nodes of the results.
        returns_tensor: whether the model returns the only result itself; else a tuple.
        sizes: of the symbols in fake values, the name of the size.
        max_sizes: of named sizes, as far as they are known.
    """

    graph: fx.Graph
    inputs: Mapping[int, fx.Node]
    bound: Mapping[str, fx.Node]
    outputs: tuple[fx.Node, ...]
    returns_tensor: bool
    sizes: "Sizes"
    max_sizes: Mapping[str, int]


class Sizes:
    """Spells sizes of fake tensors by the names of the step's sizes."""

    def __init__(self, shape_env: ShapeEnv) -> None:
        self._shape_env = shape_env
        self._names: dict[sympy.Symbol, sympy.Symbol] = {}

    def name(self, size: int | torch.SymInt, name: str) -> None:
        """Says that a size is the one of that name.

        Raises:
            CompileError: the model fixes the size, or makes it equal to another one.
        """
        expression = self._simplified(size)
        if not isinstance(expression, sympy.Symbol):
            raise CompileError(f"the model works for one {name} only: {expression}")
        named = sympy.Symbol(name, integer=True, nonnegative=True)
        if self._names.setdefault(expression, named) != named:
            raise CompileError(f"the model works only where {name} and {self._names[expression]} are equal")

    def expression(self, size: int | torch.SymInt, node: fx.Node) -> sympy.Expr:
        """Returns a size in terms of the named ones.

        Args:
            size: of a fake tensor.
            node: that the size belongs to.

        Raises:
            CompileError: it depends on a tensor's values.
        """
        expression = self._simplified(size)
        if any(symbol not in self._names for symbol in expression.free_symbols):
            raise CompileError(f"a size of {node.name} depends on the values of a tensor{place_of(node)}")
        return expression.xreplace(self._names)

    def expressions(self, sizes: Iterable[int | torch.SymInt], node: fx.Node) -> tuple[sympy.Expr, ...]:
        """Returns sizes in terms of the named ones."""
        return tuple(self.expression(size, node) for size in sizes)

    def follows(self, condition: bool | torch.SymBool) -> bool:
        """Returns whether a condition holds for all sizes that the named ones can have."""
        if not isinstance(condition, torch.SymBool):
            return condition
        expression = self._shape_env.replace(condition.node.expr).xreplace(self._names)
        return expression is sympy.true

    def _simplified(self, size: int | torch.SymInt) -> sympy.Expr:
        if not isinstance(size, torch.SymInt):
            return sympy.Integer(size)
        return self._shape_env.simplify(self._shape_env.replace(size.node.expr))


class _Capture:
    """A backend of Dynamo that keeps the graph and computes nothing."""

    def __init__(self) -> None:
        self.module: fx.GraphModule | None = None
        self.arguments: tuple[Any, ...] = ()
        self.results: list[Tensor] = []

    def __call__(self, module: fx.GraphModule, _example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if self.module is not None:
            raise CompileError("the model was traced into more than one graph")
        self.module = module
        outputs: Any = _output_node(module.graph).args[0]

        def run(*arguments: Any) -> list[Tensor]:
            self.arguments = arguments
            self.results = [torch.empty(0) for _ in outputs]
            return self.results

        return run


def trace_model(model: ModelSource) -> Trace:
    """Traces a model's function, without running it.

    Args:
        model: to trace.

    Raises:
        CompileError: the function branches on a size or on a tensor's values, does something that can't be traced, or reads a
            tensor that is neither an input nor bound.
    """
    capture = _Capture()
    examples = _examples(model.inputs)

    def traced(*arguments: Tensor) -> Any:
        return model.function(*arguments)

    # Sizes that vary are said to; none is to be guessed from what another model did.
    patches = {"automatic_dynamic_shapes": False, "assume_static_by_default": True}
    try:
        with torch.no_grad(), torch._dynamo.config.patch(patches):
            returned = torch.compile(
                traced,
                backend=capture,
                fullgraph=True,
                dynamic=False,
                options={"guard_filter_fn": lambda guards: [False for _ in guards]},
            )(*examples)
    except TorchDynamoException as error:
        raise CompileError(_explain(error)) from error
    finally:
        # The compiled form of this function is of no use, and counts against Dynamo's limit for the next model.
        reset_code(traced.__code__)
    if capture.module is None:
        raise CompileError("the model computes nothing")
    return _assemble(capture, examples, model, returned)


def _examples(inputs: Mapping[str, StepInput]) -> list[Tensor]:
    sizes: dict[Dim, int] = {}
    examples = []
    for step_input in inputs.values():
        for dim in step_input.shape:
            if isinstance(dim, str):
                sizes.setdefault(dim, _FIRST_EXAMPLE_SIZE + 2 * len(sizes))
        shape = [sizes.get(dim, dim) for dim in step_input.shape]
        example = torch.empty(shape, dtype=step_input.dtype, device=step_input.device)  # type: ignore[arg-type]
        for index, dim in enumerate(step_input.shape):
            if isinstance(dim, str):
                mark_unbacked(example, index, shape_id=dim)
        examples.append(example)
    return examples


def _assemble(capture: _Capture, examples: list[Tensor], model: ModelSource, returned: Any) -> Trace:
    module = capture.module
    assert module is not None
    nodes: Any = _output_node(module.graph).args[0]
    results = [returned] if isinstance(returned, Tensor) else returned
    if not isinstance(results, Sequence) or not all(isinstance(result, Tensor) for result in results):
        raise CompileError(f"the model must return a tensor or a tuple of tensors, found {type(returned).__name__}")
    if sizes := [node.name for node in nodes if not isinstance(node.meta["example_value"], Tensor)]:
        raise CompileError(f"the model must return tensors, not the sizes {', '.join(sizes)}")
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    index_of_example = {id(example): index for index, example in enumerate(examples)}
    name_of_bound: dict[int, str] = {}
    for name, tensor in model.bound.items():
        name_of_bound.setdefault(id(tensor), name)
    graph_inputs: dict[int, fx.Node] = {}
    graph_bound: dict[str, fx.Node] = {}
    for node, argument in zip(placeholders, capture.arguments, strict=True):
        if id(argument) in index_of_example:
            graph_inputs[index_of_example[id(argument)]] = node
        elif id(argument) in name_of_bound:
            graph_bound[name_of_bound[id(argument)]] = node
        elif isinstance(argument, Tensor):
            raise CompileError(f"the model reads a tensor that is neither an input nor bound: {node.name}")
    names = _name_sizes(graph_inputs, tuple(model.inputs.values()))
    _check_assertions(module.graph, names)
    node_of: dict[int, fx.Node] = {id(result): node for result, node in zip(capture.results, nodes, strict=True)}
    node_of |= {id(examples[index]): node for index, node in graph_inputs.items()}
    if not all(id(result) in node_of for result in results):
        raise CompileError("the model returns a tensor that it does not compute")
    outputs = tuple(node_of[id(result)] for result in results)
    return Trace(module.graph, graph_inputs, graph_bound, outputs, isinstance(returned, Tensor), names, model.max_sizes)


def _name_sizes(graph_inputs: Mapping[int, fx.Node], inputs: tuple[StepInput, ...]) -> Sizes:
    if not graph_inputs:
        raise CompileError("the model reads none of its inputs")
    sizes = Sizes(next(iter(graph_inputs.values())).meta["example_value"].fake_mode.shape_env)
    for index, node in graph_inputs.items():
        for dim, size in zip(inputs[index].shape, node.meta["example_value"].shape, strict=True):
            if isinstance(dim, str):
                sizes.name(size, dim)
    return sizes


def _check_assertions(graph: fx.Graph, sizes: Sizes) -> None:
    """Removes run-time checks that follow from the declared sizes.

    Raises:
        CompileError: one does not: the model works for some sizes only.
    """
    for node in reversed(graph.nodes):
        if node.target is torch.ops.aten._assert_scalar.default:
            condition = node.args[0]
            value = condition.meta["example_value"] if isinstance(condition, fx.Node) else condition
            if not sizes.follows(value):
                raise CompileError(f"the model works for some sizes only: {node.args[1]}{place_of(node)}")
            graph.erase_node(node)


def _output_node(graph: fx.Graph) -> fx.Node:
    output: fx.Node = next(iter(graph.find_nodes(op="output")))
    return output


def place_of(node: fx.Node) -> str:
    """Returns " (at FILE:LINE)" of the model's code that a node comes from, or nothing."""
    places = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f" (at {places[-1][0]}:{places[-1][1]})" if places else ""


def _explain(error: TorchDynamoException) -> str:
    reason = str(error).strip().splitlines()[0]
    stack = getattr(error, "real_stack", None)
    place = f"{stack[-1].filename}:{stack[-1].lineno}: " if stack else ""
    return f"{place}{reason}"
