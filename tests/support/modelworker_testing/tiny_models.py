"""Small random checkpoints made by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from modelworker_testing.paged_runs import VOCAB_SIZE

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def make_reference(architecture: str = "LlamaForCausalLM", **config: Any) -> transformers.PreTrainedModel:
    """A random model of transformers, fp32, with weights large enough that every part of it matters to the logits."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "eos_token_id": 2,
        "attn_implementation": "eager",
        **config,
    }
    if values["head_dim"] is None:
        del values["head_dim"]
    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    model: transformers.PreTrainedModel = getattr(transformers, architecture)(config_class(**values)).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif "embed" in name or name.endswith("bias"):
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
    return model


def save_reference(directory: Path, architecture: str = "LlamaForCausalLM", **config: Any) -> transformers.PreTrainedModel:
    """Makes a random model of transformers and saves it."""
    model = make_reference(architecture, **config)
    model.save_pretrained(directory)
    return model


@torch.inference_mode()
def reference_logits(model: transformers.PreTrainedModel, prompt: Tensor) -> Tensor:
    """Logits [length, vocab_size] of one prompt, in one forward without a cache."""
    logits: Tensor = model(prompt[None], use_cache=False).logits[0]
    return logits
