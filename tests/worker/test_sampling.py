"""Sampling against the definitions of the protocol, written out per row in fp64."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelworker.worker.batch import SamplingBatch
from modelworker.worker.random_numbers import uniforms
from modelworker.worker.sampling import Samples, sample

VOCAB = 101


def parameters(num_rows: int, **changes: Any) -> SamplingBatch:
    neutral: dict[str, tuple[float, Any]] = {
        "temperature": (0, np.float32), "top_k": (0, np.int32), "top_p": (1, np.float32), "min_p": (0, np.float32),
        "seed": (0, np.uint64), "has_seed": (True, np.bool_), "num_logprobs": (-1, np.int32),
        "processed_logprobs": (False, np.bool_),
    }  # fmt: skip
    return SamplingBatch(
        **{
            name: np.broadcast_to(np.array(changes.get(name, value), dtype), (num_rows,)).copy()
            for name, (value, dtype) in neutral.items()
        }
    )


def run(logits: Tensor, batch: SamplingBatch, positions: Any = 5) -> Samples:
    positions = np.broadcast_to(np.array(positions, np.int32), (len(logits),)).copy()
    return sample(logits, batch, batch.seed, positions)


def distribution(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution of one row, as the protocol words it: [vocab_size], fp64."""
    scaled = logits.astype(np.float64) / (temperature or 1.0)
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    if 0 < top_k < len(order):
        order = order[:top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    weights /= weights.sum()
    kept, cumulated = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if cumulated >= top_p and kept:
            break
        kept.append((token, weight))
        cumulated += weight
    result = np.zeros(len(scaled))
    for token, weight in kept:
        if weight >= min_p * kept[0][1]:
            result[token] = weight
    return result / result.sum()


def logits_rows(num_rows: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


FILTERS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-5, 0.3, 0.8, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 7, VOCAB, VOCAB + 50]),
        "top_p": st.sampled_from([1.0, 0.9, 0.5, 0.05]),
        "min_p": st.sampled_from([0.0, 0.05, 0.4, 0.99]),
    }
)


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(FILTERS, min_size=1, max_size=6), seed=st.integers(0, 2**64 - 1), logits_seed=st.integers(0, 10_000))
def test_every_row_of_a_mixed_batch_draws_the_token_that_its_own_definition_gives(
    rows: list[dict[str, float]], seed: int, logits_seed: int
) -> None:
    logits = logits_rows(len(rows), logits_seed)
    batch = parameters(
        len(rows), **{name: [row[name] for row in rows] for name in rows[0]}, seed=seed, num_logprobs=0, processed_logprobs=True
    )
    samples = run(logits, batch, positions=np.arange(len(rows)))
    assert samples.finite.all()
    assert samples.logprobs is not None
    for index, row in enumerate(rows):
        expected = distribution(logits[index].numpy(), row["temperature"], int(row["top_k"]), row["top_p"], row["min_p"])
        token = samples.token_ids[index]
        if row["temperature"] == 0:
            assert token == logits[index].argmax()
        else:
            number = uniforms(batch.seed[[index]], np.array([index], np.uint64))[0]
            cumulated = expected.cumsum()
            # fp32 probabilities: a number that close to a boundary may fall on either side.
            near = np.flatnonzero(
                (cumulated > number - 1e-5) & (np.concatenate(([0], cumulated[:-1])) < number + 1e-5) & (expected > 0)
            )
            assert token in near
        if expected[token] > 0:
            assert samples.logprobs[index] == pytest.approx(math.log(expected[token]), abs=2e-3)


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 1.0, "top_k": 4}, {"temperature": 1.0, "top_p": 0.7},
        {"temperature": 1.0, "min_p": 0.2}, {"temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.1},
    ],
)  # fmt: skip
def test_draws_follow_the_distribution(filters: dict[str, float]) -> None:
    num_draws = 5_000
    logits = logits_rows(1, seed=3, scale=1.5)
    expected = distribution(logits[0].numpy(), **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters)
    batch = parameters(num_draws, **filters, seed=np.arange(num_draws))
    counts = np.bincount(run(logits.expand(num_draws, -1), batch).token_ids, minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    # Tokens that are too rare for the chi-square test are lumped together.
    common = expected * num_draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * num_draws
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = max(len(wanted) - 1, 1)
    # Five standard deviations of a chi-square variable; the seeds are fixed, so the outcome is too.
    assert ((observed - wanted) ** 2 / wanted).sum() < freedom + 5 * math.sqrt(2 * freedom)


def test_a_seeded_row_gives_the_same_token_alone_in_any_row_and_beside_any_neighbour() -> None:
    row = logits_rows(1, seed=9)
    alone = run(row, parameters(1, temperature=0.8, seed=42)).token_ids[0]
    batch = torch.cat((row, logits_rows(4, seed=10), row))
    for neighbours in ({"has_seed": [True, False, False, True, False, True]}, {"temperature": [0.8, 0, 1.3, 0, 0.1, 0.8]}):
        mixed = parameters(6, **({"temperature": 0.8} | neighbours), seed=42)
        assert run(batch, mixed).token_ids[[0, 5]].tolist() == [alone, alone]


def test_positions_and_seeds_change_the_draw() -> None:
    logits = torch.zeros(1000, VOCAB)
    assert len(set(run(logits, parameters(1000, temperature=1.0, seed=7), positions=np.arange(1000)).token_ids)) > 90
    assert len(set(run(logits, parameters(1000, temperature=1.0, seed=np.arange(1000))).token_ids)) > 90


def test_greedy_rows_beside_random_ones_are_untouched_by_the_division_by_temperature() -> None:
    logits = logits_rows(3, seed=4)
    logits[0, 17] = -1e30
    samples = run(logits, parameters(3, temperature=[0, 0.7, 1e-5], num_logprobs=0))
    assert samples.finite.all()
    assert samples.token_ids[0] == logits[0].argmax()
    assert samples.token_ids[2] == logits[2].argmax()
    assert samples.logprobs is not None
    assert np.isfinite(samples.logprobs).all()


def test_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [90, 13, 40]] = 5.0
    assert run(logits, parameters(1)).token_ids[0] == 13
    seeds = np.arange(300)
    rows = logits.expand(300, -1)
    assert set(run(rows, parameters(300, temperature=1.0, top_k=2, seed=seeds)).token_ids) == {13, 40}
    assert set(run(rows, parameters(300, temperature=1.0, top_p=0.5, seed=seeds)).token_ids) == {13, 40}
    assert set(run(rows, parameters(300, temperature=1.0, top_k=1, seed=seeds)).token_ids) == {13}


def test_the_largest_random_number_still_draws_a_token_that_is_kept() -> None:
    # The last tokens are dropped by top-k: a target that rounds up to the total must not run past the kept ones.
    logits = torch.zeros(1, VOCAB)
    logits[0, :3] = 9.0
    tokens = run(logits.expand(20_000, -1), parameters(20_000, temperature=1.0, top_k=3, seed=np.arange(20_000))).token_ids
    assert set(tokens) == {0, 1, 2}


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_non_finite_logits_is_reported_and_its_neighbours_are_the_same_without_it(poison: float) -> None:
    logits = logits_rows(3, seed=5)
    batch = parameters(3, temperature=[0.8, 0.9, 0], top_p=0.9, num_logprobs=0, seed=11)
    clean = run(logits, batch)
    logits[1, 60] = poison
    samples = run(logits, batch)
    assert samples.finite.tolist() == [True, False, True]
    assert samples.token_ids[[0, 2]].tolist() == clean.token_ids[[0, 2]].tolist()
    assert samples.logprobs is not None
    assert clean.logprobs is not None
    assert samples.logprobs[[0, 2]].tolist() == clean.logprobs[[0, 2]].tolist()


def test_raw_logprobs_describe_the_models_distribution_and_processed_ones_the_filtered_one() -> None:
    logits = logits_rows(2, seed=6)
    batch = parameters(2, temperature=0.5, top_k=5, num_logprobs=0, processed_logprobs=[False, True], seed=3)
    samples = run(logits, batch)
    assert samples.logprobs is not None
    assert samples.ranks is not None
    raw = logits.double().log_softmax(-1)[0, samples.token_ids[0]]
    assert samples.logprobs[0] == pytest.approx(raw.item(), abs=1e-5)
    kept = distribution(logits[1].numpy(), 0.5, 5, 1.0, 0.0)
    assert samples.logprobs[1] == pytest.approx(math.log(kept[samples.token_ids[1]]), abs=1e-5)
    for row in range(2):
        better = (logits[row] > logits[row, samples.token_ids[row]]).sum().item()
        assert samples.ranks[row] == better + 1


def test_a_greedy_rows_processed_logprobs_use_temperature_one() -> None:
    logits = logits_rows(1, seed=8)
    samples = run(logits, parameters(1, num_logprobs=0, processed_logprobs=True))
    assert samples.logprobs is not None
    assert samples.logprobs[0] == pytest.approx(logits.double().log_softmax(-1).max().item(), abs=1e-5)


def test_logprobs_are_only_computed_for_the_rows_that_ask() -> None:
    samples = run(logits_rows(2), parameters(2, num_logprobs=[-1, 0]))
    assert samples.logprobs is not None
    assert samples.logprobs[0] == 0.0
    assert samples.logprobs[1] < 0.0
    assert run(logits_rows(2), parameters(2)).logprobs is None


def test_top_p_beyond_the_sorted_prefix_keeps_what_the_definition_keeps() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 5000, generator=generator) * 0.1
    logits[2, 4000:] = logits[2, 3999]
    samples = run(
        logits, parameters(3, temperature=1.0, top_p=[0.9, 0.01, 0.5], num_logprobs=0, processed_logprobs=True, seed=[1, 2, 3])
    )
    assert samples.logprobs is not None
    for row, top_p in enumerate([0.9, 0.01, 0.5]):
        expected = distribution(logits[row].numpy(), 1.0, 0, top_p, 0.0)
        assert samples.logprobs[row] == pytest.approx(math.log(expected[samples.token_ids[row]]), abs=2e-3)


def test_no_rows_give_no_tokens() -> None:
    assert len(run(torch.empty(0, VOCAB), parameters(0)).token_ids) == 0


def test_a_row_whose_finite_logits_add_up_to_infinity_is_finite() -> None:
    logits = torch.full((2, VOCAB), 3e38)
    logits[1, 4] = float("inf")
    assert run(logits, parameters(2, num_logprobs=0)).finite.tolist() == [True, False]
