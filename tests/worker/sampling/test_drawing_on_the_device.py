"""Where the model runs on a GPU, its op draws the tokens. Here its op for CUDA runs on tensors of the host, in its native form."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworker.ops.op_settings import OpSettings
from modelworker.ops.sampling import SampleTokens
from modelworker.worker.check_batch import CheckRow, CheckSampling, make_check_batch
from modelworker.worker.models.registry import build_model
from modelworker.worker.sampling import SampledStep, Sampler
from modelworker_testing.bare_engine import fill_randomly, model_config_of
from modelworker_testing.checkpoints import TINY
from modelworker_testing.sampling_runs import nothing_kept, parameters, run, token_lists

VOCAB = 101
OPS = OpSettings(platform="cuda", no_triton_reason="there is no GPU")


class Counting(SampleTokens):
    """Notes which rows it was asked to draw for."""

    def __init__(self) -> None:
        super().__init__(ops=OPS)
        self.drawn: list[list[bool]] = []

    def forward_native(self, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.drawn.append((args[1] > 0).tolist())
        return super().forward_native(*args)


def rows(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def of_each(strategy: st.SearchStrategy[Any], num_rows: int = 6) -> st.SearchStrategy[list[Any]]:
    return st.lists(strategy, min_size=num_rows, max_size=num_rows)


@settings(deadline=None, max_examples=150)
@given(
    temperature=of_each(st.sampled_from([0, 1e-4, 0.7, 1, 3])),
    top_k=of_each(st.sampled_from([0, 1, 2, 17, 100, 101, 5000])),
    top_p=of_each(st.sampled_from([1, 0.95, 0.4, 1e-6])),
    min_p=of_each(st.sampled_from([0, 0.01, 0.5, 1])),
    num_logprobs=of_each(st.sampled_from([-1, 0, 3])),
    processed_logprobs=of_each(st.booleans()),
    banned=of_each(st.sampled_from([[], [3], list(range(50)), list(range(VOCAB))])),
    presence=of_each(st.just(0)),
    seed=of_each(st.integers(0, 2**64 - 1)),
    position=st.integers(1, 2**31 - 7),
    poison=st.sampled_from([None, float("nan"), float("inf"), float("-inf")]),
)
def test_every_row_gets_the_token_and_the_logprobs_that_it_gets_without_the_op(
    position: int, poison: float | None, banned: list[list[int]], **each: list[Any]
) -> None:
    logits = rows(6)
    if poison is not None:
        logits[2, 60] = poison
    sampling = parameters(6, **each, banned=token_lists(banned))
    positions = np.arange(position, position + 6)
    expected = run(logits, sampling, positions)
    actual = run(logits, sampling, positions, sample_tokens=SampleTokens(ops=OPS))
    for name in ("finite", "allowed"):
        assert np.array_equal(getattr(actual, name), getattr(expected, name))
    assert actual.token_ids[actual.succeeded].tolist() == expected.token_ids[expected.succeeded].tolist()
    assert (actual.listing is None) == (expected.listing is None)
    if actual.listing is not None and expected.listing is not None:
        for field in dataclasses.fields(actual.listing):
            assert np.array_equal(getattr(actual.listing, field.name), getattr(expected.listing, field.name)), field.name


def test_the_op_draws_all_rows_but_greedy_failed_and_those_that_want_logprobs_of_what_is_drawn_from() -> None:
    logits = rows(7)
    logits[3, 1] = float("nan")
    sampling = parameters(
        7,
        temperature=[0.8, 0, 0.8, 0.8, 0.8, 0.8, 0.8],
        top_k=[0, 5, 5, 5, 0, 5, 5],
        num_logprobs=[-1, -1, 2, -1, 2, -1, -1],
        processed_logprobs=[False, False, False, False, True, False, True],
        banned=token_lists([[], [], [], [], [], list(range(VOCAB)), [5]]),
    )
    op = Counting()
    run(logits, sampling, sample_tokens=op)
    assert op.drawn == [[True, False, True, False, False, False, True]]


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.9, "num_logprobs": 1, "processed_logprobs": True}], ids=str)
def test_the_op_is_not_run_where_it_would_draw_nothing(changes: dict[str, Any]) -> None:
    op = Counting()
    run(rows(3), parameters(3, **changes), sample_tokens=op)
    assert op.drawn == []


def test_no_rows_are_no_tokens() -> None:
    tokens, is_free = SampleTokens(ops=OPS)(
        torch.empty(0, VOCAB), torch.ones(0), torch.zeros(0, dtype=torch.int32), torch.ones(0), torch.zeros(0),
        torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64),
    )  # fmt: skip
    assert tokens.shape == is_free.shape == (0,)


def sampled(sampler: Sampler, hidden: torch.Tensor) -> SampledStep:
    step = [CheckRow(token_ids=np.zeros(1, np.int32), context_len=4, blocks=np.zeros(1, np.int32)) for _ in hidden]
    batch = make_check_batch(step, CheckSampling(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01))
    with torch.inference_mode():
        plan = sampler.plan(batch)
        return sampler.finish(batch, plan, hidden, sampler.score(batch, plan, hidden))


def test_a_model_for_a_gpu_brings_the_op_which_its_sampler_uses() -> None:
    with torch.no_grad():
        model = build_model(model_config_of(TINY), dtype=torch.float32, ops=OPS)
        fill_randomly(model, torch.device("cpu"))
    assert type(model.sample_tokens) is SampleTokens
    # More rows than are sampled at once.
    hidden = torch.randn(300, TINY["hidden_size"], generator=torch.Generator().manual_seed(1))
    model.sample_tokens = op = Counting()
    found = sampled(Sampler(model, nothing_kept), hidden)
    assert [len(rows) for rows in op.drawn] == [256, 44]
    model.sample_tokens = None
    expected = sampled(Sampler(model, nothing_kept), hidden)
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert len(set(found.token_ids.tolist())) > 10
    assert found.logprobs is not None
    assert expected.logprobs is not None
    assert np.array_equal(found.logprobs.values, expected.logprobs.values)
