"""Drafts: the tokens are those of plain decoding, whatever was drafted."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworker.graphs.dispatch import Choice, Reason
from modelworker.worker.check_batch import CheckRow, make_check_batch
from modelworker.worker.client.step import StepSampling
from modelworker.worker.client.step_tokens import StepTokens
from modelworker.worker.engine import Engine
from modelworker.worker.result import GraphMode, SequenceErrorCode, StepResult
from modelworker.worker.sampling.positions import sampled_positions
from modelworker.worker.sampling.verification import verify
from modelworker.worker.settings import ExecutionSettings
from modelworker.worker.step_runner import Way
from modelworker_testing.batches import make_batch
from modelworker_testing.checkpoints import random_table, save_table_model
from modelworker_testing.engines import engine_of, execute, tiny_settings_with

VOCAB = 101
WANTED = random_table(5, vocab_size=VOCAB, scale=2)
BLOCKS = 6
ROWS = 3
PROMPT = [11, 12, 13]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    execution = ExecutionSettings(optimization_level=0, graph_mode="FULL_DECODE_ONLY", decode_query_lens=(1, 3))
    model = save_table_model(tmp_path_factory.mktemp("table"), WANTED)
    with engine_of(model, tiny_settings_with(execution=execution)) as engine:
        yield engine


def tables(num_rows: int) -> list[list[int]]:
    return [list(range(1 + row * BLOCKS, 1 + (row + 1) * BLOCKS)) for row in range(num_rows)]


def run(engine: Engine, rows: list[list[int]], contexts: list[int], **fields: Any) -> StepResult:
    return execute(
        engine, query_lens=[len(row) for row in rows], context_lens=contexts,
        token_ids=[token for row in rows for token in row], tables=tables(len(rows)), **fields,
    )  # fmt: skip


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": [0.9, 0.0, 1.3], "seed": [1, 2, 3], "has_seed": [True] * 3, "top_p": [0.9, 1, 1]},
    "penalties": {
        "temperature": [0.0, 0.0, 1.0], "seed": [1, 2, 3], "has_seed": [True] * 3, "repetition": [1.5, 1, 2.0],
        "presence": [0, 1.5, 0], "frequency": [0, 0.5, 1.0],
    },
}  # fmt: skip


def step_fields(kind: str, sequences: list[list[int]], contexts: list[int]) -> dict[str, Any]:
    fields: dict[str, Any] = {"sampling": StepSampling(**SAMPLINGS[kind])} if kind != "greedy" else {}
    if kind == "penalties":
        outputs = [row[len(PROMPT) : context] for row, context in zip(sequences, contexts, strict=True)]
        fields["tokens"] = StepTokens(prompt_ids=[PROMPT] * ROWS, output_ids=outputs)
    return fields


def plain_decode(engine: Engine, kind: str, num_tokens: int) -> list[list[int]]:
    sequences = [list(PROMPT) for _ in range(ROWS)]
    result = run(engine, sequences, [0] * ROWS, **step_fields(kind, sequences, [len(PROMPT)] * ROWS))
    for _ in range(num_tokens):
        for row, token in enumerate(result.sampled_ids.tolist()):
            sequences[row].append(token)
        contexts = [len(row) - 1 for row in sequences]
        result = run(engine, [row[-1:] for row in sequences], contexts, **step_fields(kind, sequences, contexts))
    return sequences


@pytest.mark.parametrize("kind", SAMPLINGS)
@pytest.mark.parametrize("drafter", ["perfect", "random", "adversarial", "half"])
def test_tokens_with_drafts_are_those_of_plain_decoding(engine: Engine, kind: str, drafter: str) -> None:
    expected = plain_decode(engine, kind, 12)
    random = np.random.default_rng(3)
    sequences = [row[: len(PROMPT) + 1] for row in expected]
    num_steps = 0
    while min(map(len, sequences)) < 14:
        num_steps += 1
        tokens, contexts, drafts = [], [], []
        for row, right in zip(sequences, expected, strict=True):
            context = len(row) - 1
            future = [*right[context + 1 :], *[1] * 9]
            size = 2 if drafter != "half" else int(random.integers(0, 4))
            drafted = {
                "perfect": future[:size],
                "random": random.integers(0, VOCAB, size).tolist(),
                "adversarial": [(token + 1) % VOCAB for token in future[:size]],
                "half": [*future[: size // 2], *random.integers(0, VOCAB, size - size // 2).tolist()],
            }[drafter]
            tokens.append([row[-1], *drafted])
            contexts.append(context)
            drafts.append(len(drafted))
        result = run(engine, tokens, contexts, draft_lens=drafts, **step_fields(kind, sequences, contexts))
        assert result.sequence_errors == ()
        ids = iter(result.sampled_ids.tolist())
        for row, count, most in zip(sequences, result.sampled_counts.tolist(), drafts, strict=True):
            assert 1 <= count <= 1 + most
            row += [next(ids) for _ in range(count)]
    for row, right in zip(sequences, expected, strict=True):
        size = min(len(row), len(right))
        assert row[:size] == right[:size]
    if drafter == "perfect":
        assert num_steps <= 4


def test_uniform_drafts_run_in_the_full_graph_of_their_length_and_mixed_ones_do_not(engine: Engine) -> None:
    full = run(engine, [[1, 2, 3], [4, 5, 6]], [3, 4], draft_lens=[2, 2])
    assert (full.graph.mode, full.graph.padded_tokens) == (GraphMode.FULL, 6)
    mixed = run(engine, [[1, 2, 3], [4]], [3, 4], draft_lens=[2, 0])
    assert (mixed.graph.mode, mixed.graph.fallback_reason) == (GraphMode.NONE, "not_uniform")


@pytest.mark.parametrize(
    ("contexts", "drafts"), [([0], [2]), ([0], [0]), ([3], [0]), ([3, 3], [0, 2]), ([0, 3], [0, 2]), ([0, 3], [2, 2])]
)
def test_g01_a_prompt_as_long_as_a_drafted_row_is_not_decode(engine: Engine, contexts: list[int], drafts: list[int]) -> None:
    tokens = [[21, 22, 23]] * len(contexts)
    result = run(engine, tokens, contexts, draft_lens=drafts)
    assert (result.graph.mode, result.graph.fallback_reason) == (GraphMode.NONE, "not_decode")
    ids = result.sampled_ids.tolist()
    for draft, count in zip(drafts, result.sampled_counts.tolist(), strict=True):
        found, ids = ids[:count], ids[count:]
        greedy = WANTED[[21, 22, 23]].argmax(-1).tolist()
        assert found == (greedy[-1:] if draft == 0 else greedy[:1])


def chain(start: int) -> list[int]:
    """A token and what greedy decoding makes of it."""
    tokens = [start]
    for _ in range(4):
        tokens.append(int(WANTED[tokens[-1]].argmax()))
    return tokens


def test_nan_behind_a_rejected_draft_does_not_fail_a_row_and_at_its_first_token_does(engine: Engine) -> None:
    right = chain(30)
    rows = [[30, right[1], 5], [30, 5, 6], [30, *right[1:3]], right[:3]]
    batch = make_check_batch(
        [
            CheckRow(token_ids=np.array(row, np.int32), context_len=3, blocks=np.array(table, np.int32), draft_len=2)
            for row, table in zip(rows, tables(4), strict=True)
        ]
    )
    with torch.inference_mode():
        plan = engine.sampler.plan(batch)
        inputs = engine.runner.stage(batch, None)
        hidden = engine.runner.decode(batch, inputs, Way(Choice(None, Reason.NONE))).hidden_states.clone()
        hidden[[1, 5, 6]] = torch.nan
        result = engine.sampler.finish(batch, plan, hidden, engine.sampler.score(batch, plan, hidden))
    # Row 0 fails behind its first sample, row 1 behind a rejected draft, row 2 at once.
    assert result.counts.tolist() == [1, 1, 0, 3]
    assert result.token_ids.tolist() == [right[1], right[1], *right[1:4]]
    assert [(failure.index, failure.code) for failure in result.failures] == [(2, SequenceErrorCode.NON_FINITE_LOGITS)]


def test_a_mask_that_leaves_no_token_behind_accepted_drafts_ends_the_row_before_it(engine: Engine) -> None:
    right = chain(30)
    masks = np.ones((6, VOCAB), np.bool_)
    masks[2] = False
    masks[3] = False
    result = run(
        engine, [right[:3], right[:3]], [3, 3], draft_lens=[2, 2],
        tokens=StepTokens(grammar_rows=[0, 0, 0, 1, 1, 1], grammar_masks=masks),
    )  # fmt: skip
    assert result.sampled_counts.tolist() == [2, 0]
    assert result.sampled_ids.tolist() == right[1:3]
    assert [(failure.index, failure.code) for failure in result.sequence_errors] == [(1, SequenceErrorCode.NO_ALLOWED_TOKEN)]
    assert result.tainted_block_ids.tolist() == []


def test_each_position_of_a_drafted_row_has_its_own_mask_and_logprobs(engine: Engine) -> None:
    masks = np.zeros((3, VOCAB), np.bool_)
    masks[0, 40] = masks[1, 41] = masks[2, 42] = True
    result = run(
        engine, [[30, 40, 41]], [3], draft_lens=[2], tokens=StepTokens(grammar_rows=[0, 0, 0], grammar_masks=masks),
        sampling=StepSampling(num_logprobs=[1]),
    )  # fmt: skip
    assert result.sampled_ids.tolist() == [40, 41, 42]
    assert result.logprobs is not None
    assert result.logprobs.counts.tolist() == [2, 2, 2]
    right = WANTED[[30, 40, 41]].log_softmax(-1)
    np.testing.assert_allclose(result.logprobs.values[::2], right[[0, 1, 2], [40, 41, 42]], atol=1e-4)
    assert result.logprobs.token_ids[1::2].tolist() == WANTED[[30, 40, 41]].argmax(-1).tolist()


def test_drafted_rows_with_an_open_seed_accept_as_often_as_the_distribution_says(engine: Engine) -> None:
    accepted = 0
    token = int(WANTED[50].argmax())
    for _ in range(100):
        result = run(
            engine, [[50, token]] * 4, [3] * 4, draft_lens=[1] * 4, sampling=StepSampling(temperature=[1.0] * 4)
        )  # fmt: skip
        accepted += int((result.sampled_counts == 2).sum())
    share = WANTED[50].softmax(-1)[token].item()
    assert abs(accepted / 400 - share) < 5 * (share * (1 - share) / 400) ** 0.5


@settings(max_examples=100)
@given(data=st.data())
def test_what_stands_is_what_a_look_at_each_row_says(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=5))
    batch = make_batch([(1 + drafts, 3, [1 + 2 * row, 2 + 2 * row]) for row, (drafts, _) in enumerate(rows)], vocab_size=3)
    batch.sample[:] = [samples or drafts > 0 for drafts, samples in rows]
    batch.draft_lens[:] = [drafts for drafts, _ in rows]
    positions = sampled_positions(batch)
    size = len(positions)
    ids = np.array(data.draw(st.lists(st.integers(1, 2), min_size=size, max_size=size)), np.int32)
    good = np.array(data.draw(st.lists(st.sampled_from((True, True, True, False)), min_size=size, max_size=size)), np.bool_)
    verdict = verify(batch, positions, ids, good)
    counts, standing, failed, place = [], [], [], 0
    for row, (drafts, _) in enumerate(rows):
        count = 0
        if batch.sample[row]:
            tokens = batch.token_ids[batch.query_starts[row] :][: 1 + drafts].tolist()
            for offset in range(1 + drafts):
                if not good[place + offset] or (offset > 0 and tokens[offset] != ids[place + offset - 1]):
                    break
                count += 1
            failed += [place] if not good[place] else []
            standing += range(place, place + count)
            place += 1 + drafts
        counts.append(count)
    assert (verdict.counts.tolist(), verdict.positions.tolist(), verdict.failed.tolist()) == (counts, standing, failed)
