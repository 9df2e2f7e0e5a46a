"""The way from a model's function to code: trace, split, unique pieces, one compilation for each. Loads Dynamo and Inductor."""

from collections.abc import Callable, Sequence

from modelworker.compiler.artifact import Artifact
from modelworker.compiler.assemble import UniquePiece, assemble
from modelworker.compiler.counters import CompileCounters
from modelworker.compiler.generated_code import GeneratedCode
from modelworker.compiler.graph_pass import GraphPass
from modelworker.compiler.inductor import compile_piece, compiling
from modelworker.compiler.model_source import ModelSource
from modelworker.compiler.passes import PassManager, default_passes
from modelworker.compiler.plain_code import plain_code
from modelworker.compiler.program import Program
from modelworker.compiler.settings import CompileSettings
from modelworker.compiler.split import split_graph
from modelworker.compiler.trace import trace_model
from modelworker.compiler.triton_files import collect_triton_files, triton_directory


def cut_model(model: ModelSource, settings: CompileSettings) -> tuple[Program, tuple[UniquePiece, ...]]:
    """Traces and splits a model. Where Inductor is to partition it, it is one piece.

    Raises:
        CompileError: that is impossible.
    """
    trace = trace_model(model)
    splitting_ops = model.splitting_ops if settings.partition == "fx" else ()
    return assemble(trace, split_graph(trace, splitting_ops), model.inputs)


def compile_pieces(
    model: ModelSource,
    program: Program,
    pieces: Sequence[UniquePiece],
    settings: CompileSettings,
    passes: Sequence[GraphPass],
    counters: CompileCounters,
    advance: Callable[[int, int], None],
) -> Artifact:
    """Compiles each unique piece of a program once.

    Args:
        model: that they are pieces of.
        program: of the model.
        pieces: its unique pieces.
        settings: of the compiler.
        passes: that follow our own.
        counters: of what it takes.
        advance: is called with how many of how many pieces are compiled.

    Raises:
        CompileError: that is impossible.
    """
    manager = PassManager((*default_passes(), *passes), disabled=settings.disabled_passes, counters=counters)
    codes = []
    partition_at = model.splitting_ops if settings.partition == "inductor" else ()
    with compiling(partition_at), triton_directory() as triton_files:
        for piece in pieces:
            codes.append(compile_piece(piece, settings, manager, partition_at))
            counters.increment("compiled")
            advance(len(codes), len(pieces))
        return Artifact(program, tuple(codes), _plain_codes(pieces), collect_triton_files(triton_files))


def write_pieces(program: Program, pieces: Sequence[UniquePiece]) -> Artifact:
    """Writes pieces down as code that calls their ops one by one: nothing is compiled.

    Raises:
        CompileError: that is impossible.
    """
    plain = _plain_codes(pieces)
    return Artifact(program, plain, plain)


def _plain_codes(pieces: Sequence[UniquePiece]) -> tuple[GeneratedCode, ...]:
    return tuple(plain_code(piece.graph.module(piece.returned)) for piece in pieces)
