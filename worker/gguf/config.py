"""The config of a llama-architecture GGUF file as config.json and generation_config.json."""

from dataclasses import dataclass
from typing import Any

from modelworker.worker.errors import CheckpointError
from modelworker.worker.gguf.file import GgufFile
from modelworker.worker.gguf.rope import rope_scaling

ARCHITECTURES = ("llama",)

# Every llama.* field that is understood here. One that isn't may change the arithmetic, so it is refused rather than dropped.
_UNDERSTOOD = frozenset(
    "llama." + key
    for key in (
        "attention.causal",
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "attention.sliding_window",
        "attention.value_length",
        "block_count",
        "context_length",
        "embedding_length",
        "expert_count",
        "expert_used_count",
        "feed_forward_length",
        "rope.dimension_count",
        "rope.freq_base",
        "rope.scale_linear",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_log_multiplier",
        "tensor_data_layout",
        "vocab_size",
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelGeometry:
    """The sizes of the model, and which optional tensors it has."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool


def read_geometry(file: GgufFile) -> ModelGeometry:
    """Reads the sizes.

    Raises:
        CheckpointError: another architecture, or a variant of llama that LlamaForCausalLM doesn't describe.
    """
    architecture = file.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise file.wrong("general.architecture", architecture, f"one of: {', '.join(ARCHITECTURES)}")
    unknown = sorted(key for key in file.keys() if key.startswith("llama.") and key not in _UNDERSTOOD)  # noqa: SIM118
    if unknown:
        raise CheckpointError(f"{file.path}: metadata that this importer doesn't know and won't ignore: {', '.join(unknown)}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path}: the tensor token_embd.weight is missing or not a matrix")
    hidden_size, num_heads = file.integer("llama.embedding_length"), file.integer("llama.attention.head_count")
    head_dim = file.integer("llama.attention.key_length", hidden_size // num_heads if num_heads > 0 else 0)
    geometry = ModelGeometry(
        num_layers=file.integer("llama.block_count"),
        hidden_size=hidden_size,
        intermediate_size=file.integer("llama.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=file.integer("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=int(embedding.shape[1]),
        tied="output.weight" not in file.tensors,
        attention_bias=any(".attn_" in name and name.endswith(".bias") for name in file.tensors),
        mlp_bias=any(".ffn_" in name and name.endswith(".bias") for name in file.tensors),
    )
    _check(file, geometry)
    return geometry


def _check(file: GgufFile, geometry: ModelGeometry) -> None:
    """Refuses what a LlamaForCausalLM can't be."""
    for key, value in (
        ("llama.block_count", geometry.num_layers),
        ("llama.embedding_length", geometry.hidden_size),
        ("llama.feed_forward_length", geometry.intermediate_size),
        ("llama.attention.head_count", geometry.num_heads),
        ("llama.attention.head_count_kv", geometry.num_kv_heads),
        ("llama.attention.key_length", geometry.head_dim),
    ):
        if value < 1:
            raise file.wrong(key, value, "at least 1")
    if geometry.num_heads % geometry.num_kv_heads:
        raise file.wrong("llama.attention.head_count_kv", geometry.num_kv_heads, f"a divisor of head_count, {geometry.num_heads}")
    if geometry.head_dim % 2:
        raise file.wrong("llama.attention.key_length", geometry.head_dim, "an even number: RoPE rotates pairs")
    for key, expected in (
        ("llama.attention.value_length", geometry.head_dim),
        ("llama.rope.dimension_count", geometry.head_dim),
        ("llama.vocab_size", geometry.vocab_size),
        ("llama.expert_count", 0),
    ):
        if (found := file.integer(key, expected)) != expected:
            raise file.wrong(key, found, str(expected))
    if not file.flag("llama.attention.causal", True):
        raise file.wrong("llama.attention.causal", False, "true")
    window, context = file.integer("llama.attention.sliding_window", 0), file.integer("llama.context_length")
    if 0 < window < context:
        raise file.wrong("llama.attention.sliding_window", window, f"0 or at least the context length, {context}")


def model_config(file: GgufFile, geometry: ModelGeometry, dtype: str) -> dict[str, Any]:
    """The content of config.json, in the spelling that every version of transformers reads."""
    theta = file.number("llama.rope.freq_base", 10000.0)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": geometry.hidden_size,
        "intermediate_size": geometry.intermediate_size,
        "num_hidden_layers": geometry.num_layers,
        "num_attention_heads": geometry.num_heads,
        "num_key_value_heads": geometry.num_kv_heads,
        "head_dim": geometry.head_dim,
        "vocab_size": geometry.vocab_size,
        "max_position_embeddings": file.integer("llama.context_length"),
        "rms_norm_eps": file.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": rope_scaling(file, theta=theta, head_dim=geometry.head_dim),
        "attention_bias": geometry.attention_bias,
        "mlp_bias": geometry.mlp_bias,
        "tie_word_embeddings": geometry.tied,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    stops = stop_token_ids(file)
    for key, value in (
        ("bos_token_id", special_token_id(file, "bos")),
        ("eos_token_id", stops[0] if len(stops) == 1 else stops),
        ("pad_token_id", special_token_id(file, "padding")),
    ):
        if value is not None and value != []:
            config[key] = value
    return config


def generation_config(file: GgufFile) -> dict[str, Any]:
    """The content of generation_config.json: which tokens start, end and pad a text."""
    config: dict[str, Any] = {}
    if (bos := special_token_id(file, "bos")) is not None:
        config["bos_token_id"] = bos
    if stops := stop_token_ids(file):
        config["eos_token_id"] = stops
    if (padding := special_token_id(file, "padding")) is not None:
        config["pad_token_id"] = padding
    return config


def special_token_id(file: GgufFile, role: str) -> int | None:
    """The id of the token with a role: bos, eos, eot, eom, padding, unknown; None when the file names none.

    Raises:
        CheckpointError: the id lies outside the vocabulary.
    """
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in file.keys():  # noqa: SIM118
        return None
    num_tokens = len(file.array("tokenizer.ggml.tokens", str))
    if not 0 <= (token_id := file.integer(key)) < num_tokens:
        raise file.wrong(key, token_id, f"a token id below {num_tokens}")
    return token_id


def stop_token_ids(file: GgufFile) -> list[int]:
    """The ids of the tokens that end a text or a turn, without duplicates."""
    ids = (special_token_id(file, role) for role in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))
