"""Inductor as the backend of pieces."""

import contextlib
import logging
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_shapes_config
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._inductor import config, cpu_vec_isa
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.scheduler import Scheduler
from torch._inductor.utils import clear_caches, set_customized_partition_wrappers
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from modelworker.compiler.assemble import UniquePiece
from modelworker.compiler.environment import environment
from modelworker.compiler.errors import CompileError, NoCompilerError
from modelworker.compiler.generated_code import GeneratedCode, data_pointer_told, extract_code
from modelworker.compiler.piece import FakeInputs
from modelworker.compiler.settings import CompileSettings

_logger = logging.getLogger(__name__)

# What kernels are tuned for: the tokens of a usual step of decodes.
_EXAMPLE_SIZE = 64

_OPTIONS: dict[str, Any] = {
    # What these would check in every call of a piece is fixed by the split.
    "size_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
    # Inductor's caches of graphs do not know what code depends on as well as the cache of whole models does.
    "fx_graph_cache": False,
    "fx_graph_remote_cache": False,
    # The worker captures graphs itself.
    "triton.cudagraphs": False,
}


def compile_piece(
    piece: UniquePiece, settings: CompileSettings, passes: Callable[[fx.GraphModule], None], partition_at: Sequence[str] = ()
) -> GeneratedCode:
    """Compiles a piece.

    Args:
        piece: what to compile.
        settings: of the compiler.
        passes: our passes over the graph of ATen ops.
        partition_at: ops at which Inductor is to divide its code into functions.

    Raises:
        NoCompilerError: there is no C++ compiler.
        CompileError: Inductor fails, or makes code that can't be called as a piece is.
    """
    if None not in piece.graph.max_sizes:
        code, assumptions = _generate(piece, settings, passes, partition_at, bounded=True)
        if not assumptions:
            return code
        _logger.info("a piece is compiled again for sizes of which nothing is known, as its code assumed %s", assumptions)
    code, _ = _generate(piece, settings, passes, partition_at, bounded=False)
    return code


def _generate(
    piece: UniquePiece,
    settings: CompileSettings,
    passes: Callable[[fx.GraphModule], None],
    partition_at: Sequence[str],
    *,
    bounded: bool,
) -> tuple[GeneratedCode, tuple[str, ...]]:
    """Compiles a piece, and returns what its code assumes of sizes beyond their bounds, which makes it unusable."""
    fakes = piece.graph.fake_inputs()
    num_outputs = len(piece.graph.outputs) + len(piece.returned)
    compiled: list[CompiledFxGraph] = []

    def compile_inner(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        _check_signature(graph, len(fakes.tensors), num_outputs)
        passes(graph)
        if bounded:
            _bound_sizes(fakes, piece.graph.max_sizes)
        result = compile_fx_inner(graph, inputs, **options)
        assert isinstance(result, CompiledFxGraph)
        compiled.append(result)
        return result

    partition = {"graph_partition": bool(partition_at), "custom_should_partition_ops": list(partition_at)}
    options = {**_OPTIONS, **partition, "max_autotune": settings.autotune, **dict(settings.inductor_options)}
    try:
        with (
            torch.no_grad(),
            tracing(TracingContext(fakes.mode)),
            config.patch(options),
            symbolic_shapes_config.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
        ):
            compile_fx(piece.graph.module(piece.returned), fakes.tensors, inner_compile=compile_inner)
    except (InvalidCxxCompiler, InductorError) as error:
        raise _explain(error) from error
    (result,) = compiled
    if result.constants:
        raise CompileError(f"a piece holds the constants {', '.join(result.constants)}: a model's tensors must be bound")
    module = sys.modules[result.current_callable.__module__]
    assumptions = tuple(str(guard.expr) for guard in _shape_env(fakes).guards)
    return extract_code(result.source_code, vars(module)), assumptions


def _bound_sizes(fakes: FakeInputs, max_sizes: Sequence[int | None]) -> None:
    """Replaces the unknown sizes by symbols with bounds and an example, which Inductor takes for measure.

    Of a size of which nothing is known Inductor can't tell that a reduction over rows and what follows it run over the same rows,
    and does not fuse them. Of a symbol with an example it may assume what is true of the example; it notes that as a guard. Where
    it notes none, the code is good for every size within the bounds.
    """
    shape_env = _shape_env(fakes)
    for index, (size, max_size) in enumerate(zip(fakes.sizes, max_sizes, strict=True)):
        assert max_size is not None
        source = ConstantSource(f"size_{index}")
        symbol = shape_env.create_symbol(
            min(_EXAMPLE_SIZE + 8 * index, max_size),
            source,
            dynamic_dim=DimDynamic.DYNAMIC,
            constraint_dim=None,
            do_not_specialize_zero_one=True,
        )
        shape_env.constrain_symbol_range(symbol, 0, max_size)
        shape_env._set_replacement(size.node.expr, symbol, "a size of an input")


def _shape_env(fakes: FakeInputs) -> ShapeEnv:
    assert fakes.mode.shape_env is not None
    return fakes.mode.shape_env


def _explain(error: Exception) -> CompileError:
    text = str(error).strip()
    first_line = text.partition("\n")[0]
    if isinstance(error, InvalidCxxCompiler) or "InvalidCxxCompiler" in first_line:
        return NoCompilerError("there is no C++ compiler: install g++, or set CXX")
    if isinstance(error, CppCompileError) or "CppCompileError" in first_line:
        errors = [line for line in text.splitlines() if "error" in line.lower()]
        return NoCompilerError(f"the C++ compiler does not work: {errors[1] if len(errors) > 1 else first_line}")
    return CompileError(f"Inductor: {first_line}")


def _check_signature(graph: fx.GraphModule, num_inputs: int, num_outputs: int) -> None:
    """Checks that Inductor's code takes the piece's inputs and returns its outputs, nothing more."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    outputs = next(iter(reversed(graph.graph.nodes))).args[0]
    if (len(inputs), len(outputs)) != (num_inputs, num_outputs):
        raise CompileError(
            f"a piece with {num_inputs} inputs and {num_outputs} outputs became code with {len(inputs)} and {len(outputs)}"
        )


@contextlib.contextmanager
def compiling(partition_at: Sequence[str] = ()) -> Iterator[None]:
    """Lets Inductor keep its files in a private directory meanwhile, and tells it what it would find out in child processes.

    Inductor runs the shared objects that it finds. What a warm start needs of them is in the artifact, whose digest is verified.

    Args:
        partition_at: ops at which Inductor is to divide its code into functions.
    """
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(TemporaryDirectory(prefix="modelworker-compile-"))
        stack.enter_context(environment(TORCHINDUCTOR_CACHE_DIR=directory))
        # Inductor sets it for good.
        stack.enter_context(data_pointer_told())
        stack.enter_context(_known_vector_instructions())
        if partition_at:
            stack.enter_context(_partition_on_any_device())
        # Inductor remembers the paths of what it has built in another directory.
        clear_caches()
        stack.callback(clear_caches)
        yield


@contextlib.contextmanager
def _known_vector_instructions() -> Iterator[None]:
    """Takes the CPU's vector instructions from torch itself.

    Inductor builds and loads five test programs instead, in child processes that each import torch: 10 to 30 s. AMX, for which it
    tests too, is used only in templates that pieces do not use.
    """
    kinds = {"AVX512": cpu_vec_isa.VecAVX512, "AVX2": cpu_vec_isa.VecAVX2}
    kind = kinds.get(torch.backends.cpu.get_cpu_capability().partition("_")[0])
    if platform.machine() != "x86_64" or kind is None:
        yield
        return
    original = cpu_vec_isa.valid_vec_isa_list
    cpu_vec_isa.valid_vec_isa_list = lambda: [kind()]  # type: ignore[assignment]
    try:
        yield
    finally:
        cpu_vec_isa.valid_vec_isa_list = original


@contextlib.contextmanager
def _partition_on_any_device() -> Iterator[None]:
    """Lets Inductor divide its code at the ops that it is given.

    It does so only for its own CUDA graphs, or for a wrapper of its functions, and takes every op on a CPU for a boundary.
    """
    original = Scheduler.should_partition

    def should_partition(scheduler: Any, node: Any) -> str | None:
        reason: str | None = original(scheduler, node)
        return None if reason == "cpu ops" else reason

    Scheduler.should_partition = should_partition  # type: ignore[method-assign, assignment]
    set_customized_partition_wrappers(lambda function, metadata: function)
    try:
        yield
    finally:
        Scheduler.should_partition = original  # type: ignore[method-assign]
        set_customized_partition_wrappers(None)  # type: ignore[arg-type]
