"""Sampling with everything on against the protocol's definitions, written out per position in fp64."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelworker.worker.random_numbers import uniforms
from modelworker.worker.sampling.choice import Samples
from modelworker_testing.sampling_reference import Wish, distribution, edited, log_softmax, ranking
from modelworker_testing.sampling_runs import run_wishes

VOCAB = 67
TOKENS = st.integers(0, VOCAB - 1)
# fp32 against fp64: a random number or a limit as near as this to a boundary may fall on either side of it.
NEAR = 2e-5


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    def rarely(values: st.SearchStrategy[Any], neutral: Any) -> Any:
        return draw(st.just(neutral) | values)

    mask = rarely(st.lists(st.booleans(), min_size=VOCAB, max_size=VOCAB).map(tuple), None)
    return Wish(
        temperature=draw(st.sampled_from([0.0, 1e-5, 0.3, 0.8, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 1, 2, 7, VOCAB, VOCAB + 50])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5, 0.05])),
        min_p=draw(st.sampled_from([0.0, 0.05, 0.4, 0.99])),
        seed=draw(st.integers(0, 2**64 - 1)),
        presence=rarely(st.floats(-2, 2, width=32), 0.0),
        frequency=rarely(st.floats(-2, 2, width=32), 0.0),
        repetition=rarely(st.sampled_from([0.5, 1.3, 2.0, 10.0]), 1.0),
        num_logprobs=draw(st.sampled_from([-1, 0, 1, 5, 20])),
        processed=draw(st.booleans()),
        allowed=rarely(st.lists(TOKENS, min_size=1, max_size=9).map(tuple), ()),
        banned=rarely(st.lists(TOKENS, max_size=9).map(tuple), ()),
        mask=mask,
        bias=rarely(st.dictionaries(TOKENS, st.floats(-30, 30, width=32), max_size=6), {}),
        prompt=tuple(draw(st.lists(TOKENS, max_size=9))),
        output=tuple(draw(st.lists(TOKENS, max_size=9))),
    )


def near_limit(logits: list[float], wish: Wish) -> bool:
    """Whether rounding may decide which tokens a filter keeps, or which is the largest."""
    ordered = [logits[token] for token in ranking(logits) if logits[token] > -math.inf]
    temperature = wish.temperature or 1.0
    if any(0 < a - b < 1e-5 * max(1.0, abs(a)) for a, b in itertools.pairwise(ordered)):
        return True
    weights = np.exp((np.array(ordered) - ordered[0]) / temperature)
    kept = weights[: wish.top_k] if wish.top_k else weights
    sums = np.cumsum(kept) / kept.sum()
    # A filter that is off has no limit: all sums end at 1, and small weights are near 0.
    near_top_p = wish.top_p < 1 and (abs(sums - wish.top_p) < NEAR).any()
    return bool(near_top_p or (wish.min_p > 0 and (abs(kept - wish.min_p) < NEAR).any()))


def check(index: int, logits: list[float], wish: Wish, samples: Samples) -> bool:
    """Returns whether the outcome is beyond doubt, and was compared."""
    changed = edited(logits, wish)
    if max(changed) == -math.inf:
        assert not samples.allowed[index]
        return True
    assert samples.allowed[index]
    if near_limit(changed, wish):
        return False
    token, expected = int(samples.token_ids[index]), distribution(changed, wish)
    if wish.temperature == 0:
        assert token == ranking(changed)[0]
    else:
        position = np.array([len(wish.prompt) + len(wish.output)], np.uint64)
        number = uniforms(np.array([wish.seed], np.uint64), position)[0]
        cumulated = expected.cumsum()
        before = np.concatenate(([0], cumulated[:-1]))
        assert token in np.flatnonzero((cumulated > number - NEAR) & (before < number + NEAR) & (expected > 0))
    check_logprobs(index, logits, wish, samples)
    return True


def check_logprobs(index: int, logits: list[float], wish: Wish, samples: Samples) -> None:
    if wish.num_logprobs < 0:
        assert samples.listing is None or samples.listing.counts[index] == 0
        return
    assert samples.listing is not None
    token = int(samples.token_ids[index])
    changed = edited(logits, wish) if wish.processed else logits
    with np.errstate(divide="ignore"):
        right = np.log(distribution(changed, wish)) if wish.processed else log_softmax(logits)
    order = ranking(changed)
    told = [token, *[other for other in order[: wish.num_logprobs] if right[other] > -80]]
    count = int(samples.listing.counts[index])
    # A token whose weight is at the end of the range, or beyond that of the weights here, may or may not be told.
    assert len(told) <= count <= 1 + min(wish.num_logprobs, int(np.isfinite(changed).sum()))
    assert (samples.listing.values[index, len(told) : count] < -79).all()
    listed = samples.listing.token_ids[index, : len(told)].tolist()
    assert listed == told
    assert samples.listing.ranks[index, : len(told)].tolist() == [order.index(other) + 1 for other in told]
    np.testing.assert_allclose(samples.listing.values[index, : len(told)], right[told], atol=2e-4, rtol=1e-5)
    assert np.isfinite(samples.listing.values[index, :count]).all()


def logits_rows(num_rows: int, seed: int) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_every_row_of_a_mixed_batch_gets_what_its_own_definition_gives() -> None:
    compared: dict[bool, list[bool]] = {True: [], False: []}

    @settings(max_examples=150)
    @given(rows=st.lists(wishes(), min_size=1, max_size=5), seed=st.integers(0, 10_000))
    # Probabilities that sums in fp64, or fp64 itself, lose.
    @example(rows=[Wish(), Wish(temperature=0.3, num_logprobs=5, processed=True, bias={0: 14.0})], seed=0)
    @example(rows=[Wish(temperature=1e-5, num_logprobs=5, processed=True)], seed=0)
    def check_batch(rows: list[Wish], seed: int) -> None:
        logits = logits_rows(len(rows), seed)
        samples = run_wishes(logits, rows)
        assert samples.finite.all()
        for index, wish in enumerate(rows):
            compared[wish.top_p < 1].append(check(index, logits[index].tolist(), wish, samples))

    check_batch()
    for has_top_p, outcomes in compared.items():
        assert sum(outcomes) > 0.9 * len(outcomes) > 0, f"top-p {has_top_p}: {sum(outcomes)} of {len(outcomes)} rows are compared"


@settings(max_examples=50)
@given(rows=st.lists(wishes(), min_size=2, max_size=5), seed=st.integers(0, 10_000))
def test_a_row_gets_the_same_alone_and_beside_any_neighbours_in_any_order(rows: list[Wish], seed: int) -> None:
    logits = logits_rows(len(rows), seed)
    together, reversed_ = run_wishes(logits, rows), run_wishes(logits.flip(0), rows[::-1])
    for index, wish in enumerate(rows):
        alone = run_wishes(logits[index : index + 1], [wish])
        if alone.allowed[0]:
            assert together.token_ids[index] == reversed_.token_ids[len(rows) - 1 - index] == alone.token_ids[0]
        assert together.allowed[index] == alone.allowed[0]


@settings(max_examples=50)
@given(
    wish=wishes(),
    ties=st.lists(TOKENS, min_size=1, max_size=VOCAB),
    level=st.sampled_from([0.0, 4.0]),
)
def test_of_equal_logits_the_lowest_ids_come_first(wish: Wish, ties: list[int], level: float) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, ties] = level
    check(0, logits[0].tolist(), wish, run_wishes(logits, [wish]))


@pytest.mark.parametrize("vocab_size", [300, 5000])
@settings(max_examples=20)
@given(
    filters=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.5, 1.0, 3.0]),
            "top_k": st.sampled_from([0, 40, 257, 4100]),
            "top_p": st.sampled_from([1.0, 0.99, 0.3]),
            "min_p": st.sampled_from([0.0, 0.2]),
        }
    ),
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.01, 0.3, 3.0]),
)
def test_filters_that_reach_far_keep_what_the_definition_keeps(
    vocab_size: int, filters: dict[str, Any], seed: int, scale: float
) -> None:
    logits = torch.randn(2, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    wish = Wish(**filters, seed=seed, num_logprobs=3, processed=True)
    samples = run_wishes(logits, [wish, Wish(temperature=1.0, top_k=5)])
    assert samples.listing is not None
    row = logits[0].tolist()
    expected, token = distribution(row, wish), int(samples.token_ids[0])
    num_kept = int((expected > 0).sum())
    # The sum of many weights may differ by rounding, and with it whether the token at the limit is kept.
    assert ranking(row).index(token) < num_kept + 1
    slack = NEAR + expected[expected > 0].min()
    number = uniforms(np.array([wish.seed], np.uint64), np.zeros(1, np.uint64))[0]
    cumulated = expected.cumsum()
    assert cumulated[token] > number - slack
    assert cumulated[token] - expected[token] < number + slack
    if expected[token] > 0:
        assert samples.listing.values[0, 0] == pytest.approx(math.log(expected[token]), abs=2 * slack)
