"""RoPE's part of config.json in all its spellings. Needs no torch."""

import logging
from dataclasses import dataclass
from typing import Literal, cast, get_args

from modelworker.worker.errors import CheckpointError
from modelworker.worker.models.config_fields import Fields

_logger = logging.getLogger(__name__)

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]

_BASE_KEYS = frozenset({"rope_theta", "rope_type", "type", "partial_rotary_factor"})
_YARN_KEYS = frozenset({"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"})
_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}) | _YARN_KEYS,
}
# Keys that are known to mean nothing for the type in question: they belong to another type, or say how the model was trained.
_IGNORED_KEYS = frozenset().union(*_KEYS.values()) | {"finetuned"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeConfig:
    """Rotary position embedding. Fields that a type doesn't use have their neutral value.

    Attributes:
        original_max_position_embeddings: the length that the model was pretrained with, before scaling.
        attention_factor: yarn's factor on cos and sin; None: derived from `factor`, `mscale` and `mscale_all_dim`.
        truncate: whether yarn rounds its correction range to whole dimensions.
    """

    rope_type: RopeType = "default"
    theta: float = 10000.0
    original_max_position_embeddings: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def parse_rope(fields: Fields, max_position_embeddings: int, head_dim: int) -> RopeConfig:
    """Reads RoPE's parameters.

    `rope_theta` beside `rope_scaling` and the newer `rope_parameters` that holds both; `type` and the newer `rope_type`.

    Raises:
        CheckpointError: the type is unknown, a parameter is missing, or two spellings contradict each other.
    """
    parameters = _parameters(fields)
    rope_type = _rope_type(parameters)
    theta = _theta(fields, parameters)
    original = _original_length(fields, parameters, max_position_embeddings, rope_type)
    if rope_type == "default":
        return RopeConfig(theta=theta, original_max_position_embeddings=original)
    if rope_type == "yarn" and "factor" not in parameters:
        factor = max_position_embeddings / original
    else:
        factor = parameters.positive_number("factor", at_least=1.0)
    if rope_type == "llama3":
        low = parameters.positive_number("low_freq_factor")
        high = parameters.positive_number("high_freq_factor")
        if high <= low:
            raise parameters.error("high_freq_factor", high, f"a number above low_freq_factor ({low:g})")
        return RopeConfig(
            rope_type=rope_type,
            theta=theta,
            original_max_position_embeddings=original,
            factor=factor,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if rope_type == "yarn":
        return _yarn(parameters, theta, original, factor)
    if rope_type == "dynamic" and head_dim == 2:
        raise fields.error("head_dim", head_dim, "at least 4 for dynamic RoPE")
    return RopeConfig(rope_type=rope_type, theta=theta, original_max_position_embeddings=original, factor=factor)


def _yarn(parameters: Fields, theta: float, original: int, factor: float) -> RopeConfig:
    def optional(name: str) -> float | None:
        return parameters.positive_number(name) if name in parameters else None

    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        original_max_position_embeddings=original,
        factor=factor,
        attention_factor=optional("attention_factor"),
        beta_fast=parameters.positive_number("beta_fast", default=32.0),
        beta_slow=parameters.positive_number("beta_slow", default=1.0),
        mscale=parameters.get("mscale") and optional("mscale"),
        mscale_all_dim=parameters.get("mscale_all_dim") and optional("mscale_all_dim"),
        truncate=parameters.boolean("truncate", default=True),
    )


def _parameters(fields: Fields) -> Fields:
    """The one object that holds RoPE's parameters; empty where there is none."""
    old, new = fields.nested("rope_scaling"), fields.nested("rope_parameters")
    if old is not None and new is not None and _comparable(old) != _comparable(new):
        raise CheckpointError(f"{fields.path}: rope_scaling and rope_parameters contradict each other; expected one of them")
    parameters = new or old or Fields(fields.path, {}, prefix="rope_parameters.")
    for name in parameters.names():
        if isinstance(parameters.get(name), dict):
            raise CheckpointError(f"{fields.path}: rope_parameters.{name}: RoPE parameters per layer type are not supported")
    return parameters


def _comparable(parameters: Fields) -> dict[str, object]:
    values = {name: parameters.get(name) for name in parameters.names() if name not in ("type", "rope_theta")}
    values["rope_type"] = parameters.either("rope_type", "type") or "default"
    return values


def _rope_type(parameters: Fields) -> RopeType:
    name = parameters.either("rope_type", "type")
    if name is None:
        if set(parameters.names()) - _BASE_KEYS:
            raise parameters.error("rope_type", None, f"one of {', '.join(get_args(RopeType))}")
        name = "default"
    if name not in get_args(RopeType):
        raise parameters.error("rope_type", name, f"one of {', '.join(get_args(RopeType))}")
    for key in parameters.names():
        if key in _BASE_KEYS or key in _KEYS[name]:
            continue
        if key not in _IGNORED_KEYS:
            raise parameters.error(key, parameters.get(key), f"no such parameter for the rope_type {name!r}")
        _logger.warning("%s: the RoPE parameter %s has no meaning for the rope_type %s", parameters.path, key, name)
    if parameters.get("partial_rotary_factor") not in (None, 1):
        raise parameters.error("partial_rotary_factor", parameters.get("partial_rotary_factor"), "1.0")
    return cast(RopeType, name)


def _theta(fields: Fields, parameters: Fields) -> float:
    theta = parameters.positive_number("rope_theta", default=fields.positive_number("rope_theta", default=10000.0))
    if "rope_theta" in fields and fields.positive_number("rope_theta") != theta:
        raise CheckpointError(
            f"{fields.path}: rope_theta ({fields.get('rope_theta')!r}) and rope_parameters.rope_theta ({theta!r}) contradict "
            "each other"
        )
    return theta


def _original_length(fields: Fields, parameters: Fields, max_position_embeddings: int, rope_type: RopeType) -> int:
    """Only llama3 and yarn know an original length of their own; for the others it is what config.json declares."""
    if rope_type not in ("llama3", "yarn"):
        return max_position_embeddings
    name = "original_max_position_embeddings"
    original = parameters.positive_int(name, default=fields.positive_int(name, default=max_position_embeddings))
    if name in fields and fields.positive_int(name) != original:
        raise CheckpointError(
            f"{fields.path}: {name} ({fields.get(name)!r}) and rope_parameters.{name} ({original}) contradict each other"
        )
    return original
