"""Single properties of sampling that a reader of the protocol relies on."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from modelworker_testing.sampling_reference import Wish, distribution, log_softmax
from modelworker_testing.sampling_runs import parameters, run

VOCAB = 101


def logits_rows(num_rows: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


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
    assert samples.listing is not None
    assert np.isfinite(samples.listing.values).all()


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
    assert samples.listing is not None
    assert clean.listing is not None
    assert samples.listing.values[[0, 2], 0].tolist() == clean.listing.values[[0, 2], 0].tolist()


def test_raw_logprobs_describe_the_models_distribution_and_processed_ones_the_filtered_one() -> None:
    logits = logits_rows(2, seed=6)
    batch = parameters(2, temperature=0.5, top_k=5, num_logprobs=0, processed_logprobs=[False, True], seed=3)
    samples = run(logits, batch)
    assert samples.listing is not None
    raw = logits.double().log_softmax(-1)[0, samples.token_ids[0]]
    assert samples.listing.values[0, 0] == pytest.approx(raw.item(), abs=1e-5)
    kept = distribution(logits[1].tolist(), Wish(temperature=0.5, top_k=5))
    assert samples.listing.values[1, 0] == pytest.approx(math.log(kept[samples.token_ids[1]]), abs=1e-5)
    for row in range(2):
        better = (logits[row] > logits[row, samples.token_ids[row]]).sum().item()
        assert samples.listing.ranks[row, 0] == better + 1


def test_a_greedy_rows_processed_logprobs_use_temperature_one() -> None:
    logits = logits_rows(1, seed=8)
    samples = run(logits, parameters(1, num_logprobs=0, processed_logprobs=True))
    assert samples.listing is not None
    assert samples.listing.values[0, 0] == pytest.approx(logits.double().log_softmax(-1).max().item(), abs=1e-5)


def test_logprobs_are_only_computed_for_the_rows_that_ask() -> None:
    samples = run(logits_rows(2), parameters(2, num_logprobs=[-1, 0]))
    assert samples.listing is not None
    assert samples.listing.counts.tolist() == [0, 1]
    assert samples.listing.values[1, 0] < 0.0
    assert run(logits_rows(2), parameters(2)).listing is None


def test_top_p_beyond_the_sorted_prefix_keeps_what_the_definition_keeps() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 5000, generator=generator) * 0.1
    logits[2, 4000:] = logits[2, 3999]
    samples = run(
        logits, parameters(3, temperature=1.0, top_p=[0.9, 0.01, 0.5], num_logprobs=0, processed_logprobs=True, seed=[1, 2, 3])
    )
    assert samples.listing is not None
    for row, top_p in enumerate([0.9, 0.01, 0.5]):
        expected = distribution(logits[row].tolist(), Wish(temperature=1.0, top_p=top_p))
        assert samples.listing.values[row, 0] == pytest.approx(math.log(expected[samples.token_ids[row]]), abs=2e-3)


def test_no_rows_give_no_tokens() -> None:
    assert len(run(torch.empty(0, VOCAB), parameters(0)).token_ids) == 0


def test_a_row_whose_finite_logits_add_up_to_infinity_is_finite() -> None:
    logits = torch.full((2, VOCAB), 3e38)
    logits[1, 4] = float("inf")
    assert run(logits, parameters(2, num_logprobs=0)).finite.tolist() == [True, False]


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1000.0, -30_000.0])
def test_logprobs_are_as_exact_far_from_zero_as_near_it(offset: float, processed: bool) -> None:
    logits = logits_rows(40, seed=8) + offset
    listing = run(logits, parameters(40, num_logprobs=20, processed_logprobs=processed)).listing
    assert listing is not None
    for row in range(40):
        expected = log_softmax(logits[row].tolist())
        np.testing.assert_allclose(listing.values[row], expected[listing.token_ids[row]], atol=2e-6)
