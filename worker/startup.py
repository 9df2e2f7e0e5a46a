"""Everything that is done once, before the worker is ready: device, dtype, model, weights, KV cache, warm-up, self-check.

Runs on the engine thread: threads, grad mode and device are properties of the thread that computes.
"""

import dataclasses
import gc
import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from modelworker.compiler.counters import CompileCounters
from modelworker.graphs.settings import CaptureMode
from modelworker.ops.report import report_ops
from modelworker.ops.triton_library import TritonLibrary
from modelworker.worker.capture import graphs_of_device
from modelworker.worker.counters import Counters
from modelworker.worker.cpu_kernels import load_cpu_kernels
from modelworker.worker.decoder_setup import DecoderParts, prepare_decoder
from modelworker.worker.describe import describe_execution, describe_limits, describe_model, describe_versions
from modelworker.worker.description import (
    SelfCheck,
    WorkerDescription,
)
from modelworker.worker.engine import Engine
from modelworker.worker.errors import SettingsError
from modelworker.worker.execution_plan import plan_execution
from modelworker.worker.feedback import FeedbackTable
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.machine import choose_threads, read_machine
from modelworker.worker.memory_budget import MemoryBudget, graph_bytes
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.models.checkpoint import Checkpoint
from modelworker.worker.models.config import ModelConfig
from modelworker.worker.models.registry import build_model, load_model_config
from modelworker.worker.models.weights import LoadedWeights, load_weights
from modelworker.worker.op_plan import describe_ops, missing_kernels, plan_ops
from modelworker.worker.plan import (
    check_weights_fit,
    choose_device,
    choose_dtype,
    choose_max_model_len,
    free_bytes_of,
    measure_products,
    plan_kv_cache,
    step_bytes,
    weights_bytes,
)
from modelworker.worker.progress import Progress
from modelworker.worker.self_check import check_products, warm_up_and_check
from modelworker.worker.settings import WorkerSettings
from modelworker.worker.step_buffers import StepBuffers

_logger = logging.getLogger(__name__)


def build_engine(settings: WorkerSettings, progress: Progress, counters: Counters) -> Engine:
    """Makes an engine that is ready to serve.

    Raises:
        SetupError: settings, machine and checkpoint do not fit together.
    """
    if not settings.model.model:
        raise SettingsError("no model given: use --model DIR with a Hugging Face model directory")
    directory = Path(settings.model.model)
    plan = plan_execution(settings.execution, settings.step)
    num_threads, threads_source = choose_threads(settings.device.threads, read_machine())
    torch.set_num_threads(num_threads)
    device = choose_device(settings.device)
    _logger.info("computing on %s with %d threads (%s)", device, num_threads, threads_source)
    # Not inference mode, which marks tensors for good: what a compiler or another thread does with them later must be free.
    with torch.no_grad():
        config = load_model_config(directory)
        choice = choose_dtype(settings.model, config, measure_products(device))
        dtype = choice.dtype
        _logger.info("computing in %s (%s)", choice.name, choice.reason)
        max_model_len = choose_max_model_len(settings.model, config)
        products = check_products(dtype, device)
        kernels = load_cpu_kernels(settings, device, progress)
        ops = plan_ops(
            settings.ops,
            device,
            kernels,
            compiles=plan.compiles,
            backend=plan.compiler,
            captures=plan.graphs.mode is not CaptureMode.NONE,
        )
        model = build_model(config, dtype=dtype, max_model_len=max_model_len, ops=ops)
        graphs, _ = graphs_of_device(plan.graphs, device, kernels)
        for_graphs = graph_bytes(graphs, config, dtype=dtype, device=device, triton=ops.triton)
        _check_that_all_fits(settings, config, model, dtype, device, max_model_len, for_graphs)
        loaded = _load_weights(model, directory, device, progress)
        kv_cache, budget = _allocate_kv_cache(settings, config, dtype, device, max_model_len, for_graphs, ops.triton)
        parts = DecoderParts(
            model=model,
            kv_cache=kv_cache,
            buffers=_make_buffers(settings, kv_cache, max_model_len, device),
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
            kernels=kernels,
            triton=ops.triton,
            device=device,
            identity=_identity(config, model),
        )
        compiling = CompileCounters()
        if ops.triton is not None:
            compiling.watch_triton()
        decoder = prepare_decoder(plan, parts, settings, compiling, progress)
        memory_findings, tightness = budget.judge_graphs(decoder.graph_bytes)
        counters.follow("compile_events_total", "event", compiling.snapshot)
        kv_cache.warm_up()
        kv_cache.zero()
        limits = describe_limits(settings)
        description = WorkerDescription(
            model=describe_model(settings.model, config, model, dtype, loaded, max_model_len),
            kv_cache=kv_cache.describe(),
            limits=limits,
            execution=describe_execution(device, num_threads, model, decoder),
            self_check=SelfCheck(passed=True, findings=(products, *decoder.findings, *memory_findings)),
            degradations=(*choice.degradations, *kernels.degradations, *missing_kernels(ops), *tightness, *decoder.degradations),
            versions=describe_versions(device),
            ops=describe_ops(model),
        )
        feedback = FeedbackTable.of(
            limits, max_model_len=max_model_len, idle_seconds=settings.feedback.feedback_idle_seconds, counters=counters
        )
        engine = Engine(
            model=model,
            kv_cache=kv_cache,
            runner=decoder.runner,
            feedback=feedback,
            description=description,
            device=device,
        )
        self_check = warm_up_and_check(engine, progress)
        kv_cache.use_huge_pages()
    engine.description = dataclasses.replace(
        description,
        self_check=dataclasses.replace(self_check, findings=(*description.self_check.findings, *self_check.findings)),
    )
    for degradation in engine.description.degradations:
        _logger.warning("degraded: %s: %s", degradation.reason, degradation.message)
        counters.increment("degradations_total", reason=degradation.reason)
    # What start-up made lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    return engine


def _load_weights(model: CausalLM, directory: Path, device: torch.device, progress: Progress) -> LoadedWeights:
    checkpoint = Checkpoint.open(directory)
    with progress.stage("loading weights", total=checkpoint.num_bytes, unit="bytes") as advance:
        return load_weights(model, checkpoint, device=device, progress=advance)


def _check_that_all_fits(
    settings: WorkerSettings,
    config: ModelConfig,
    model: CausalLM,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    for_graphs: int,
) -> None:
    """Finds out before anything is loaded what would come to light only afterwards."""
    free_bytes = free_bytes_of(device, read_machine())
    check_weights_fit(weights_bytes(model), free_bytes)
    free_bytes -= weights_bytes(model) + for_graphs
    plan_kv_cache(settings, config, dtype=dtype, max_model_len=max_model_len, free_bytes=free_bytes)


def _allocate_kv_cache(
    settings: WorkerSettings,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    for_graphs: int,
    triton: TritonLibrary | None,
) -> tuple[KvCache, MemoryBudget]:
    free_bytes = free_bytes_of(device, read_machine())
    plan = plan_kv_cache(settings, config, dtype=dtype, max_model_len=max_model_len, free_bytes=free_bytes - for_graphs)
    _logger.info(
        "KV cache: %d blocks of %d tokens, %.1f MiB of %.1f MiB free, beside an estimate of %.1f MiB for graphs",
        plan.num_blocks,
        plan.geometry.block_size,
        plan.num_bytes / 2**20,
        free_bytes / 2**20,
        for_graphs / 2**20,
    )
    budget = MemoryBudget(
        free_bytes=free_bytes,
        kv_cache_bytes=plan.num_bytes,
        graph_bytes=for_graphs,
        step_bytes=step_bytes(settings.step, config, dtype=dtype, max_model_len=max_model_len, triton=triton),
    )
    return KvCache(plan.geometry, plan.num_blocks, device), budget


def _make_buffers(settings: WorkerSettings, kv_cache: KvCache, max_model_len: int, device: torch.device) -> StepBuffers:
    return StepBuffers(
        max_tokens=settings.step.max_tokens_per_step,
        max_sequences=settings.step.max_sequences,
        max_blocks=-(-max_model_len // kv_cache.geometry.block_size),
        device=device,
    )


def _identity(config: ModelConfig, model: CausalLM) -> Mapping[str, str]:
    """What decides what the model computes, beside the shapes and dtypes of its tensors."""
    ops = sorted(f"{report.name}: {report.implementation}" for report in report_ops(model) if report.implementation)
    return {"architecture": config.architecture, "config": config.digest, "ops": "; ".join(ops), "tensor parallel rank": "0 of 1"}
