"""What the doctor checks of device and model. Uses what `startup` uses, up to the point where weights would be read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from modelworker.ops.cpu.isa import cpu_flags, usable_levels
from modelworker.ops.cpu.threads import torch_threads
from modelworker.ops.op_settings import OpSettings
from modelworker.ops.triton_library import TritonLibrary
from modelworker.worker.cpu_kernels import CpuKernels, choose_isa
from modelworker.worker.errors import SetupError
from modelworker.worker.examination import Examination, Found, Outcome, Status
from modelworker.worker.execution_plan import plan_execution
from modelworker.worker.machine import read_machine
from modelworker.worker.memory_budget import graph_bytes
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.models.checkpoint import Checkpoint
from modelworker.worker.models.config import ModelConfig, read_json_object
from modelworker.worker.models.registry import build_model, load_model_config
from modelworker.worker.models.weights import match_weights
from modelworker.worker.op_plan import plan_ops
from modelworker.worker.plan import (
    DtypeChoice,
    KvCachePlan,
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
from modelworker.worker.self_check import check_products
from modelworker.worker.settings import DeviceSettings, ModelSettings, OpsSettings, StepSettings, WorkerSettings
from modelworker.worker.terminal import format_bytes


def examine_model(examination: Examination, settings: WorkerSettings, directory: Outcome[Path], threads: Outcome[int]) -> None:
    """Adds the checks of device and model.

    Args:
        examination: receives them.
        settings: of the worker.
        directory: of the model.
        threads: that would compute.
    """
    check = examination.check
    device = check("device", lambda: _device(settings.device))
    config = check("config", lambda: _config(directory.value))
    check("tokenizer", lambda: _tokenizer(directory.value, config.value))
    dtype = check("dtype", lambda: _dtype(settings.model, config.value, device.value, threads.value))
    check("products", lambda: Found(value=None, text=check_products(dtype.value.dtype, device.value)))
    max_model_len = check("max_model_len", lambda: _max_model_len(settings.model, config.value))
    # Shapes do not depend on the type, so that files are held against the model even where no type could be chosen.
    ops = check("ops", lambda: _ops(settings.ops, device.value))
    model = check(
        "model",
        lambda: _model(config.value, dtype.value.dtype if dtype.is_known else torch.float32, ops.value if ops.is_known else None),
    )
    checkpoint = check("files", lambda: _files(directory.value))
    check("weights", lambda: _weights(model.value, checkpoint.value))
    triton = ops.value.triton if ops.is_known else None
    left = check(
        "memory",
        lambda: _memory(settings, config.value, model.value, dtype.value, device.value, triton),
        advice="use a machine, or a limit, with more memory",
    )
    plan = check("kv_cache", lambda: _kv_cache(settings, config.value, dtype.value, max_model_len.value, left.value))
    check("step_memory", lambda: _step_memory(settings.step, config.value, max_model_len.value, plan.value, left.value, triton))


def _device(settings: DeviceSettings) -> Found[torch.device]:
    device = choose_device(settings)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return Found(value=device, text=f"{device}: {name}, CUDA {torch.version.cuda}, {settings.device} was asked for")
    if torch.version.cuda is None:
        reason = "torch is built without CUDA"
    else:
        reason = f"torch is built for CUDA {torch.version.cuda}, a GPU {'can' if torch.cuda.is_available() else 'can not'} be used"
    return Found(value=device, text=f"cpu, {settings.device} was asked for; {reason}")


def _config(directory: Path) -> Found[ModelConfig]:
    config = load_model_config(directory)
    text = (
        f"{config.architecture}: {config.num_layers} layers, hidden size {config.hidden_size}, {config.num_heads} query and "
        f"{config.num_kv_heads} KV heads of size {config.head_dim}, vocabulary {config.vocab_size:,}"
    )
    if config.eos_token_ids:
        return Found(value=config, text=text)
    return Found(
        value=config,
        text=f"{text}; no eos_token_id",
        status=Status.WARNING,
        advice="a router must know by itself where texts end: add eos_token_id to generation_config.json",
    )


def _tokenizer(directory: Path, config: ModelConfig) -> Found[None]:
    """The worker itself needs none: a missing or wrong one is no reason not to start."""
    path = directory / "tokenizer.json"
    if not path.exists():
        advice = "the worker needs none; give `modelworker generate` one with --tokenizer DIR"
        return Found(value=None, text=f"{path.name} is missing", status=Status.WARNING, advice=advice)
    advice = "the worker needs none, but texts would be wrong: take the tokenizer that belongs to the model"
    try:
        largest = max(_token_ids(read_json_object(path)), default=-1)
    except (SetupError, TypeError, AttributeError, KeyError) as error:
        return Found(value=None, text=f"{path.name} can't be read: {error}", status=Status.WARNING, advice=advice)
    if largest < config.vocab_size:
        return Found(value=None, text=f"{path.name}, ids up to {largest:,}")
    text = f"{path.name} has ids up to {largest:,}, but the model's vocabulary ends at {config.vocab_size - 1:,}"
    return Found(value=None, text=text, status=Status.WARNING, advice=advice)


def _token_ids(tokenizer: dict[str, Any]) -> Iterator[int]:
    """Yields the ids in a tokenizer.json, whose vocabulary is an object of ids, or a list of tokens by id."""
    vocabulary = tokenizer["model"]["vocab"]
    yield from vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    yield from (token["id"] for token in tokenizer.get("added_tokens", ()))


def _dtype(settings: ModelSettings, config: ModelConfig, device: torch.device, num_threads: int) -> Found[DtypeChoice]:
    with torch_threads(num_threads):
        choice = choose_dtype(settings, config, measure_products(device))
    text = f"{choice.name}: {choice.reason}"
    if not choice.degradations:
        return Found(value=choice, text=text)
    messages = "; ".join(degradation.message for degradation in choice.degradations)
    return Found(value=choice, text=f"{text}; {messages}", status=Status.WARNING)


def _max_model_len(settings: ModelSettings, config: ModelConfig) -> Found[int]:
    length = choose_max_model_len(settings, config)
    return Found(value=length, text=f"{length:,} tokens; the model was made for {config.max_scaled_len:,}")


def _ops(settings: OpsSettings, device: torch.device) -> Found[OpSettings]:
    choose_isa(settings, usable_levels(cpu_flags()))
    ops = plan_ops(settings, device, CpuKernels(missing="the C++ kernels are compiled at the start"), compiles=False)
    return Found(value=ops, text=f"custom_ops is {' '.join(ops.custom_ops)}; plug-ins are loaded")


def _model(config: ModelConfig, dtype: torch.dtype, ops: OpSettings | None) -> Found[CausalLM]:
    model = build_model(config, dtype=dtype, ops=ops)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    tied = ", head tied to the embedding" if model.has_tied_head else ""
    return Found(value=model, text=f"{num_parameters / 1e6:,.1f} million parameters{tied}")


def _files(directory: Path) -> Found[Checkpoint]:
    checkpoint = Checkpoint.open(directory)
    entries = checkpoint.tensors.values()
    num_files = len({entry.path for entry in entries})
    dtypes = ", ".join(sorted({entry.dtype for entry in entries}))
    files = f"{checkpoint.source.name} and {num_files} files" if num_files > 1 else checkpoint.source.name
    text = f"{files}: {len(entries)} tensors, {format_bytes(checkpoint.num_bytes)} of {dtypes}; only headers were read"
    return Found(value=checkpoint, text=text)


def _weights(model: CausalLM, checkpoint: Checkpoint) -> Found[None]:
    # Whether a head beside a tied embedding is equal to it shows only when both are read.
    _, slots = match_weights(model, checkpoint, compare_heads=False)
    return Found(value=None, text=f"all {len(slots)} tensors that the model needs are there, in the right shapes")


def _memory(
    settings: WorkerSettings,
    config: ModelConfig,
    model: CausalLM,
    dtype: DtypeChoice,
    device: torch.device,
    triton: TritonLibrary | None,
) -> Found[int]:
    """Finds out what is left for the KV cache and steps once the weights are loaded, in the type that was chosen."""
    needed_bytes, free_bytes = weights_bytes(model), free_bytes_of(device, read_machine())
    check_weights_fit(needed_bytes, free_bytes)
    graphs = plan_execution(settings.execution, settings.step).graphs
    for_graphs = graph_bytes(graphs, config, dtype=dtype.dtype, device=device, triton=triton)
    text = f"weights in {dtype.name} take {format_bytes(needed_bytes)} of {format_bytes(free_bytes)} free"
    if for_graphs:
        text += f", graphs at most about {format_bytes(for_graphs)}"
    return Found(value=free_bytes - needed_bytes - for_graphs, text=text)


def _kv_cache(
    settings: WorkerSettings, config: ModelConfig, dtype: DtypeChoice, max_model_len: int, free_bytes: int
) -> Found[KvCachePlan]:
    plan = plan_kv_cache(settings, config, dtype=dtype.dtype, max_model_len=max_model_len, free_bytes=free_bytes)
    tokens = (plan.num_blocks - 1) * plan.geometry.block_size
    text = (
        f"{plan.num_blocks:,} blocks of {plan.geometry.block_size} tokens, {format_bytes(plan.num_bytes)} of "
        f"{format_bytes(free_bytes)} that are left; {tokens:,} tokens, {tokens / max_model_len:.1f} longest sequences"
    )
    return Found(value=plan, text=text)


def _step_memory(
    settings: StepSettings,
    config: ModelConfig,
    max_model_len: int,
    plan: KvCachePlan,
    free_bytes: int,
    triton: TritonLibrary | None,
) -> Found[None]:
    largest = step_bytes(settings, config, dtype=plan.geometry.dtype, max_model_len=max_model_len, triton=triton)
    left = free_bytes - plan.num_bytes
    degradations = judge_memory(largest, left)
    if degradations:
        return Found(value=None, text=degradations[0].message, status=Status.WARNING)
    return Found(value=None, text=f"the largest step takes at most {format_bytes(largest)} of {format_bytes(left)} left")
