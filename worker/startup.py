"""Everything that is done once, before the worker is ready: device, dtype, model, weights, KV cache, warm-up, self-check.

Runs on the engine thread: threads, grad mode and device are properties of the thread that computes.
"""

import dataclasses
import gc
import logging
from collections.abc import Mapping
from pathlib import Path

import torch

from modelworker.ops.attention import PagedAttention
from modelworker.worker.counters import Counters
from modelworker.worker.cpu_kernels import load_cpu_kernels
from modelworker.worker.description import (
    Degradation,
    ExecutionDescription,
    ModelDescription,
    SelfCheck,
    StepLimits,
    WorkerDescription,
)
from modelworker.worker.engine import Engine
from modelworker.worker.errors import SettingsError
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.machine import choose_threads, read_cpu, read_machine
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.models.checkpoint import Checkpoint
from modelworker.worker.models.config import ModelConfig
from modelworker.worker.models.registry import build_model, load_model_config
from modelworker.worker.models.weights import LoadedWeights, load_weights
from modelworker.worker.op_plan import describe_ops, plan_ops
from modelworker.worker.plan import (
    check_weights_fit,
    choose_device,
    choose_dtype,
    choose_max_model_len,
    free_bytes_of,
    judge_memory,
    measure_products,
    plan_kv_cache,
    step_bytes,
    weights_bytes,
)
from modelworker.worker.progress import Progress
from modelworker.worker.self_check import check_products, warm_up_and_check
from modelworker.worker.settings import ModelSettings, WorkerSettings
from modelworker.worker.versions import installed_versions

_logger = logging.getLogger(__name__)


def build_engine(settings: WorkerSettings, progress: Progress, counters: Counters) -> Engine:
    """Makes an engine that is ready to serve.

    Raises:
        SetupError: settings, machine and checkpoint do not fit together.
    """
    if not settings.model.model:
        raise SettingsError("no model given: use --model DIR with a Hugging Face model directory")
    directory = Path(settings.model.model)
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
        ops = plan_ops(settings.ops, device, kernels, compiles=False)
        model = build_model(config, dtype=dtype, max_model_len=max_model_len, ops=ops)
        _check_that_all_fits(settings, config, model, dtype, device, max_model_len)
        loaded = _load_weights(model, directory, device, progress)
        kv_cache, tightness = _allocate_kv_cache(settings, config, dtype, device, max_model_len)
        description = WorkerDescription(
            model=_describe_model(settings.model, config, model, dtype, loaded, max_model_len),
            kv_cache=kv_cache.describe(),
            limits=_limits(settings),
            execution=_describe_execution(device, num_threads, model),
            self_check=SelfCheck(passed=True, findings=(products,)),
            degradations=choice.degradations + kernels.degradations + tightness,
            versions=_versions(device),
            ops=describe_ops(model),
        )
        engine = Engine(model=model, kv_cache=kv_cache, description=description, device=device)
        self_check = warm_up_and_check(engine, progress)
    engine.description = dataclasses.replace(
        description,
        self_check=dataclasses.replace(self_check, findings=(products, *self_check.findings)),
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
    settings: WorkerSettings, config: ModelConfig, model: CausalLM, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> None:
    """Finds out before anything is loaded what would come to light only afterwards."""
    free_bytes = free_bytes_of(device, read_machine())
    check_weights_fit(weights_bytes(model), free_bytes)
    plan_kv_cache(settings, config, dtype=dtype, max_model_len=max_model_len, free_bytes=free_bytes - weights_bytes(model))


def _allocate_kv_cache(
    settings: WorkerSettings, config: ModelConfig, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> tuple[KvCache, tuple[Degradation, ...]]:
    free_bytes = free_bytes_of(device, read_machine())
    plan = plan_kv_cache(settings, config, dtype=dtype, max_model_len=max_model_len, free_bytes=free_bytes)
    _logger.info(
        "KV cache: %d blocks of %d tokens, %.1f MiB of %.1f MiB free",
        plan.num_blocks,
        plan.geometry.block_size,
        plan.num_bytes / 2**20,
        free_bytes / 2**20,
    )
    largest_step_bytes = step_bytes(settings.step, config, dtype=dtype, max_model_len=max_model_len)
    degradations = judge_memory(largest_step_bytes, free_bytes - plan.num_bytes)
    return KvCache(plan.geometry, plan.num_blocks, device), degradations


def _limits(settings: WorkerSettings) -> StepLimits:
    return StepLimits(
        max_sequences=settings.step.max_sequences,
        max_tokens_per_step=settings.step.max_tokens_per_step,
        max_steps_in_flight=settings.fencing.max_steps_in_flight,
        max_message_bytes=settings.server.max_message_size,
        max_feedback_sequences=0,
        lease_idle_ms=round(settings.fencing.lease_idle_seconds * 1000),
        max_replays=settings.fencing.max_replays,
    )


def _printable(name: str) -> str:
    """A name that can be sent: bytes of a directory's name that are no UTF-8 are spelled out."""
    return name.encode("utf-8", "backslashreplace").decode()


def _describe_model(
    settings: ModelSettings, config: ModelConfig, model: CausalLM, dtype: torch.dtype, loaded: LoadedWeights, max_model_len: int
) -> ModelDescription:
    return ModelDescription(
        name=_printable(settings.served_model_name or Path(settings.model).resolve().name),
        architecture=config.architecture,
        weights_digest=loaded.digest,
        config_digest=config.digest,
        eos_token_ids=config.eos_token_ids,
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_parameters=loaded.num_parameters,
    )


def _describe_execution(device: torch.device, num_threads: int, model: CausalLM) -> ExecutionDescription:
    return ExecutionDescription(
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else read_cpu().name,
        optimization_level=0,
        graph_mode="NONE",
        captured=(),
        attention=_attention_in_use(model),
        num_threads=num_threads,
        tensor_parallel_size=1,
    )


def _attention_in_use(model: CausalLM) -> str:
    return ", ".join(sorted({module.choice.implementation for module in model.modules() if isinstance(module, PagedAttention)}))


def _versions(device: torch.device) -> Mapping[str, str]:
    cuda = {"cuda": torch.version.cuda} if device.type == "cuda" and torch.version.cuda else {}
    return {**installed_versions(), **cuda}
