"""From a model's function to a compiled model, by way of the cache where there is one.

What a warm start needs is small. Dynamo and Inductor, which take seconds to load, are loaded by name, and only to compile.
"""

import contextlib
import importlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from modelworker.compiler.artifact import Artifact, Factors
from modelworker.compiler.cache import ArtifactCache, Miss
from modelworker.compiler.counters import CompileCounters
from modelworker.compiler.errors import CompileError
from modelworker.compiler.factors import collect_factors
from modelworker.compiler.generated_code import load_code
from modelworker.compiler.graph_pass import GraphPass
from modelworker.compiler.model import CompiledModel
from modelworker.compiler.model_source import ModelSource
from modelworker.compiler.partitioned_model import PartitionedModel
from modelworker.compiler.program import PieceStage, Program
from modelworker.compiler.settings import CompileSettings
from modelworker.compiler.triton_files import triton_directory

_logger = logging.getLogger(__name__)


def compile_model(
    model: ModelSource,
    settings: CompileSettings,
    *,
    counters: CompileCounters,
    cache: ArtifactCache | None = None,
    passes: Sequence[GraphPass] = (),
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> CompiledModel:
    """Compiles a model, or loads what was compiled before.

    Grad mode is off in compiled code. The number of threads is that of the calling thread's torch, now.

    Args:
        model: what to compile.
        settings: of the compiler.
        counters: of what it takes.
        cache: of compiled models; None: nothing is kept.
        passes: over the pieces' graphs, after our own.
        advance: is called with how many of how many unique pieces are compiled.

    Raises:
        NoCompilerError: the machine lacks a working compiler.
        CompileError: the model can't be compiled, or the result can't be loaded. The message names the place in the model's code
            where there is one.
    """
    factors = collect_factors(model, settings, passes)
    compiled = None if cache is None else _load(cache, factors, model, settings, counters)
    if compiled is None:
        try:
            artifact = _compile(model, settings, passes, counters, advance)
            compiled = _link(artifact, model, settings)
        except CompileError:
            raise
        except Exception as error:
            # Inductor, its compilers, a graph pass, the loader, a full disk: none of them is a reason not to serve.
            _logger.warning("compiling failed", exc_info=True)
            raise CompileError(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error
        if cache is not None:
            _store(cache, artifact, factors, counters)
    counters.increment("pieces", len(compiled.pieces))
    return compiled


def _compile(
    model: ModelSource,
    settings: CompileSettings,
    passes: Sequence[GraphPass],
    counters: CompileCounters,
    advance: Callable[[int, int], None],
) -> Artifact:
    pipeline = _pipeline()
    started = time.monotonic()
    program, pieces = pipeline.cut_model(model, settings)
    _check_any_length(program, model)
    _logger.info(
        "traced the model in %.1f s: %d stages, %d unique pieces", time.monotonic() - started, len(program.stages), len(pieces)
    )
    if settings.backend == "eager":
        written: Artifact = pipeline.write_pieces(program, pieces)
        return written
    artifact: Artifact = pipeline.compile_pieces(model, program, pieces, settings, passes, counters, advance)
    _logger.info("compiled %d unique pieces in %.1f s", len(pieces), time.monotonic() - started)
    return artifact


def _check_any_length(program: Program, model: ModelSource) -> None:
    """Holds the model to what its key leaves out."""
    names = dict(enumerate((*program.inputs, *program.bound)))
    for stage in program.stages:
        if isinstance(stage, PieceStage) and (read := {names.get(slot) for slot in stage.reads} & model.any_length):
            raise CompileError(f"a piece reads {sorted(map(str, read))[0]}, which only splitting ops may read")


def _load(
    cache: ArtifactCache, factors: Factors, model: ModelSource, settings: CompileSettings, counters: CompileCounters
) -> CompiledModel | None:
    started = time.monotonic()
    found = cache.load(factors)
    if isinstance(found, Artifact):
        try:
            compiled = _link(found, model, settings)
        except Exception as error:  # Whatever it is that a kernel or code does when it is loaded.
            found = Miss("damaged", f"{cache.directory}: what was compiled can't be loaded: {type(error).__name__}: {error}")
        else:
            counters.increment("cache_hits")
            _logger.info("loaded compiled code from %s in %.2f s", cache.directory, time.monotonic() - started)
            return compiled
    counters.increment("cache_misses", label=found.reason)
    level = logging.INFO if found.reason == "absent" else logging.WARNING
    _logger.log(level, "compiling: %s", found.message)
    return None


def _store(cache: ArtifactCache, artifact: Artifact, factors: Factors, counters: CompileCounters) -> None:
    failure = cache.store(artifact, factors)
    if failure is not None:
        counters.increment("cache_store_failures")
        _logger.warning("the compiled code is not kept: %s", failure)


def _link(artifact: Artifact, model: ModelSource, settings: CompileSettings) -> CompiledModel:
    with triton_directory(artifact.triton_files) if artifact.triton_files else contextlib.nullcontext():
        codes = [load_code(code) for code in artifact.codes]
    plain_codes = [load_code(code) for code in artifact.plain_codes]
    kind = PartitionedModel if settings.partition == "inductor" and settings.backend == "inductor" else CompiledModel
    return kind(artifact.program, codes, model.bound, plain_codes=plain_codes)


def _pipeline() -> Any:
    return importlib.import_module("modelworker.compiler.pipeline")
