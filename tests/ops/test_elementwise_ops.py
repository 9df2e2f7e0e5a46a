"""rms_norm, fused_add_rms_norm, silu_and_mul and rotary_embedding against their formulae, written out in fp64."""

import math

import pytest
import torch
from torch import Tensor

import modelworker.ops  # noqa: F401  (registers the ops)

OPS = torch.ops.modelworker
NUM_ROWS = [0, 1, 3, 17]
# One rounding of the result (2^-9 relative in bf16); fp32 accumulates a few units over 64 terms.
TOLERANCE = {torch.bfloat16: 2.0**-8, torch.float32: 2e-6}
DTYPES = list(TOLERANCE)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 4)


def norm_of(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_rms_norm_is_its_formula(num_rows: int, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, 64, dtype=dtype), random(64, dtype=dtype, seed=1)
    assert_close(OPS.rms_norm(x, weight, 1e-5), norm_of(x, weight, 1e-5), dtype)


def test_rms_norm_reads_rows_of_a_wider_tensor() -> None:
    wide = random(5, 96, dtype=torch.float32)
    weight = random(64, dtype=torch.float32, seed=1)
    assert_close(OPS.rms_norm(wide[:, 16:80], weight, 1e-5), norm_of(wide[:, 16:80], weight, 1e-5), torch.float32)


def test_rms_norm_of_zeros_is_zero_and_of_huge_values_is_finite() -> None:
    weight = torch.ones(8)
    assert OPS.rms_norm(torch.zeros(2, 8), weight, 1e-5).eq(0).all()
    assert OPS.rms_norm(torch.full((2, 8), 1e18), weight, 1e-5).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_fused_add_rms_norm_updates_both_tensors(num_rows: int, dtype: torch.dtype) -> None:
    x, residual = random(num_rows, 64, dtype=dtype), random(num_rows, 64, dtype=dtype, seed=1)
    weight = random(64, dtype=dtype, seed=2)
    total = x.double() + residual.double()
    OPS.fused_add_rms_norm(x, residual, weight, 1e-5)
    assert_close(residual, total, dtype)
    assert_close(x, norm_of(total, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_silu_and_mul_is_its_formula(num_rows: int, dtype: torch.dtype) -> None:
    x = random(num_rows, 96, dtype=dtype) * 4
    gate, up = x.double()[:, :48], x.double()[:, 48:]
    assert_close(OPS.silu_and_mul(x), gate / (1 + torch.exp(-gate)) * up, dtype)


def test_silu_and_mul_takes_the_gate_first() -> None:
    assert OPS.silu_and_mul(torch.tensor([[0.0, 5.0]])).item() == 0.0
    assert OPS.silu_and_mul(torch.tensor([[5.0, 0.0]])).item() == 0.0
    assert OPS.silu_and_mul(torch.tensor([[-20.0, 1.0]])).item() == pytest.approx(-20 / (1 + math.exp(20)), rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (20, 20), (24, 8)])
def test_rotary_embedding_rotates_each_pair_by_the_angle_of_its_position(
    head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype
) -> None:
    positions = torch.tensor([0, 7, 7, 31, 2], dtype=torch.int32)
    angles = random(32, rotary_dim // 2, dtype=torch.float32, seed=3) * 3
    query, key = random(5, 4, head_dim, dtype=dtype), random(5, 2, head_dim, dtype=dtype, seed=1)
    expected_query, expected_key = query.double(), key.double()
    for heads in (expected_query, expected_key):
        for token, position in enumerate(positions.tolist()):
            for pair in range(rotary_dim // 2):
                first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + rotary_dim // 2)
                cos, sin = math.cos(angles[position, pair]), math.sin(angles[position, pair])
                a, b = heads[token, :, first].clone(), heads[token, :, second].clone()
                heads[token, :, first], heads[token, :, second] = a * cos - b * sin, b * cos + a * sin
    OPS.rotary_embedding(query, key, positions, torch.cat((angles.cos(), angles.sin()), dim=1), interleaved)
    assert_close(query, expected_query, dtype)
    assert_close(key, expected_key, dtype)


def test_rotary_embedding_works_in_place_on_parts_of_a_merged_projection() -> None:
    merged = random(3, 8, 16, dtype=torch.float32)
    before = merged.clone()
    angles = torch.zeros(4, 8)
    table = torch.cat((angles.cos() * 2, angles.sin()), dim=1)
    OPS.rotary_embedding(merged[:, :4], merged[:, 4:6], torch.arange(3), table, False)
    torch.testing.assert_close(merged[:, :6], before[:, :6] * 2)
    torch.testing.assert_close(merged[:, 6:], before[:, 6:], rtol=0, atol=0)


def test_rotary_embedding_accepts_no_tokens() -> None:
    OPS.rotary_embedding(torch.empty(0, 4, 8), torch.empty(0, 2, 8), torch.empty(0, dtype=torch.int32), torch.ones(4, 8), False)
