"""Small checkpoints: random ones, and ones whose logits are known."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


def llama_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random weights under the names of a Hugging Face checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]

    def random(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    tensors = {
        "model.embed_tokens.weight": random(config["vocab_size"], hidden) * math.sqrt(hidden),
        "model.norm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
        "lm_head.weight": random(config["vocab_size"], hidden) * 3,
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (query, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, query), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        tensors |= {f"{prefix}{name}.weight": random(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    return tensors


def save_checkpoint(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def save_tiny(directory: Path, seed: int = 0, **changes: Any) -> Path:
    """A random tiny Llama."""
    config = TINY | changes
    return save_checkpoint(directory, config, llama_tensors(config, seed))


def random_table(seed: int, *, vocab_size: int = TINY["vocab_size"], scale: float = 3.0) -> Tensor:
    """Random logits after each token: [vocab_size, vocab_size], fp32."""
    return torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def save_table_model(directory: Path, wanted: Tensor, *, poisoned_tokens: tuple[int, ...] = (), **changes: Any) -> Path:
    """A Llama whose logits after token t are exactly `wanted[t]`, whatever stands before it.

    Layers add nothing (their output projections are zero), and the embedding of t is the t-th unit vector, which the final norm
    turns into sqrt(hidden) times itself. After a poisoned token the logits are NaN.

    Args:
        directory: where it is written.
        wanted: [vocab_size, vocab_size], fp32.
        poisoned_tokens: whose embeddings are NaN.
        changes: of the config.
    """
    vocab_size = len(wanted)
    hidden = 128
    config = TINY | {"hidden_size": hidden, "vocab_size": vocab_size, "rms_norm_eps": 1e-12} | changes
    tensors = llama_tensors(config)
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name].zero_()
    tensors["model.embed_tokens.weight"] = torch.eye(vocab_size, hidden)
    tensors["model.embed_tokens.weight"][list(poisoned_tokens)] = math.nan
    tensors["model.norm.weight"] = torch.ones(hidden)
    tensors["lm_head.weight"] = torch.nn.functional.pad(wanted.T / math.sqrt(hidden), (0, hidden - vocab_size))
    return save_checkpoint(directory, config, tensors)
