"""Makes the decoder ready to run steps: compiles it, captures it, checks what was captured and measures what it costs."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from modelworker.compiler.cache import ArtifactCache
from modelworker.compiler.counters import CompileCounters
from modelworker.compiler.errors import CompileError
from modelworker.compiler.settings import compile_settings_of
from modelworker.ops.attention import PagedAttention
from modelworker.ops.triton_library import TritonLibrary
from modelworker.worker.capture import capture_decoder, graphs_of_device
from modelworker.worker.compiled_check import check_compiled
from modelworker.worker.compiled_decoder import CompiledDecoder, compile_decoder, decoder_source
from modelworker.worker.cpu_kernels import CpuKernels
from modelworker.worker.description import CapturedSize, Degradation
from modelworker.worker.execution_plan import ExecutionPlan
from modelworker.worker.graph_check import check_modes, disable_failed, measure_costs
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.progress import Progress
from modelworker.worker.settings import WorkerSettings
from modelworker.worker.step_buffers import StepBuffers
from modelworker.worker.step_runner import StepRunner

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderParts:
    """What the decoder is made of.

    Attributes:
        model: with its weights.
        kv_cache: that it writes to.
        buffers: for the inputs of steps.
        max_model_len: of a sequence.
        vocab_size: of the model.
        kernels: of the CPU.
        triton: kernels of the GPU; None: there are none.
        device: where all of them are.
        identity: what decides, beside shapes and dtypes, what the model computes.
    """

    model: CausalLM
    kv_cache: KvCache
    buffers: StepBuffers
    max_model_len: int
    vocab_size: int
    kernels: CpuKernels
    triton: TritonLibrary | None
    device: torch.device
    identity: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyDecoder:
    """A decoder that is ready to run.

    Attributes:
        runner: runs it.
        optimization_level: that it came to.
        graph_mode: likewise.
        captured: what is served, with its cost.
        graph_bytes: memory that all graphs together take.
        findings: of the checks.
        degradations: what isn't as it was asked for.
    """

    runner: StepRunner
    optimization_level: int
    graph_mode: str
    captured: tuple[CapturedSize, ...]
    graph_bytes: int
    findings: tuple[str, ...]
    degradations: tuple[Degradation, ...]


def prepare_decoder(
    plan: ExecutionPlan, parts: DecoderParts, settings: WorkerSettings, counters: CompileCounters, progress: Progress
) -> ReadyDecoder:
    """Compiles, captures, checks and measures. The KV cache holds garbage afterwards.

    Raises:
        SettingsError: graphs don't fit into the memory that is left.
    """
    asked = plan.graphs
    plan, compiled, degradations = _compile(plan, parts, settings, counters, progress)
    graphs, no_graphs = graphs_of_device(plan.graphs, parts.device, parts.kernels)
    # As steps run: what a capture allocates is an inference tensor, which ops between graphs may change only in this mode.
    with torch.inference_mode():
        _prepare_attention(parts)
        captured = capture_decoder(
            graphs,
            asked=asked,
            lacks_kernels=bool(no_graphs),
            model=parts.model,
            kv_cache=parts.kv_cache,
            buffers=parts.buffers,
            compiled=compiled,
            device=parts.device,
            kernels=parts.kernels,
            progress=progress,
        )
        with progress.stage("checking graphs"):
            checks = check_modes(captured.runner, parts.kv_cache, vocab_size=parts.vocab_size, max_model_len=parts.max_model_len)
        failed = disable_failed(captured.runner, checks)
        found, wrong_code = check_compiled(
            captured.runner,
            parts.kv_cache,
            vocab_size=parts.vocab_size,
            max_model_len=parts.max_model_len,
            max_tokens=settings.step.max_tokens_per_step,
        )
        with progress.stage("measuring graphs", total=len(captured.runner.captured), unit="graphs") as advance:
            costs = measure_costs(captured.runner, checks.seconds, advance)
    return ReadyDecoder(
        runner=captured.runner,
        # Where generated code failed its check, none is served.
        optimization_level=0 if wrong_code and not captured.runner.compiled_modes else plan.optimization_level,
        graph_mode=captured.runner.dispatcher.served_mode.value,
        captured=costs,
        graph_bytes=captured.num_bytes,
        findings=(*found, *map(str, checks.worst), *captured.findings),
        degradations=(*degradations, *no_graphs, *captured.degradations, *failed, *wrong_code),
    )


def _prepare_attention(parts: DecoderParts) -> None:
    # The caches of all layers are laid out alike.
    key_cache, value_cache = parts.kv_cache.layers[0]
    for module in parts.model.modules():
        if isinstance(module, PagedAttention):
            module.prepare(key_cache, value_cache)


def _compile(
    plan: ExecutionPlan, parts: DecoderParts, settings: WorkerSettings, counters: CompileCounters, progress: Progress
) -> tuple[ExecutionPlan, CompiledDecoder | None, tuple[Degradation, ...]]:
    """Compiles where the plan says so; where that fails, returns a plan without it."""
    compile_settings = compile_settings_of(
        plan.optimization_level, backend=plan.compiler, partition=plan.partition, disabled_passes=plan.disabled_passes
    )
    if compile_settings is None:
        return plan, None, ()
    source = decoder_source(
        parts.model,
        parts.kv_cache,
        parts.buffers,
        device=parts.device,
        kernels=parts.kernels.library,
        triton=parts.triton,
        identity=parts.identity,
    )
    cache = ArtifactCache(settings.cache.folder / "compiled")
    try:
        return plan, compile_decoder(source, compile_settings, counters=counters, cache=cache, progress=progress), ()
    except CompileError as error:
        _logger.error("the model can't be compiled: %s", error)
        degradation = Degradation(reason="compile_failed", message=f"{error}: steps run plain modules, without PIECEWISE graphs")
        return plan.without_compiler(), None, (degradation,)
