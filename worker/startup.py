"""Everything that is done once, before the worker is ready: device, dtype, model, weights, KV cache, warm-up, self-check.

Runs on the engine thread: threads, grad mode and device are properties of the thread that computes.
"""

import dataclasses
import gc
import importlib.metadata
import logging
import platform
import time
from pathlib import Path

import torch

from modelworker.worker.counters import Counters
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
from modelworker.worker.kv_cache import KvCache, KvCacheGeometry, choose_num_blocks
from modelworker.worker.machine import Machine, read_machine
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.models.checkpoint import Checkpoint
from modelworker.worker.models.config import ModelConfig
from modelworker.worker.models.registry import build_model, load_model_config
from modelworker.worker.models.weights import LoadedWeights, load_weights
from modelworker.worker.progress import Progress
from modelworker.worker.self_check import check_products, warm_up_and_check
from modelworker.worker.settings import DeviceSettings, ModelSettings, WorkerSettings

_logger = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.bfloat16}
_VERSIONED = ("modelworker", "torch", "triton", "safetensors", "grpcio", "protobuf", "numpy")


def build_engine(settings: WorkerSettings, progress: Progress, counters: Counters) -> Engine:
    """Makes an engine that is ready to serve.

    Raises:
        SetupError: settings, machine and checkpoint do not fit together.
    """
    if not settings.model.model:
        raise SettingsError("no model given: use --model DIR with a Hugging Face model directory")
    directory = Path(settings.model.model)
    machine = read_machine()
    num_threads = settings.device.threads or machine.num_threads
    torch.set_num_threads(num_threads)
    device = choose_device(settings.device)
    _logger.info("computing on %s with %d threads", device, num_threads)
    with torch.inference_mode():
        config = load_model_config(directory)
        dtype, degradations = choose_dtype(settings.model, config, device)
        max_model_len = choose_max_model_len(settings.model, config)
        products = check_products(dtype, device)
        model = build_model(config, dtype=dtype, max_model_len=max_model_len)
        loaded = _load_weights(model, directory, device, progress)
        kv_cache = _allocate_kv_cache(settings, config, dtype, device, max_model_len)
        description = WorkerDescription(
            model=_describe_model(settings.model, config, model, dtype, loaded, max_model_len),
            kv_cache=kv_cache.describe(),
            limits=_limits(settings),
            execution=_describe_execution(device, num_threads),
            self_check=SelfCheck(passed=True, findings=(products,)),
            degradations=degradations,
            versions=_versions(),
        )
        engine = Engine(model=model, kv_cache=kv_cache, description=description, device=device)
        report = warm_up_and_check(engine, progress)
    engine.description = dataclasses.replace(
        description,
        self_check=dataclasses.replace(report.self_check, findings=(products, *report.self_check.findings)),
        degradations=degradations + report.degradations,
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


def choose_device(settings: DeviceSettings) -> torch.device:
    """Resolves --device.

    Raises:
        SettingsError: a GPU is asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if settings.device == "cuda" and not has_cuda:
        raise SettingsError("--device cuda: no CUDA device can be used on this machine; use --device cpu or auto")
    return torch.device("cuda", 0) if has_cuda and settings.device != "cpu" else torch.device("cpu")


def choose_dtype(settings: ModelSettings, config: ModelConfig, device: torch.device) -> tuple[torch.dtype, tuple[Degradation, ...]]:
    """Resolves --dtype: the checkpoint's type, unless this machine computes bfloat16 slower than float32.

    Checkpoints in float16 are served in bfloat16, which has float32's range.
    """
    wanted = _DTYPES[(config.dtype or "float32") if settings.dtype == "auto" else settings.dtype]
    if wanted != torch.bfloat16:
        return wanted, ()
    bfloat16_ms, float32_ms = (_product_ms(dtype, device) for dtype in (torch.bfloat16, torch.float32))
    if bfloat16_ms <= float32_ms:
        return wanted, ()
    speeds = f"a product of 512 x 512 takes {bfloat16_ms:.2f} ms in bfloat16 and {float32_ms:.2f} ms in float32 on this machine"
    if settings.dtype == "auto":
        return torch.float32, (Degradation(reason="bfloat16_slow", message=f"{speeds}: computing in float32"),)
    return wanted, (Degradation(reason="bfloat16_slow", message=f"{speeds}: --dtype float32 would be faster"),)


def _product_ms(dtype: torch.dtype, device: torch.device, rounds: int = 5) -> float:
    matrix = torch.ones(512, 512, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(rounds):
        begun = time.perf_counter()
        # Reading an element back waits for the device.
        (matrix @ matrix)[0, 0].item()
        best = min(best, time.perf_counter() - begun)
    return best * 1000


def choose_max_model_len(settings: ModelSettings, config: ModelConfig) -> int:
    """Resolves --max-model-len: by default the length that the checkpoint states, at most the one to which its RoPE is scaled.

    Raises:
        SettingsError: it is more than the model was made for.
    """
    if settings.max_model_len is None:
        return config.max_model_len
    if settings.max_model_len > config.max_scaled_len:
        raise SettingsError(
            f"--max-model-len {settings.max_model_len} is more than the model was made for ({config.max_scaled_len})"
        )
    return settings.max_model_len


def _allocate_kv_cache(
    settings: WorkerSettings, config: ModelConfig, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> KvCache:
    geometry = KvCacheGeometry(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=settings.kv_cache.block_size,
        dtype=dtype,
    )
    free_bytes = _free_bytes(device, read_machine())
    num_blocks = choose_num_blocks(settings.kv_cache, geometry, max_model_len=max_model_len, free_bytes=free_bytes)
    kv_cache = KvCache(geometry, num_blocks, device)
    _logger.info(
        "KV cache: %d blocks of %d tokens, %.1f MiB of %.1f MiB free",
        num_blocks,
        geometry.block_size,
        num_blocks * geometry.bytes_per_block / 2**20,
        free_bytes / 2**20,
    )
    return kv_cache


def _free_bytes(device: torch.device, machine: Machine) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else machine.free_bytes


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


def _describe_model(
    settings: ModelSettings, config: ModelConfig, model: CausalLM, dtype: torch.dtype, loaded: LoadedWeights, max_model_len: int
) -> ModelDescription:
    return ModelDescription(
        name=settings.served_model_name or Path(settings.model).resolve().name,
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


def _describe_execution(device: torch.device, num_threads: int) -> ExecutionDescription:
    return ExecutionDescription(
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine(),
        optimization_level=0,
        graph_mode="NONE",
        captured=(),
        attention="native",
        num_threads=num_threads,
        tensor_parallel_size=1,
    )


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
