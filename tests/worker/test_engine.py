"""One step of a tiny model: what is read, what is written, and what comes out."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from modelworker.worker.client.step import StepSampling
from modelworker.worker.engine import Engine
from modelworker.worker.errors import FatalEngineError
from modelworker.worker.result import GraphMode, SequenceErrorCode, StepResult
from modelworker_testing.checkpoints import random_table, save_table_model, save_tiny
from modelworker_testing.engines import engine_of, execute

NAN = float("nan")
PROMPT = [5, 17, 100, 3, 42]
WITH_LOGPROBS = StepSampling(num_logprobs=[0])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine_of(save_tiny(tmp_path_factory.mktemp("tiny"))) as engine:
        yield engine


def caches(engine: Engine) -> list[Tensor]:
    return [cache for layer in engine.kv_cache.layers for cache in layer]


def fill(engine: Engine, value: float) -> None:
    with torch.inference_mode():
        for cache in caches(engine):
            cache.fill_(value)


def raising(error: Exception) -> Callable[[Tensor], Tensor]:
    def fail(hidden_states: Tensor) -> Tensor:
        raise error

    return fail


def logprob(result: StepResult) -> float:
    assert result.logprobs is not None
    return float(result.logprobs.values[0])


def test_a_step_writes_exactly_the_slots_of_its_new_tokens(engine: Engine) -> None:
    for filler in (7.25, NAN):
        fill(engine, filler)
        execute(engine, query_lens=[5, 2], context_lens=[0, 0], token_ids=[*PROMPT, 1, 2], tables=[[9, 3], [31]])
        written = {(9, 0), (9, 1), (9, 2), (9, 3), (3, 0), (31, 0), (31, 1)}
        for cache, block, offset in itertools.product(caches(engine), range(32), range(4)):
            values = cache[block, :, offset]
            untouched = values.isnan().all() if filler != filler else values.eq(filler).all()  # noqa: PLR0124  (NaN)
            assert bool(untouched) == ((block, offset) not in written)


def test_a_pool_full_of_nan_gives_the_tokens_of_a_zeroed_one(engine: Engine) -> None:
    outcomes = []
    for filler in (0.0, NAN):
        fill(engine, filler)
        table = [[4, 11, 30]]
        results = [execute(engine, query_lens=[5], context_lens=[0], token_ids=PROMPT, tables=table, sampling=WITH_LOGPROBS)]
        for context in range(5, 8):
            token = int(results[-1].sampled_ids[0])
            results.append(
                execute(engine, query_lens=[1], context_lens=[context], token_ids=[token], tables=table, sampling=WITH_LOGPROBS)
            )
        assert not any(result.sequence_errors for result in results)
        outcomes.append([(int(result.sampled_ids[0]), logprob(result)) for result in results])
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("length", range(1, 17))
def test_chunks_of_any_length_end_in_the_logprob_of_the_whole_prompt(engine: Engine, length: int) -> None:
    tokens = [(7 * position + 3) % 101 for position in range(length)]
    tables = [[8, 2, 19, 5]]
    fill(engine, NAN)
    whole = execute(engine, query_lens=[length], context_lens=[0], token_ids=tokens, tables=tables, sampling=WITH_LOGPROBS)
    for chunk in (1, 3, 4, 5):
        fill(engine, NAN)
        for start in range(0, length, chunk):
            part = tokens[start : start + chunk]
            result = execute(
                engine, query_lens=[len(part)], context_lens=[start], token_ids=part, tables=tables, sampling=WITH_LOGPROBS
            )
        assert result.sampled_ids[0] == whole.sampled_ids[0]
        assert logprob(result) == pytest.approx(logprob(whole), abs=1e-5)


def test_a_sequence_in_a_batch_gives_what_it_gives_alone(engine: Engine) -> None:
    """Eager products of other shapes sum in another order: fp32 logprobs agree within 1e-5, and the tokens are the same."""
    prompts = [[(row * 31 + 7 * position) % 101 for position in range(row % 5 + 1)] for row in range(8)]
    tables = [[4 * row + 1, 4 * row + 2] if row < 7 else [30, 31] for row in range(8)]
    alone = []
    for prompt, table in zip(prompts, tables, strict=True):
        fill(engine, NAN)
        result = execute(
            engine, query_lens=[len(prompt)], context_lens=[0], token_ids=prompt, tables=[table], sampling=WITH_LOGPROBS
        )
        alone.append((int(result.sampled_ids[0]), logprob(result)))
    for size in (2, 5, 8):
        fill(engine, NAN)
        result = execute(
            engine, query_lens=[len(prompt) for prompt in prompts[:size]], context_lens=[0] * size,
            token_ids=list(itertools.chain(*prompts[:size])), tables=tables[:size], sampling=StepSampling(num_logprobs=[0] * size),
        )  # fmt: skip
        assert result.sampled_ids.tolist() == [token for token, _ in alone[:size]]
        assert result.logprobs is not None
        np.testing.assert_allclose(result.logprobs.values, [value for _, value in alone[:size]], atol=1e-5)


def test_rows_that_share_prefix_blocks_read_them_and_a_row_may_read_what_another_writes_in_this_step(engine: Engine) -> None:
    fill(engine, NAN)
    tokens = [11, 22, 33, 44, 55, 66]
    whole = execute(engine, query_lens=[6], context_lens=[0], token_ids=tokens, tables=[[1, 2]], sampling=WITH_LOGPROBS)
    fill(engine, NAN)
    both = execute(
        engine, query_lens=[4, 2], context_lens=[0, 4], token_ids=tokens, tables=[[7], [7, 9]], sample=[False, True],
        sampling=StepSampling(num_logprobs=[-1, 0]),
    )  # fmt: skip
    assert both.sampled_counts.tolist() == [0, 1]
    assert both.sampled_ids[0] == whole.sampled_ids[0]
    assert logprob(both) == pytest.approx(logprob(whole), abs=1e-5)


def test_an_empty_step_gives_an_empty_result_and_the_next_step_works(engine: Engine) -> None:
    result = execute(engine, query_lens=[], context_lens=[], token_ids=[], tables=[])
    assert len(result.sampled_counts) == len(result.sampled_ids) == 0
    assert result.sequence_errors == ()
    assert len(execute(engine, query_lens=[1], context_lens=[0], token_ids=[1], tables=[[1]]).sampled_ids) == 1


def test_a_step_in_which_no_row_samples_writes_the_cache_and_returns_no_token(engine: Engine) -> None:
    fill(engine, NAN)
    result = execute(engine, query_lens=[3], context_lens=[0], token_ids=[1, 2, 3], tables=[[5]], sample=[False])
    assert result.sampled_counts.tolist() == [0]
    assert caches(engine)[0][5, :, :3].isfinite().all()


def test_the_answer_says_how_the_step_ran_and_where_its_time_went(engine: Engine) -> None:
    result = execute(engine, query_lens=[3, 1], context_lens=[0, 0], token_ids=[1, 2, 3, 4], tables=[[5], [6]])
    assert (result.graph.mode, result.graph.padded_tokens, result.graph.padded_sequences) == (GraphMode.NONE, 4, 2)
    assert not result.graph.compiled
    assert result.graph.fallback_reason == "not_decode"
    assert min(result.timings.prepare_ns, result.timings.forward_ns, result.timings.sample_ns) > 0


def test_a_reset_zeroes_the_cache(engine: Engine) -> None:
    fill(engine, NAN)
    engine.reset_kv_cache()
    assert all(cache.eq(0).all() for cache in caches(engine))


def test_the_warm_up_leaves_a_zeroed_cache_and_its_findings_in_the_description(tmp_path: Path) -> None:
    with engine_of(save_tiny(tmp_path)) as fresh:
        assert all(cache.eq(0).all() for cache in caches(fresh))
        assert fresh.description.self_check.passed
        assert any("agree within" in finding for finding in fresh.description.self_check.findings)
        assert fresh.description.degradations == ()


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    wanted = random_table(1)
    with engine_of(save_table_model(tmp_path_factory.mktemp("poisoned"), wanted, poisoned_tokens=(7,))) as engine:
        yield engine


def test_a_row_with_nan_gets_an_error_and_no_token_and_its_neighbours_are_untouched(poisoned: Engine) -> None:
    def run(middle: int) -> StepResult:
        poisoned.reset_kv_cache()
        return execute(
            poisoned, query_lens=[2, 5, 1], context_lens=[0, 0, 0], token_ids=[1, 2, 3, 4, 5, 6, middle, 9],
            tables=[[1], [20, 12, 6], [3]], sampling=StepSampling(temperature=[0, 0.7, 0.7], seed=[1, 2, 3], has_seed=[True] * 3),
        )  # fmt: skip

    clean, failed = run(8), run(7)
    assert clean.sampled_counts.tolist() == [1, 1, 1]
    assert failed.sampled_counts.tolist() == [1, 0, 1]
    assert failed.sampled_ids.tolist() == clean.sampled_ids[[0, 2]].tolist()
    assert [(failure.index, failure.code) for failure in failed.sequence_errors] == [(1, SequenceErrorCode.NON_FINITE_LOGITS)]
    # The row's 5 tokens lie in the first two blocks of its table; the third is not in use.
    assert failed.tainted_block_ids.tolist() == [12, 20]


def test_a_row_that_samples_nothing_is_reported_when_its_kv_can_not_be_trusted(poisoned: Engine) -> None:
    result = execute(
        poisoned, query_lens=[3, 1], context_lens=[0, 0], token_ids=[1, 7, 2, 3], tables=[[4], [5]], sample=[False, True]
    )
    assert [(failure.index, failure.code) for failure in result.sequence_errors] == [(0, SequenceErrorCode.NON_FINITE_HIDDEN_STATE)]
    assert result.tainted_block_ids.tolist() == [4]
    assert result.sampled_counts.tolist() == [0, 1]


def test_logits_of_the_table_model_are_the_wanted_ones(tmp_path: Path) -> None:
    wanted = random_table(2, scale=4)
    with engine_of(save_table_model(tmp_path, wanted)) as engine:
        tokens = list(range(64))
        for chunk in (tokens[:8], tokens[8:16]):
            result = execute(
                engine, query_lens=[1] * 8, context_lens=[0] * 8, token_ids=chunk, tables=[[row + 1] for row in range(8)],
                sampling=StepSampling(num_logprobs=[0] * 8),
            )  # fmt: skip
            assert result.sampled_ids.tolist() == wanted[chunk].argmax(-1).tolist()
            assert result.logprobs is not None
            np.testing.assert_allclose(result.logprobs.values, wanted[chunk].log_softmax(-1).amax(-1), atol=1e-4)


def test_unseeded_rows_draw_anew_each_time_and_seeded_ones_repeat(tmp_path: Path) -> None:
    with engine_of(save_table_model(tmp_path, torch.zeros(101, 101))) as engine:
        draws = []
        for _ in range(20):
            result = execute(
                engine, query_lens=[1, 1], context_lens=[0, 0], token_ids=[1, 1], tables=[[1], [2]],
                sampling=StepSampling(temperature=[1.0, 1.0], seed=[42, 0], has_seed=[True, False]),
            )  # fmt: skip
            draws.append(result.sampled_ids.tolist())
    assert len({seeded for seeded, _ in draws}) == 1
    assert len({unseeded for _, unseeded in draws}) > 10


def test_a_fault_of_the_device_is_fatal_and_any_other_error_is_not(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for error, expected in (
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700), FatalEngineError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (ValueError("a defect"), ValueError),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(engine.model, "greedy", raising(error))
            with pytest.raises(expected):
                execute(engine, query_lens=[1], context_lens=[0], token_ids=[1], tables=[[1]])
    assert len(execute(engine, query_lens=[1], context_lens=[0], token_ids=[1], tables=[[1]]).sampled_ids) == 1


def test_steps_neither_track_gradients_nor_change_the_callers_grad_mode(engine: Engine) -> None:
    with torch.enable_grad():
        execute(engine, query_lens=[1], context_lens=[0], token_ids=[1], tables=[[1]])
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    assert not any(parameter.requires_grad for parameter in engine.model.parameters())
