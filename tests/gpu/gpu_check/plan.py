"""What is measured: on a GPU of the size of an H200, or tiny, to see that the check itself works."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelworker.worker.step_bench import StepCase

BLOCK_SIZE = 32
# Measurements of each step, in each way.
ROUNDS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is measured, where.

    Attributes:
        device: the first of its kind.
        tiny: whether models are made so small that any machine runs them.
        output: the folder for results.
        cache: the folder for compiled code.
    """

    device: torch.device
    tiny: bool
    output: Path
    cache: Path

    @property
    def batches(self) -> tuple[int, ...]:
        """Numbers of sequences that decode."""
        return (1, 4) if self.tiny else (1, 16, 64, 256)

    @property
    def max_sequences(self) -> int:
        """Of a step."""
        return 64 if self.tiny else max(self.batches)

    @property
    def contexts(self) -> tuple[int, ...]:
        """Tokens of each sequence in the cache."""
        return (16, 64) if self.tiny else (128, 2048)

    @property
    def prompts(self) -> tuple[int, ...]:
        """Tokens of prompts."""
        return (32, 64) if self.tiny else (512, 4096)

    @property
    def max_model_len(self) -> int:
        """The longest sequence."""
        return max(*self.prompts, max(self.contexts) + 1)

    @property
    def table_tokens(self) -> tuple[int, ...]:
        """Tokens that block tables have room for: those of the longest sequence, and of one that a large model may have."""
        return self.max_model_len, 1024 if self.tiny else 131072

    @property
    def decodes(self) -> tuple[StepCase, ...]:
        """Steps of decode."""
        return tuple(
            StepCase(num_sequences=batch, query_len=1, context_len=context) for context in self.contexts for batch in self.batches
        )

    @property
    def prefills(self) -> tuple[StepCase, ...]:
        """Steps of one prompt."""
        return tuple(StepCase(num_sequences=1, query_len=tokens, context_len=0) for tokens in self.prompts)

    def model(self, name: str) -> Mapping[str, Any]:
        """Returns the config.json of a model of the size that its name says."""
        shape = _TINY if self.tiny else _SHAPES[name]
        return {**_COMMON, **shape, "max_position_embeddings": self.max_model_len}


_COMMON: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}
_TINY: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}
# SmolLM2-135M, Llama-3.2-1B and Llama-3.1-8B.
_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
    },
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
