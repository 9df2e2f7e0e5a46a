"""The model's configuration: what config.json and generation_config.json say, in one spelling and checked. Needs no torch."""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from modelworker.worker.errors import CheckpointError
from modelworker.worker.models.config_fields import Fields
from modelworker.worker.models.rope_config import RopeConfig, parse_rope

_logger = logging.getLogger(__name__)

_MAX_LAYERS = 4096
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """How an architecture differs from the plain Llama decoder.

    Attributes:
        qkv_bias: whether q, k and v have biases; None: config.json's `attention_bias` says so.
        o_bias: the same for the attention's output.
        mlp_bias: the same for the MLP; None: config.json's `mlp_bias`.
        qk_norm: whether each query and key head is normalised before RoPE.
        head_dim: of a config.json that doesn't say; None: hidden_size / num_attention_heads.
        window: which layers config.json's `sliding_window` concerns: none (the field is refused), all, or those that
            `layer_types`, or else `max_window_layers`, names and only with `use_sliding_window`.
        default_window: the window of a config.json that doesn't say.
    """

    qkv_bias: bool | None = False
    o_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: bool = False
    head_dim: int | None = None
    window: Literal["none", "all", "layers"] = "none"
    default_window: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only model, as the checkpoint's directory describes it.

    Attributes:
        architecture: the name in config.json, e.g. LlamaForCausalLM.
        vocab_size: rows of the embedding and of the head.
        max_position_embeddings: as config.json says; RoPE scaling may reach further, see `max_model_len`.
        windows: per layer, how many tokens a query may see, itself included; 0 = all.
        eos_token_ids: ascending, of config.json and generation_config.json together.
        dtype: in which the checkpoint was saved (float32, bfloat16, float16), or None where it doesn't say.
        digest: "sha256:..." over all the other fields, so independent of config.json's spelling.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    windows: tuple[int, ...]
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    digest: str = ""

    @property
    def max_model_len(self) -> int:
        """The longest sequence that the checkpoint is meant for: `max_position_embeddings`, or what yarn extends it to.

        For linear and dynamic scaling config.json does not say whether `max_position_embeddings` was counted before or after
        scaling, so it is taken as it stands.
        """
        return self.max_scaled_len if self.rope.rope_type == "yarn" else self.max_position_embeddings

    @property
    def max_scaled_len(self) -> int:
        """The longest sequence that RoPE scaling can be asked for: the original length times the factor, where there is one."""
        if self.rope.rope_type in ("linear", "dynamic", "yarn"):
            return max(self.max_position_embeddings, int(self.rope.original_max_position_embeddings * self.rope.factor))
        return self.max_position_embeddings


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds one object without repeated keys.

    Raises:
        CheckpointError: it can't be read, or is something else.
    """
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=_refuse_repeated_keys)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {repeated!r} stands there twice")
    return result


def read_config_files(directory: Path) -> tuple[Fields, Fields | None]:
    """Reads config.json, and generation_config.json where there is one.

    Raises:
        CheckpointError: the directory or config.json is missing or can't be read.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: is not a directory; expected one with config.json and *.safetensors")
    path = directory / "config.json"
    if not path.exists():
        raise CheckpointError(f"{path}: is missing")
    generation_path = directory / "generation_config.json"
    generation = Fields(generation_path, read_json_object(generation_path)) if generation_path.exists() else None
    return Fields(path, read_json_object(path)), generation


def parse_config(architecture: str, traits: Traits, fields: Fields, generation: Fields | None) -> ModelConfig:
    """Turns the two files into a ModelConfig.

    Raises:
        CheckpointError: a field is missing, has a value that makes no sense, or asks for something that isn't supported.
    """
    _refuse_unsupported(architecture, traits, fields)
    num_layers = fields.positive_int("num_hidden_layers")
    if num_layers > _MAX_LAYERS:
        raise fields.error("num_hidden_layers", num_layers, f"at most {_MAX_LAYERS}")
    num_heads = fields.positive_int("num_attention_heads")
    hidden_size = fields.positive_int("hidden_size")
    num_kv_heads = fields.positive_int("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
    head_dim = _head_dim(traits, fields, hidden_size, num_heads)
    vocab_size = fields.positive_int("vocab_size")
    max_position_embeddings = fields.positive_int("max_position_embeddings")
    attention_bias = fields.boolean("attention_bias", default=False)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.positive_int("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=fields.positive_number("rms_norm_eps"),
        qkv_bias=attention_bias if traits.qkv_bias is None else traits.qkv_bias,
        o_bias=attention_bias if traits.o_bias is None else traits.o_bias,
        mlp_bias=fields.boolean("mlp_bias", default=False) if traits.mlp_bias is None else traits.mlp_bias,
        qk_norm=traits.qk_norm,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
        windows=_windows(architecture, traits, fields, num_layers),
        rope=parse_rope(fields, max_position_embeddings, head_dim),
        eos_token_ids=_eos_token_ids(vocab_size, fields, generation),
        dtype=_dtype(fields),
    )
    return _with_digest(config)


def _with_digest(config: ModelConfig) -> ModelConfig:
    content = asdict(config)
    del content["digest"]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return replace(config, digest="sha256:" + hashlib.sha256(text.encode()).hexdigest())


def _refuse_unsupported(architecture: str, traits: Traits, fields: Fields) -> None:
    for name in ("quantization_config", "compression_config"):
        quantization = fields.get(name)
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
            raise CheckpointError(
                f"{fields.path}: {name}: quantized checkpoints are not supported, found {method or 'an unnamed method'!r}; "
                "expected one with float32, bfloat16 or float16 weights"
            )
    activation = fields.get("hidden_act")
    if activation not in (None, "silu"):
        raise CheckpointError(f"{fields.path}: hidden_act: the activation {activation!r} is not supported, only 'silu' is")
    for name, decided in (("attention_bias", traits.qkv_bias), ("mlp_bias", traits.mlp_bias)):
        if decided is False and fields.boolean(name, default=False):
            raise CheckpointError(f"{fields.path}: {name} is true, but {architecture} has no such bias")
    factor = fields.get("partial_rotary_factor")
    if factor not in (None, 1):
        raise CheckpointError(f"{fields.path}: partial_rotary_factor {factor!r} is not supported for {architecture}, only 1.0 is")


def _head_dim(traits: Traits, fields: Fields, hidden_size: int, num_heads: int) -> int:
    default = traits.head_dim
    if default is None and hidden_size % num_heads == 0:
        default = hidden_size // num_heads
    head_dim = fields.optional_positive_int("head_dim") or default
    if head_dim is None:
        raise fields.error("hidden_size", hidden_size, f"a multiple of num_attention_heads ({num_heads}), as there is no head_dim")
    if head_dim % 2:
        raise fields.error("head_dim", head_dim, "an even number, as RoPE rotates pairs")
    return head_dim


def _windows(architecture: str, traits: Traits, fields: Fields, num_layers: int) -> tuple[int, ...]:
    window = fields.optional_positive_int("sliding_window", absent=traits.default_window) or 0
    if traits.window == "layers" and not fields.boolean("use_sliding_window", default=False):
        window = 0
    if traits.window == "none":
        if window and fields.boolean("use_sliding_window", default=True):
            raise CheckpointError(f"{fields.path}: sliding_window is {window}, but {architecture} has no sliding window")
        window = 0
    layer_types = fields.get("layer_types")
    if layer_types is None:
        first = fields.non_negative_int("max_window_layers", default=28) if traits.window == "layers" else 0
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise fields.error("layer_types", layer_types, f"a list of {num_layers} entries, one per layer")
    known = ("full_attention", "sliding_attention")
    for layer, layer_type in enumerate(layer_types):
        if layer_type not in known:
            raise fields.error(f"layer_types[{layer}]", layer_type, " or ".join(known))
    windows = tuple(window if layer_type == "sliding_attention" else 0 for layer_type in layer_types)
    if "sliding_attention" in layer_types and not window:
        raise CheckpointError(f"{fields.path}: layer_types names sliding_attention, but there is no sliding_window to apply")
    if traits.window == "all" and window and 0 in windows:
        raise CheckpointError(
            f"{fields.path}: layer_types names full_attention, but sliding_window ({window}) concerns every layer of {architecture}"
        )
    return windows


def _eos_token_ids(vocab_size: int, *files: Fields | None) -> tuple[int, ...]:
    found = set()
    for fields in files:
        value = fields.get("eos_token_id") if fields else None
        if fields is None or value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise fields.error("eos_token_id", value, "an integer or a list of integers")
            if 0 <= token_id < vocab_size:
                found.add(token_id)
            else:
                _logger.warning(
                    "%s: eos_token_id %d is left out: the vocabulary's ids are 0 .. %d", fields.path, token_id, vocab_size - 1
                )
    return tuple(sorted(found))


def _dtype(fields: Fields) -> str | None:
    value = fields.either("dtype", "torch_dtype")
    if value is None:
        return None
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in _DTYPES:
        raise fields.error("dtype" if "dtype" in fields else "torch_dtype", value, " or ".join(_DTYPES))
    return str(name)
