"""Draws follow the distribution: chi-square tests of every filter alone and of several together."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from modelworker_testing.sampling_reference import Wish, distribution, edited
from modelworker_testing.sampling_runs import parameters, run, run_wishes

VOCAB = 101
LOGITS = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
# The most probable tokens: what penalties do to them shows.
COMMON = tuple(LOGITS[0].topk(6).indices.tolist())
EVERYTHING = Wish(
    temperature=1.5, top_k=30, top_p=0.9, min_p=0.02, presence=0.7, frequency=0.3, repetition=1.2,
    banned=(3, 50), bias={7: 1.5, 90: -2.0}, mask=tuple(token % 7 != 0 for token in range(VOCAB)),
    prompt=(5, 6, *COMMON[:1]), output=(7, 7, 8, 20, *COMMON[:3], *COMMON[2:5]),
)  # fmt: skip
WISHES = {
    "temperature 1": Wish(temperature=1.0),
    "temperature 0.5": Wish(temperature=0.5),
    "top-k": Wish(temperature=1.0, top_k=4),
    "top-p": Wish(temperature=1.0, top_p=0.7),
    "min-p": Wish(temperature=1.0, min_p=0.2),
    "top-k, top-p, min-p": Wish(temperature=1.5, top_k=9, top_p=0.8, min_p=0.1),
    "allowed": Wish(temperature=1.0, allowed=(1, 2, 3, 40, 60)),
    "banned": Wish(temperature=1.0, banned=tuple(range(50))),
    "mask": Wish(temperature=1.0, mask=tuple(token % 3 == 0 for token in range(VOCAB))),
    "bias": Wish(temperature=1.0, bias={5: 4.0, 6: -4.0}),
    "presence": Wish(temperature=1.0, presence=1.5, prompt=COMMON[:2], output=COMMON[1:6]),
    "frequency": Wish(temperature=1.0, frequency=0.8, prompt=COMMON[:2], output=COMMON[:3] + COMMON[1:6] + COMMON[2:4]),
    "repetition": Wish(temperature=1.0, repetition=1.9, prompt=COMMON[:3], output=COMMON[2:6]),
    "everything": EVERYTHING,
}


def draws(wish: Wish, num_draws: int) -> np.ndarray:
    """[num_draws], of one row of logits, each with a seed of its own."""
    found = []
    for start in range(0, num_draws, 5000):
        rows = [replace(wish, seed=start + row) for row in range(min(5000, num_draws - start))]
        found.append(run_wishes(LOGITS.expand(len(rows), -1), rows).token_ids)
    return np.concatenate(found)


@pytest.mark.parametrize("num_draws", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", WISHES)
def test_draws_follow_the_distribution(name: str, num_draws: int) -> None:
    wish = WISHES[name]
    expected = distribution(edited(LOGITS[0].tolist(), wish), wish)
    counts = np.bincount(draws(wish, num_draws), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    # Tokens that are too rare for the chi-square test are lumped together.
    common = expected * num_draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * num_draws
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    freedom = max(len(wanted) - 1, 1)
    # Five standard deviations of a chi-square variable; the seeds are fixed, so the outcome is too.
    assert ((observed - wanted) ** 2 / wanted).sum() < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("num_draws", [5_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_draws_at_consecutive_positions_of_one_seed_follow_the_distribution(num_draws: int) -> None:
    expected = LOGITS[0].double().softmax(-1).numpy()
    tokens = run(LOGITS.expand(num_draws, -1), parameters(num_draws, temperature=1.0, seed=7), np.arange(num_draws)).token_ids
    common = expected * num_draws >= 5
    counts = np.bincount(tokens, minlength=VOCAB)
    statistic = ((counts[common] - expected[common] * num_draws) ** 2 / (expected[common] * num_draws)).sum()
    assert statistic < common.sum() + 5 * math.sqrt(2 * common.sum())
