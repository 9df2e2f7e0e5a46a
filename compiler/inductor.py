"""Inductor as the backend of pieces."""

import contextlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._inductor import config, cpu_vec_isa
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.exc import CppCompileError, InductorError, InvalidCxxCompiler
from torch._inductor.output_code import CompiledFxGraph

from modelworker.compiler.assemble import UniquePiece
from modelworker.compiler.errors import CompileError, NoCompilerError
from modelworker.compiler.generated_code import GeneratedCode, extract_code
from modelworker.compiler.settings import CompileSettings

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
    "graph_partition": False,
}


def compile_piece(piece: UniquePiece, settings: CompileSettings, passes: Callable[[fx.GraphModule], None]) -> GeneratedCode:
    """Compiles a piece.

    Args:
        piece: what to compile.
        settings: of the compiler.
        passes: our passes over the graph of ATen ops.

    Raises:
        NoCompilerError: there is no C++ compiler.
        CompileError: Inductor fails, or makes code that can't be called as a piece is.
    """
    mode, fakes = piece.graph.fake_inputs()
    num_outputs = len(piece.graph.outputs) + len(piece.returned)
    compiled: list[CompiledFxGraph] = []

    def compile_inner(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        _check_signature(graph, len(fakes), num_outputs)
        passes(graph)
        result = compile_fx_inner(graph, inputs, **options)
        assert isinstance(result, CompiledFxGraph)
        compiled.append(result)
        return result

    options = {**_OPTIONS, "max_autotune": settings.autotune, **dict(settings.inductor_options)}
    try:
        with torch.no_grad(), tracing(TracingContext(mode)), config.patch(options):
            compile_fx(piece.graph.module(piece.returned), fakes, inner_compile=compile_inner)
    except (InvalidCxxCompiler, InductorError) as error:
        raise _explain(error) from error
    (result,) = compiled
    if result.constants:
        raise CompileError(f"a piece holds the constants {', '.join(result.constants)}: a model's tensors must be bound")
    module = sys.modules[result.current_callable.__module__]
    return extract_code(result.source_code, vars(module))


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
def compiling(directory: Path | None) -> Iterator[None]:
    """Lets Inductor keep its files in a directory, and tells it what it would find out in child processes.

    Args:
        directory: for compiled kernels, by their content; None: a temporary one.
    """
    with contextlib.ExitStack() as stack:
        work = directory or Path(stack.enter_context(TemporaryDirectory(prefix="modelworker-compile-")))
        stack.enter_context(_environment(TORCHINDUCTOR_CACHE_DIR=str(work), TRITON_CACHE_DIR=str(work / "triton")))
        stack.enter_context(_known_vector_instructions())
        yield


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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
