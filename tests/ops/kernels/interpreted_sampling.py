"""Drawing tokens: the CPU's tokens for equal logits and seeds, and the right distributions. Run by test_interpreted.py."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from modelworker.ops.op_settings import OpSettings
from modelworker.ops.sampling import SampleTokens
from modelworker.ops.triton_library import load_triton
from modelworker.worker.random_numbers import uniforms
from modelworker.worker.sampling.filters import Filters
from modelworker.worker.sampling.filters import draw as draw_on_cpu
from modelworker_testing.sampling_runs import parameters, run, token_lists

SAMPLE = load_triton().ops.sample_tokens.default


def draw(
    logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, first_seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Draws from each row with a seed and a position of its own."""
    num_rows = logits.shape[0]

    def of(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype)

    seeds = (np.arange(num_rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(first_seed)).view(np.int64)
    tokens, finite = SAMPLE(
        logits, of(temperature, torch.float32), of(top_k, torch.int32), of(top_p, torch.float32), of(min_p, torch.float32),
        torch.from_numpy(seeds), torch.arange(num_rows) * 7,
    )  # fmt: skip
    return tokens, finite


def numbers(num_rows: int, first_seed: int = 0) -> Any:
    seeds = np.arange(num_rows, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(first_seed)
    return uniforms(seeds, np.arange(num_rows, dtype=np.uint64) * np.uint64(7))


def probabilities(row: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Any:
    """Written out in fp64: temperature, top-k, top-p of the rest, min-p; ties go to the lowest id."""
    logits = row.double().numpy()
    weights = np.exp((logits - logits.max()) / temperature)
    order = np.lexsort((np.arange(len(logits)), -logits))
    kept = order[: top_k or None]
    before = np.cumsum(weights[kept]) - weights[kept]
    before[0] = -1
    if top_p < 1:
        kept = kept[before < np.float64(np.float32(top_p)) * weights[kept].sum()]
    kept = kept[weights[kept] >= np.float32(min_p)]
    result = np.zeros_like(weights)
    result[kept] = weights[kept] / weights[kept].sum()
    return result


def expected(logits: Tensor, first_seed: int = 0, **filters: Any) -> list[int]:
    """The first token at which the cumulated probability exceeds the row's number."""
    drawn = []
    for row, number in zip(logits, numbers(len(logits), first_seed), strict=True):
        drawn.append(int(np.argmax(np.cumsum(probabilities(row, **filters)) > number)))
    return drawn


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"top_k": 1},
    {"top_p": 0.6},
    {"top_p": 1e-6},
    {"temperature": 2.0, "min_p": 0.2},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("num_rows", [5, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_tokens_are_those_of_the_inverted_distribution_at_the_cpus_random_numbers(filters: dict[str, Any], num_rows: int) -> None:
    logits = torch.randn(num_rows, 37, generator=torch.Generator().manual_seed(3)) * 2
    tokens, finite = draw(logits, **filters)
    assert finite.all()
    assert tokens.tolist() == expected(logits, **filters)


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}, {"top_k": 6, "top_p": 0.7}, {}], ids=str)
def test_equal_logits_are_kept_from_the_lowest_id_on(filters: dict[str, Any]) -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -0.0, 0.0, 3.0, 1.0, 3.0, 1.0, 1.0]]).repeat(6, 1)
    assert draw(logits, **filters)[0].tolist() == expected(logits, **filters)


@pytest.mark.parametrize("filters", [FILTERS[0], FILTERS[-1]], ids=str)
def test_tokens_are_those_that_the_worker_draws_on_a_cpu(filters: dict[str, Any]) -> None:
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(7)) * 2

    def each(name: str, default: float, dtype: Any) -> Any:
        return np.full(len(logits), filters.get(name, default), dtype)

    parameters = Filters(
        temperature=each("temperature", 1, np.float32), top_k=each("top_k", 0, np.int32), top_p=each("top_p", 1, np.float32),
        min_p=each("min_p", 0, np.float32),
    )  # fmt: skip
    on_cpu = draw_on_cpu(logits, logits.amax(-1), parameters, torch.from_numpy(numbers(len(logits))))
    assert torch.equal(draw(logits, **filters)[0], on_cpu.tokens)


def test_a_worker_on_a_gpu_samples_what_one_on_a_cpu_does() -> None:
    op = SampleTokens(ops=OpSettings(platform="cuda", triton=load_triton()))
    assert op.choice.implementation == "triton"
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(8)) * 2
    logits[6, 20] = float("nan")
    sampling = parameters(
        8,
        temperature=[0, 0.7, 1.2, 0.9, 1, 0.8, 1, 1.5],
        top_k=[0, 0, 5, 0, 40, 7, 0, 0],
        top_p=[1, 0.8, 1, 1, 0.9, 1, 1, 1],
        min_p=[0, 0, 0, 0.1, 0, 0, 0, 0],
        seed=[1, 2**64 - 1, 3, 4, 5, 6, 7, 8],
        num_logprobs=[-1, -1, 2, -1, -1, 2, -1, -1],
        processed_logprobs=[False, False, False, False, False, True, False, False],
        banned=token_lists([[], list(range(0, 300, 2)), [], [], [], [], [], list(range(300))]),
    )
    found, expected = run(logits, sampling, np.arange(8), sample_tokens=op), run(logits, sampling, np.arange(8))
    assert found.succeeded.tolist() == expected.succeeded.tolist() == [True] * 6 + [False] * 2
    assert found.token_ids[:6].tolist() == expected.token_ids[:6].tolist()
    assert found.listing is not None
    assert expected.listing is not None
    assert np.array_equal(found.listing.token_ids, expected.listing.token_ids)
    assert np.array_equal(found.listing.values, expected.listing.values)


def test_temperature_0_takes_the_lowest_id_of_the_largest_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 5.0, 1.0], [-3.0, -2.0, -1.0]])
    assert draw(logits, temperature=0.0)[0].tolist() == [1, 0, 2]


def test_a_tiny_temperature_takes_the_largest_logit() -> None:
    logits = torch.randn(20, 50)
    assert torch.equal(draw(logits, temperature=1e-30)[0], logits.argmax(-1))


def test_rows_with_nan_or_infinity_are_named_and_others_are_drawn() -> None:
    logits = torch.randn(5, 20)
    logits[1, 7], logits[3, 19] = float("nan"), float("inf")
    for temperature in (0.0, 1.0):
        tokens, finite = draw(logits, temperature=temperature)
        assert finite.tolist() == [True, False, True, False, True]
        rest = draw(logits.nan_to_num(0.0, posinf=0.0), temperature=temperature)[0]
        assert torch.equal(tokens[finite], rest[finite])


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.9}, {"top_k": 30, "top_p": 0.9999}], ids=str)
def test_tokens_that_are_not_allowed_are_never_drawn(filters: dict[str, Any]) -> None:
    logits = torch.randn(6, 30)
    logits[:, ::3] = float("-inf")
    tokens, finite = draw(logits, **filters)
    assert finite.all()
    assert (tokens % 3 != 0).all()


def test_several_blocks_of_a_row_are_one_distribution() -> None:
    logits = torch.randn(2, 9001, generator=torch.Generator().manual_seed(4))
    for filters in ({}, {"top_k": 5000}, {"top_p": 0.9, "temperature": 3.0}):
        assert draw(logits, **filters)[0].tolist() == expected(logits, **filters)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_tokens_are_drawn_as_often_as_their_probability_says(filters: dict[str, Any]) -> None:
    """Pearson's test over 300 draws: the statistic exceeds this bound once in 100,000 such tests."""
    row = torch.randn(16, generator=torch.Generator().manual_seed(6))
    num_draws = 300
    tokens = draw(row.repeat(num_draws, 1), first_seed=99, **filters)[0].numpy()
    wanted = probabilities(row, **filters)
    counts = np.bincount(tokens, minlength=16)
    assert (counts[wanted == 0] == 0).all()
    likely = wanted * num_draws >= 5
    statistic = ((counts - wanted * num_draws)[likely] ** 2 / (wanted * num_draws)[likely]).sum()
    freedom = max(int(likely.sum()) - 1, 1)
    # Wilson and Hilferty (1931), at 4.265 standard deviations.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 4.265 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_a_draw_depends_on_its_seed_and_position_alone() -> None:
    logits = torch.randn(1, 40).repeat(20, 1)
    together = draw(logits)[0]
    alone = torch.cat([SAMPLE(logits[:1], torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.ones(1), torch.zeros(1),
                              torch.from_numpy((np.array([i], np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)),
                              torch.tensor([i * 7]))[0] for i in range(20)])  # fmt: skip
    assert torch.equal(together, alone)
    assert len(set(together.tolist())) > 5
