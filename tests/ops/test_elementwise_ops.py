"""Values at which the formulae of native ops are known, or go wrong first."""

import math

import pytest
import torch

import modelworker.ops  # noqa: F401  (registers the ops)

OPS = torch.ops.modelworker


def test_rms_norm_of_zeros_is_zero_and_of_huge_values_is_finite() -> None:
    weight = torch.ones(8)
    assert OPS.rms_norm(torch.zeros(2, 8), weight, 1e-5).eq(0).all()
    assert OPS.rms_norm(torch.full((2, 8), 1e18), weight, 1e-5).isfinite().all()


def test_silu_and_mul_takes_the_gate_first() -> None:
    assert OPS.silu_and_mul(torch.tensor([[0.0, 5.0]])).item() == 0.0
    assert OPS.silu_and_mul(torch.tensor([[5.0, 0.0]])).item() == 0.0
    assert OPS.silu_and_mul(torch.tensor([[-20.0, 1.0]])).item() == pytest.approx(-20 / (1 + math.exp(20)), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_and_mul_of_an_infinite_gate_is_nan_below_and_infinite_above(dtype: torch.dtype) -> None:
    gate = torch.tensor([-math.inf, -3e38, 3e38, math.inf, math.nan])
    result = OPS.silu_and_mul(torch.cat((gate, torch.ones(5))).to(dtype)).float()
    assert result.isnan().tolist() == [True, False, False, False, True]
    assert result[1].item() == 0
    assert torch.equal(result[2:4], gate[2:4].to(dtype).float())


@pytest.mark.parametrize("num_rows", [2, 17, 256])
@pytest.mark.parametrize("in_features", [1, 31, 64, 70, 71, 80, 88])
def test_a_row_of_nan_does_not_reach_its_neighbours_in_a_product(num_rows: int, in_features: int) -> None:
    x, weight = torch.randn(num_rows, in_features).bfloat16(), torch.randn(50, in_features).bfloat16()
    x[1] = math.nan
    result = OPS.linear(x, weight, torch.randn(50).bfloat16())
    assert result[1].isnan().all()
    assert result[torch.arange(num_rows) != 1].isfinite().all()


def test_rotary_embedding_by_no_angle_changes_no_bit_and_by_a_right_angle_swaps_the_pair() -> None:
    query, key = torch.randn(1, 2, 4), torch.randn(1, 1, 4)
    before = query.clone()
    still, quarter = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    table = torch.stack((still, quarter))
    OPS.rotary_embedding(query, key, torch.tensor([0], dtype=torch.int32), table, False)
    assert torch.equal(query, before)
    OPS.rotary_embedding(query, key, torch.tensor([1], dtype=torch.int32), table, False)
    assert torch.equal(query, torch.cat((-before[..., 2:], before[..., :2]), dim=-1))
