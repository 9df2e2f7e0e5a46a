"""What a worker says of itself, from what start-up found."""

from collections.abc import Mapping
from pathlib import Path

import torch

from modelworker.ops.attention import PagedAttention
from modelworker.worker.decoder_setup import ReadyDecoder
from modelworker.worker.description import ExecutionDescription, ModelDescription, StepLimits
from modelworker.worker.machine import read_cpu
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.models.config import ModelConfig
from modelworker.worker.models.weights import LoadedWeights
from modelworker.worker.plan import choose_feedback_capacity
from modelworker.worker.settings import ModelSettings, WorkerSettings
from modelworker.worker.versions import installed_versions


def describe_limits(settings: WorkerSettings) -> StepLimits:
    """Says what a step, a message and the queue may be at most."""
    return StepLimits(
        max_sequences=settings.step.max_sequences,
        max_tokens_per_step=settings.step.max_tokens_per_step,
        max_steps_in_flight=settings.fencing.max_steps_in_flight,
        max_message_bytes=settings.server.max_message_size,
        max_feedback_sequences=choose_feedback_capacity(settings),
        lease_idle_ms=round(settings.fencing.lease_idle_seconds * 1000),
        max_replays=settings.fencing.max_replays,
    )


def _printable(name: str) -> str:
    """A name that can be sent: bytes of a directory's name that are no UTF-8 are spelled out."""
    return name.encode("utf-8", "backslashreplace").decode()


def describe_model(
    settings: ModelSettings, config: ModelConfig, model: CausalLM, dtype: torch.dtype, loaded: LoadedWeights, max_model_len: int
) -> ModelDescription:
    """Says which model is served."""
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


def describe_execution(device: torch.device, num_threads: int, model: CausalLM, decoder: ReadyDecoder) -> ExecutionDescription:
    """Says where and how steps run."""
    return ExecutionDescription(
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else read_cpu().name,
        optimization_level=decoder.optimization_level,
        graph_mode=decoder.graph_mode,
        captured=decoder.captured,
        attention=_attention_in_use(model),
        num_threads=num_threads,
        tensor_parallel_size=1,
    )


def _attention_in_use(model: CausalLM) -> str:
    return ", ".join(sorted({module.choice.implementation for module in model.modules() if isinstance(module, PagedAttention)}))


def describe_versions(device: torch.device) -> Mapping[str, str]:
    """Says what is installed."""
    cuda = {"cuda": torch.version.cuda} if device.type == "cuda" and torch.version.cuda else {}
    return {**installed_versions(), **cuda}
