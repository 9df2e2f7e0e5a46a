"""RoPE settings of a GGUF file in the words of a Hugging Face config."""

import math
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from modelworker.worker.errors import CheckpointError
from modelworker.worker.gguf.file import GgufFile

_PREFIX = "llama.rope.scaling"
_FACTORS = "rope_freqs.weight"


def rope_scaling(file: GgufFile, *, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The `rope_scaling` of config.json, None for plain RoPE.

    Raises:
        CheckpointError: a kind of scaling that has no exact counterpart.
    """
    # 0 stands for "not set" in both keys; a factor without a type means linear.
    factor = file.number(f"{_PREFIX}.factor", file.number("llama.rope.scale_linear", 1.0)) or 1.0
    kind = file.text(f"{_PREFIX}.type", "none" if factor == 1.0 else "linear")
    attention_factor = file.number(f"{_PREFIX}.attn_factor", 1.0)
    if kind != "yarn" and attention_factor != 1.0:
        raise file.wrong(f"{_PREFIX}.attn_factor", attention_factor, f"1.0 where {_PREFIX}.type is {kind}")
    if _FACTORS in file.tensors:
        if kind != "none":
            raise CheckpointError(f"{file.path}: {_FACTORS} together with {_PREFIX}.type {kind!r} has no counterpart in a config")
        return _llama3(file, theta=theta, head_dim=head_dim)
    if kind == "none":
        return None
    if factor < 0.0:
        raise file.wrong(f"{_PREFIX}.factor", factor, "a number above 0")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(file, factor, attention_factor)
    raise file.wrong(f"{_PREFIX}.type", kind, "none, linear or yarn")


def _yarn(file: GgufFile, factor: float, attention_factor: float) -> dict[str, Any]:
    """YaRN. The attention factor of a GGUF multiplies the usual 0.1 ln(factor) + 1, that of a config replaces it."""
    for key, neutral in (("yarn_ext_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if (found := file.number(f"{_PREFIX}.{key}", neutral)) != neutral:
            raise file.wrong(f"{_PREFIX}.{key}", found, f"{neutral}: other values have no counterpart in a config")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": file.integer(f"{_PREFIX}.original_context_length"),
        "beta_fast": file.number(f"{_PREFIX}.yarn_beta_fast", 32.0),
        "beta_slow": file.number(f"{_PREFIX}.yarn_beta_slow", 1.0),
    }
    if attention_factor != 1.0:
        scaling["attention_factor"] = attention_factor * (0.1 * math.log(factor) + 1.0)
    return scaling


def llama3_factors(
    *, theta: float, head_dim: int, factor: float, low: float, high: float, original_context: float
) -> npt.NDArray[np.float64]:
    """What each of the head_dim / 2 frequencies of plain RoPE is divided by under llama3 scaling.

    Source: `_compute_llama3_parameters` of transformers.
    """
    wavelength = 2.0 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = (original_context / wavelength - low) / (high - low)
    between = 1.0 / ((1.0 - smooth) / factor + smooth)
    factors = np.where(wavelength < original_context / high, 1.0, np.where(wavelength > original_context / low, factor, between))
    return np.asarray(factors)


def _llama3(file: GgufFile, *, theta: float, head_dim: int) -> dict[str, Any] | None:
    """Finds the parameters of llama3 scaling, of which a GGUF file only holds the resulting factors."""
    tensor = file.tensors[_FACTORS]
    stored = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float64).reshape(-1)
    if stored.size != head_dim // 2:
        raise CheckpointError(
            f"{file.path}: {_FACTORS}: found {stored.size} factors, expected {head_dim // 2}, half of the head_dim"
        )
    if np.allclose(stored, 1.0, rtol=1e-6, atol=0.0):
        return None
    factor = shortest_number(float(stored.max()))
    candidates = [(1.0, 4.0, 8192.0), *_fit(stored, theta=theta, head_dim=head_dim, factor=factor)]
    for low, high, original_context in candidates:
        rebuilt = llama3_factors(
            theta=theta, head_dim=head_dim, factor=factor, low=low, high=high, original_context=original_context
        )
        if np.allclose(rebuilt, stored, rtol=1e-5, atol=0.0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": int(original_context),
            }
    raise CheckpointError(f"{file.path}: {_FACTORS} holds factors that llama3 scaling can't produce: {stored.tolist()}")


def _fit(stored: npt.NDArray[np.float64], *, theta: float, head_dim: int, factor: float) -> list[tuple[float, float, float]]:
    """Solves the smooth part for its parameters, with the low factor taken as 1: only their ratios can be told from the factors."""
    wavelength = 2.0 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    between = (stored > 1.0 + 1e-6) & (stored < factor * (1.0 - 1e-6))
    if np.count_nonzero(between) < 2:
        return []
    smooth = (1.0 / stored[between] - 1.0 / factor) / (1.0 - 1.0 / factor)
    slope, offset = np.polyfit(1.0 / wavelength[between], smooth, 1)
    if offset >= 0.0 or slope <= 0.0:
        return []
    high = 1.0 - 1.0 / float(offset)
    return [(1.0, shortest_number(high), float(round(float(slope) * (high - 1.0))))]


def shortest_number(value: float) -> float:
    """Rounds to five significant digits: what a person would have written into a config."""
    return float(f"{value:.5g}")
