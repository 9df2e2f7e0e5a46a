"""RoPE's frequencies and tables against transformers, and their precision."""

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from modelworker.ops.cpu.packing import WeightArena
from modelworker.worker.models.causal_lm import AttentionMetadata
from modelworker.worker.models.rope import (
    DynamicRotaryEmbedding,
    TableRotaryEmbedding,
    attention_factor,
    inverse_frequencies,
    make_rotary_embedding,
)
from modelworker.worker.models.rope_config import RopeConfig


def reference(parameters: dict[str, Any], *, head_dim: int, max_position: int, seq_len: int | None = None) -> tuple[Tensor, float]:
    """Inverse frequencies and attention factor as transformers computes them."""
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=max_position,
        rope_parameters=dict(parameters),
    )
    if parameters["rope_type"] == "default":
        return transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=seq_len)


_NUMBER = {"allow_nan": False, "allow_infinity": False}
_THETA = st.floats(100.0, 1e7, **_NUMBER)
_FACTOR = st.floats(1.0, 64.0, **_NUMBER)
_LENGTH = st.sampled_from([16, 64, 2048, 4096, 8192])


@given(
    rope_type=st.sampled_from(["default", "linear", "dynamic"]),
    theta=_THETA,
    factor=_FACTOR,
    half=st.integers(2, 64),
    length=_LENGTH,
)
def test_default_linear_and_dynamic_frequencies_are_those_of_transformers(
    rope_type: Any, theta: float, factor: float, half: int, length: int
) -> None:
    parameters = {"rope_type": rope_type, "rope_theta": theta, "factor": factor}
    if rope_type == "default":
        del parameters["factor"]
    rope = RopeConfig(rope_type=rope_type, theta=theta, factor=factor, original_max_position_embeddings=length)
    expected, scaling = reference(parameters, head_dim=2 * half, max_position=length)
    torch.testing.assert_close(inverse_frequencies(rope, 2 * half), expected, rtol=1e-6, atol=0)
    assert attention_factor(rope) == scaling


@given(theta=_THETA, factor=_FACTOR, half=st.integers(1, 64), length=_LENGTH, low=st.floats(0.5, 2.0), width=st.floats(0.5, 8.0))
def test_llama3_frequencies_are_those_of_transformers(
    *, theta: float, factor: float, half: int, length: int, low: float, width: float
) -> None:
    rope = RopeConfig(
        rope_type="llama3",
        theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=low + width,
        original_max_position_embeddings=length,
    )
    parameters = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": low + width,
        "original_max_position_embeddings": length,
    }
    expected, _ = reference(parameters, head_dim=2 * half, max_position=length)
    torch.testing.assert_close(inverse_frequencies(rope, 2 * half), expected, rtol=1e-6, atol=0)


@given(
    theta=_THETA,
    factor=_FACTOR,
    half=st.integers(2, 64),
    length=_LENGTH,
    betas=st.sampled_from([(32.0, 1.0), (8.0, 0.5), (64.0, 2.0)]),
    truncate=st.booleans(),
    mscales=st.sampled_from([(None, None), (1.0, 1.0), (0.707, 1.3), (1.2, None)]),
    explicit=st.none() | st.floats(0.5, 2.0),
)
def test_yarn_frequencies_and_attention_factor_are_those_of_transformers(
    *,
    theta: float,
    factor: float,
    half: int,
    length: int,
    betas: tuple[float, float],
    truncate: bool,
    mscales: tuple[float | None, float | None],
    explicit: float | None,
) -> None:
    rope = RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=length,
        beta_fast=betas[0],
        beta_slow=betas[1],
        truncate=truncate,
        mscale=mscales[0],
        mscale_all_dim=mscales[1],
        attention_factor=explicit,
    )
    parameters = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": length,
        "beta_fast": betas[0],
        "beta_slow": betas[1],
        "truncate": truncate,
        "mscale": mscales[0],
        "mscale_all_dim": mscales[1],
        "attention_factor": explicit,
    }
    expected, scaling = reference(parameters, head_dim=2 * half, max_position=4 * length)
    torch.testing.assert_close(inverse_frequencies(rope, 2 * half), expected, rtol=1e-6, atol=1e-12)
    assert attention_factor(rope) == pytest.approx(scaling, rel=1e-12)


def _step(query_lens: list[int], seq_lens: list[int], *, padded_tokens: int = 0) -> tuple[Tensor, AttentionMetadata]:
    positions = torch.cat([torch.arange(length - query, length) for query, length in zip(query_lens, seq_lens, strict=True)])
    positions = torch.cat((positions, torch.zeros(padded_tokens))).to(torch.int32)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    nothing = torch.zeros(0, dtype=torch.int32)
    return positions, AttentionMetadata(starts, lengths, nothing, nothing)


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=5),
    st.integers(0, 3),
    st.sampled_from([1.0, 2.0, 8.0]),
)
def test_dynamic_angles_of_each_sequence_are_those_of_its_own_length(
    sequences: list[tuple[int, int]], padded_tokens: int, factor: float
) -> None:
    rope = RopeConfig(rope_type="dynamic", factor=factor, original_max_position_embeddings=64)
    layer = DynamicRotaryEmbedding(rope, head_dim=16)
    layer.process_after_loading(torch.device("cpu"), WeightArena())
    query_lens = [query for query, _ in sequences]
    seq_lens = [query + context for query, context in sequences]
    positions, attention = _step(query_lens, seq_lens, padded_tokens=padded_tokens)
    angles = layer(positions, attention)
    assert torch.isfinite(angles.cos_sin).all()
    rows = angles.cos_sin[angles.rows]
    start = 0
    for query, length in zip(query_lens, seq_lens, strict=True):
        parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": factor}
        inverse, _ = reference(parameters, head_dim=16, max_position=64, seq_len=length)
        expected = torch.outer(torch.arange(length - query, length).float(), inverse)
        torch.testing.assert_close(rows[start : start + query], torch.cat((expected.cos(), expected.sin()), -1), atol=2e-4, rtol=0)
        start += query


def _layer(rope: RopeConfig, head_dim: int, max_model_len: int) -> torch.nn.Module:
    with torch.device("meta"):
        layer = make_rotary_embedding(rope, head_dim=head_dim, max_model_len=max_model_len)
    layer.process_after_loading(torch.device("cpu"), WeightArena())
    return layer


def test_the_table_stays_float32_and_exact_when_the_model_is_cast_to_bfloat16() -> None:
    layer = _layer(RopeConfig(original_max_position_embeddings=8192), 64, 8192).to(torch.bfloat16)
    assert isinstance(layer, TableRotaryEmbedding)
    assert layer.cos_sin.dtype == torch.float32
    positions = torch.arange(8192, dtype=torch.float64)
    inverse = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    exact = torch.outer(positions, inverse)
    for position in (4095, 8191):
        expected = torch.cat((exact[position].cos(), exact[position].sin()))
        assert (layer.cos_sin[position].double() - expected).abs().max() < 1e-2
    # Neighbouring positions differ, at the end of the context as at its start.
    assert ((layer.cos_sin[1:] - layer.cos_sin[:-1]).abs().amax(1) > 0.5).all()


def test_dynamic_exponents_stay_float32_when_the_model_is_cast_to_bfloat16() -> None:
    rope = RopeConfig(rope_type="dynamic", factor=4.0, original_max_position_embeddings=64)
    layer = _layer(rope, 16, 256)
    before = layer.get_buffer("exponents").clone()
    assert torch.equal(layer.to(torch.bfloat16).get_buffer("exponents"), before)


def test_a_layer_made_on_meta_follows_to_a_device_with_its_own_dtype() -> None:
    with torch.device("meta"):
        layer = make_rotary_embedding(RopeConfig(original_max_position_embeddings=64), head_dim=16, max_model_len=64)
    assert layer.to_empty(device="cpu").get_buffer("cos_sin").dtype == torch.float32
    assert not layer.get_buffer("cos_sin").is_meta
