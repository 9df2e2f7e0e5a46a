"""The architectures that can be served, and how a checkpoint's directory becomes a model."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

from modelworker.ops.op_settings import OpSettings
from modelworker.worker.errors import CheckpointError, SettingsError
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.models.config import ModelConfig, Traits, parse_config, read_config_files
from modelworker.worker.models.llama import LlamaForCausalLM
from modelworker.worker.models.tensor_parallel import TensorParallel
from modelworker.worker.models.weight_part import divide, kv_heads_per_rank


class ModelClass(Protocol):
    """Makes a model from its configuration, without filling it."""

    def __call__(
        self, config: ModelConfig, *, max_model_len: int, dtype: torch.dtype, parallel: TensorParallel, ops: OpSettings
    ) -> CausalLM:
        """Makes the model."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Which class serves an architecture, and what is special about it."""

    model: ModelClass
    traits: Traits


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "LlamaForCausalLM": Architecture(LlamaForCausalLM, Traits(qkv_bias=None, o_bias=None, mlp_bias=None)),
        "MistralForCausalLM": Architecture(LlamaForCausalLM, Traits(window="all", default_window=4096)),
        "Qwen2ForCausalLM": Architecture(LlamaForCausalLM, Traits(qkv_bias=True, window="layers", default_window=4096)),
        "Qwen3ForCausalLM": Architecture(
            LlamaForCausalLM,
            Traits(qkv_bias=None, o_bias=None, qk_norm=True, head_dim=128, window="layers", default_window=4096),
        ),
    }
)


def load_model_config(directory: Path) -> ModelConfig:
    """Reads and checks config.json and generation_config.json of a Hugging Face model directory.

    Raises:
        CheckpointError: a file or field is missing, makes no sense, or asks for something that isn't supported.
    """
    fields, generation = read_config_files(directory)
    architecture = _architecture(fields.get("architectures"), fields.path)
    return parse_config(architecture, ARCHITECTURES[architecture].traits, fields, generation)


def _architecture(names: object, path: Path) -> str:
    supported = ", ".join(ARCHITECTURES)
    if not isinstance(names, list) or not names:
        raise CheckpointError(f"{path}: architectures: expected one of {supported}, found {names!r}")
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return name
    found = ", ".join(str(name) for name in names)
    raise CheckpointError(f"{path}: the architecture {found} is not supported; supported are {supported}")


def build_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    parallel: TensorParallel | None = None,
    max_model_len: int | None = None,
    ops: OpSettings | None = None,
) -> CausalLM:
    """Makes the model on the meta device: every shape, no memory.

    Args:
        config: of the model.
        dtype: in which it computes, float32 or bfloat16.
        parallel: this process's rank; None: the only one.
        max_model_len: positions that RoPE must know; None: `config.max_model_len`.
        ops: settings of its ops; None: the defaults of a CPU.

    Raises:
        SettingsError: the model can't be divided among so many ranks.
    """
    parallel = parallel or TensorParallel()
    _check_parallel(config, parallel)
    with torch.device("meta"):
        model = ARCHITECTURES[config.architecture].model(
            config, max_model_len=max_model_len or config.max_model_len, dtype=dtype, parallel=parallel, ops=ops or OpSettings()
        )
    return model.eval()


def _check_parallel(config: ModelConfig, parallel: TensorParallel) -> None:
    if not 0 <= parallel.rank < parallel.size:
        raise SettingsError(f"tensor-parallel rank {parallel.rank} is not in 0 .. {parallel.size - 1}")
    divide(config.num_heads, parallel.size, f"{config.architecture}: query heads")
    kv_heads_per_rank(config.num_kv_heads, parallel.size, config.architecture)
    divide(config.intermediate_size, parallel.size, f"{config.architecture}: intermediate_size")
