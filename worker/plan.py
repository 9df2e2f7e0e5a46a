"""What is decided before anything is loaded: device, dtype, lengths and sizes. `startup` acts on it, the doctor reports it."""

import time
from dataclasses import dataclass

import torch
from torch import nn

from modelworker.ops.triton_library import TritonLibrary
from modelworker.worker.description import Degradation
from modelworker.worker.errors import SettingsError
from modelworker.worker.kv_cache import KvCacheGeometry, choose_num_blocks
from modelworker.worker.machine import Machine
from modelworker.worker.models.config import ModelConfig
from modelworker.worker.sampling import ROWS_AT_ONCE
from modelworker.worker.setting_values import MAX_TABLE_SIZE
from modelworker.worker.settings import DeviceSettings, ModelSettings, StepSettings, WorkerSettings
from modelworker.worker.terminal import format_bytes

_MAX_FEEDBACK_BYTES = 2**30
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.bfloat16}
_PRODUCT_ROUNDS = 5
# Where bfloat16 is emulated, one product can take seconds: then one tells enough.
_PRODUCT_SECONDS = 0.5

# What the plain ops hold at once, for `step_bytes`. Attention scores 256 queries against 2048 tokens at a time, or decodes against
# 16384 tokens of all their contexts, and keeps the scores three times; sampling with every filter on keeps 80 bytes a logit, those
# of the first rows included: 81 were measured where filters reach far in every row.
_QUERIES_AT_ONCE = 256
_TOKENS_AT_ONCE = 2048
_DECODED_TOKENS_AT_ONCE = 16384
_BYTES_PER_SCORE = 12
_BYTES_PER_LOGIT = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductTimes:
    """How long a product of 512 x 512 takes on a device."""

    bfloat16_ms: float
    float32_ms: float

    def __str__(self) -> str:
        return f"a product of 512 x 512 takes {self.bfloat16_ms:.2f} ms in bfloat16 and {self.float32_ms:.2f} ms in float32"


@dataclass(frozen=True, kw_only=True, slots=True)
class DtypeChoice:
    """The type in which the model computes, why, and what is not as it should be."""

    dtype: torch.dtype
    reason: str
    degradations: tuple[Degradation, ...]

    @property
    def name(self) -> str:
        """E.g. bfloat16."""
        return str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True, slots=True)
class KvCachePlan:
    """Size of the KV cache."""

    geometry: KvCacheGeometry
    num_blocks: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.geometry.bytes_per_block


def choose_device(settings: DeviceSettings) -> torch.device:
    """Resolves --device.

    Raises:
        SettingsError: a GPU is asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if settings.device == "cuda" and not has_cuda:
        raise SettingsError("--device cuda: no CUDA device can be used on this machine; use --device cpu or auto")
    return torch.device("cuda", 0) if has_cuda and settings.device != "cpu" else torch.device("cpu")


def measure_products(device: torch.device) -> ProductTimes:
    """Measures products in both types, with the threads that torch is set to."""
    return ProductTimes(bfloat16_ms=_product_ms(torch.bfloat16, device), float32_ms=_product_ms(torch.float32, device))


def _product_ms(dtype: torch.dtype, device: torch.device) -> float:
    matrix = torch.ones(512, 512, dtype=dtype, device=device)
    best = float("inf")
    end = time.perf_counter() + _PRODUCT_SECONDS
    for _ in range(_PRODUCT_ROUNDS):
        begun = time.perf_counter()
        # Reading an element back waits for the device.
        (matrix @ matrix)[0, 0].item()
        best = min(best, time.perf_counter() - begun)
        if time.perf_counter() > end:
            break
    return best * 1000


def choose_dtype(settings: ModelSettings, config: ModelConfig, products: ProductTimes) -> DtypeChoice:
    """Resolves --dtype: the checkpoint's type, unless this machine computes bfloat16 slower than float32.

    Checkpoints in float16 are served in bfloat16, which has float32's range but keeps three bits less of each weight.
    """
    wanted = (config.dtype or "float32") if settings.dtype == "auto" else settings.dtype
    if settings.dtype != "auto":
        reason = f"--dtype {settings.dtype}"
    elif config.dtype is None:
        reason = "config.json names no dtype"
    else:
        reason = f"the checkpoint is in {config.dtype}"
    dtype, degradations = _DTYPES[wanted], []
    if dtype == torch.bfloat16 and products.bfloat16_ms > products.float32_ms:
        if settings.dtype == "auto":
            dtype, message = torch.float32, "computing in float32"
        else:
            message = "--dtype float32 would be faster"
        degradations.append(Degradation(reason="bfloat16_slow", message=f"{products} on this machine: {message}"))
    if wanted == "float16" and dtype == torch.bfloat16:
        message = "float16 weights are rounded to bfloat16, which keeps three bits less of each; --dtype float32 keeps them all"
        degradations.append(Degradation(reason="float16_rounded", message=message))
    return DtypeChoice(dtype=dtype, reason=f"{reason}; {products}", degradations=tuple(degradations))


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


def choose_feedback_capacity(settings: WorkerSettings) -> int:
    """Resolves --max-feedback-sequences: a router keeps some sequences beside those of a step.

    Raises:
        SettingsError: the table would take more than 1 GiB, for each sequence may have as many tokens in it as steps are in flight.
    """
    given, num_tokens = settings.feedback.max_feedback_sequences, settings.fencing.max_steps_in_flight
    num_sequences = min(4 * settings.step.max_sequences, MAX_TABLE_SIZE) if given is None else given
    if 4 * num_sequences * num_tokens > _MAX_FEEDBACK_BYTES:
        raise SettingsError(
            f"the tokens of {num_sequences} sequences with {num_tokens} each would take more than 1 GiB: lower "
            "--max-feedback-sequences or --max-steps-in-flight"
        )
    return num_sequences


def free_bytes_of(device: torch.device, machine: Machine) -> int:
    """Returns the memory that can still be used where the model computes."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else machine.free_bytes


def weights_bytes(model: nn.Module) -> int:
    """Returns what the parameters take once they are loaded, a tied head counted once. They may be on the meta device."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def check_weights_fit(needed_bytes: int, free_bytes: int) -> None:
    """Refuses a model that would not fit, before the system ends the process in the middle of loading.

    Raises:
        SettingsError: the weights are larger than the free memory.
    """
    if needed_bytes > free_bytes:
        raise SettingsError(f"the weights need {needed_bytes} bytes, but only {free_bytes} are free")


def plan_kv_cache(
    settings: WorkerSettings, config: ModelConfig, *, dtype: torch.dtype, max_model_len: int, free_bytes: int
) -> KvCachePlan:
    """Sizes the KV cache.

    Args:
        settings: of the worker.
        config: of the model.
        dtype: of keys and values.
        max_model_len: a sequence of this length must fit.
        free_bytes: memory that is free once the model is loaded.

    Raises:
        SettingsError: the cache would be larger than the free memory, or hold less than one sequence.
    """
    geometry = KvCacheGeometry(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=settings.kv_cache.block_size,
        dtype=dtype,
    )
    num_blocks = choose_num_blocks(settings.kv_cache, geometry, max_model_len=max_model_len, free_bytes=free_bytes)
    return KvCachePlan(geometry=geometry, num_blocks=num_blocks)


def step_bytes(
    settings: StepSettings, config: ModelConfig, *, dtype: torch.dtype, max_model_len: int, triton: TritonLibrary | None
) -> int:
    """Estimates, rather too high than too low, what the largest step takes beside weights and KV cache.

    The largest is one of `max_tokens_per_step` new tokens, a sequence of `max_model_len`, and `max_sequences` rows. As drafts, or
    where logprobs of prompts are asked for, all tokens may be positions with logits. Where Triton is loaded, its attention has
    partial results; which attention runs is not known here, so the larger need counts. Its drawing of tokens adds 9 bytes a row.
    """
    tokens, rows = settings.max_tokens_per_step, min(settings.max_sequences, settings.max_tokens_per_step)
    cached = 2 * config.num_kv_heads * config.head_dim * (2 * dtype.itemsize + 4)
    scores = min(tokens, _QUERIES_AT_ONCE) * config.num_heads * _BYTES_PER_SCORE
    prefill = min(max_model_len, _TOKENS_AT_ONCE) * (cached + scores)
    decode = min(_DECODED_TOKENS_AT_ONCE, rows * max_model_len) * (cached + config.num_heads * _BYTES_PER_SCORE)
    sampling = _stream_bytes(tokens, config, dtype) + min(tokens, ROWS_AT_ONCE) * config.vocab_size * _BYTES_PER_LOGIT
    heads = {"num_heads": config.num_heads, "head_dim": config.head_dim}
    attention = max(prefill, decode, triton.attention_workspace_bytes(tokens, **heads) if triton is not None else 0)
    return max(activation_bytes(tokens, config, dtype=dtype, attention_bytes=attention), sampling)


def activation_bytes(num_tokens: int, config: ModelConfig, *, dtype: torch.dtype, attention_bytes: int = 0) -> int:
    """Estimates, rather too high than too low, what a layer holds at once, with what its attention takes beside it."""
    item = dtype.itemsize
    # gate | up, the same in fp32, silu(gate), the product, and that rounded.
    mlp = num_tokens * config.intermediate_size * (3 * item + 16)
    heads = config.num_heads + 2 * config.num_kv_heads
    projected = num_tokens * config.head_dim * (heads * (item + 12) + config.num_heads * item)
    return _stream_bytes(num_tokens, config, dtype) + max(mlp, projected + attention_bytes)


def _stream_bytes(num_tokens: int, config: ModelConfig, dtype: torch.dtype) -> int:
    """Residual, input and output in the model's type; the norm's sum, its square and its result in fp32."""
    return num_tokens * config.hidden_size * (3 * dtype.itemsize + 12)


def judge_memory(largest_step_bytes: int, free_bytes: int) -> tuple[Degradation, ...]:
    """Says whether the largest step fits into what weights and KV cache leave free."""
    if largest_step_bytes <= free_bytes:
        return ()
    message = (
        f"the largest step may take {format_bytes(largest_step_bytes)}, but weights and KV cache leave "
        f"{format_bytes(max(free_bytes, 0))}: lower --max-model-len, --max-tokens-per-step, --max-sequences or --kv-cache-memory"
    )
    return (Degradation(reason="memory_tight", message=message),)
