"""Sampling through a real server whose model's logits are known: what other workers got wrong, and what a router relies on."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from modelworker.worker.client import Client, FencedSession, InvalidRequestError, StepAnswer, StepSampling, StepTokens, build_step
from modelworker.worker.result import SequenceErrorCode
from modelworker.worker.scheduler import Request, Sampling, Scheduler
from modelworker_testing.checkpoints import random_table, save_table_model
from modelworker_testing.sampling_reference import Wish, distribution, edited
from modelworker_testing.worker_process import WorkerProcess, worker_process

VOCAB = 101
WANTED = random_table(1, vocab_size=VOCAB)
SIZES = ("--block-size", "4", "--num-blocks", "64", "--max-sequences", "8", "--max-tokens-per-step", "64")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    with worker_process(save_table_model(tmp_path_factory.mktemp("table"), WANTED), *SIZES) as process:
        yield process


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[Client]:
    with Client(worker.address) as client:
        yield client


def step(client: Client, rows: list[list[int]], **fields: Any) -> StepAnswer:
    """Prompts, each in blocks of its own."""
    return client.execute(
        build_step(
            query_lens=[len(row) for row in rows], context_lens=[0] * len(rows),
            token_ids=[token for row in rows for token in row], block_counts=[4] * len(rows),
            block_ids=list(range(1, 4 * len(rows) + 1)), **fields,
        )
    )  # fmt: skip


def test_s02_greedy_rows_beside_random_ones_are_the_argmax_and_nothing_is_nan(client: Client) -> None:
    best = int(WANTED[20].argmax())
    for seed in range(10):
        answer = step(
            client, [[20], [20], [21]], tokens=StepTokens(banned_ids=[[best], [], []]),
            sampling=StepSampling(
                temperature=[0, 0.7, 0], seed=[seed] * 3, has_seed=[True] * 3, num_logprobs=[20] * 3, logprobs_mode=[1, 1, 0]
            ),
        )  # fmt: skip
        assert answer.row_errors == ()
        assert answer.sampled_ids[0] == int(WANTED[20].topk(2).indices[1])
        assert answer.sampled_ids[2] == int(WANTED[21].argmax())
        assert answer.logprobs is not None
        assert np.isfinite(answer.logprobs.values).all()
        assert best not in answer.logprobs.token_ids[:21]


def test_s06_raw_logprobs_are_the_models_and_processed_ones_those_of_the_kept_tokens(client: Client) -> None:
    answer = step(
        client, [[40], [40]],
        sampling=StepSampling(
            temperature=[0.5] * 2, top_k=[6] * 2, seed=[5] * 2, has_seed=[True] * 2, num_logprobs=[20] * 2, logprobs_mode=[0, 1]
        ),
    )  # fmt: skip
    assert answer.logprobs is not None
    assert answer.logprobs.modes.tolist() == [0, 1]
    assert answer.logprobs.counts.tolist() == [21, 7]
    raw, processed = answer.logprobs_of_tokens()
    order = WANTED[40].argsort(descending=True, stable=True)
    for ids, values, ranks in (raw, processed):
        assert ids[0] == answer.sampled_ids[0]
        assert ids[1:].tolist() == order[: len(ids) - 1].tolist()
        assert ranks[1:].tolist() == list(range(1, len(ids)))
        assert ranks[0] == order.tolist().index(ids[0]) + 1
        assert values[0] == values[ranks[0]]
    np.testing.assert_allclose(raw[1], WANTED[40].log_softmax(-1)[raw[0].tolist()], atol=1e-4)
    np.testing.assert_allclose(
        processed[1], (WANTED[40][order[:6]] / 0.5).log_softmax(-1)[[processed[2][0] - 1, *range(6)]], atol=1e-4
    )
    assert np.exp(processed[1][1:].astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize(
    ("tokens", "path"),
    [
        (StepTokens(logit_bias=[{101: 5.0}, {}]), "logit_bias.token_ids[0]"),
        (StepTokens(logit_bias=[{-1: 5.0}, {}]), "logit_bias.token_ids[0]"),
        (StepTokens(allowed_ids=[[5, 101], []]), "allowed_ids.token_ids[1]"),
        (StepTokens(banned_ids=[[2**31 - 1], []]), "banned_ids.token_ids[0]"),
        (StepTokens(prompt_ids=[[101], []]), "history.token_ids[0]"),
    ],
)
def test_s09_ids_outside_the_vocabulary_are_refused_by_their_place(client: Client, tokens: StepTokens, path: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        step(client, [[1], [2]], tokens=tokens)
    assert [violation.field for violation in error.value.violations] == [path]
    with pytest.raises(InvalidRequestError) as error:
        step(client, [[1], [2]], sampling=StepSampling(num_logprobs=[21, 0]))
    assert [violation.field for violation in error.value.violations] == ["sampling.num_logprobs[0]"]


def test_s09_a_neighbours_extras_leave_a_rows_logprobs_the_same_to_the_last_bit(client: Client) -> None:
    sampling = StepSampling(num_logprobs=[20] * 2, temperature=[0, 0.9], seed=[3, 3], has_seed=[True] * 2)
    plain = step(client, [[1], [2]], sampling=sampling)
    extras = step(
        client, [[1], [2]], sampling=StepSampling(
            num_logprobs=[20] * 2, temperature=[0, 0.9], seed=[3, 3], has_seed=[True] * 2, presence=[2, 0], frequency=[2, 0],
            repetition=[5, 1],
        ),
        tokens=StepTokens(
            logit_bias=[{0: 50.0, 100: 99.0}, {}], banned_ids=[[0, 100], []], prompt_ids=[[100], []],
            allowed_ids=[[5, 6, 99, 100], []],
        ),
    )  # fmt: skip
    first, second = list(plain.logprobs_of_tokens())[1], list(extras.logprobs_of_tokens())[1]
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert plain.sampled_ids[1] == extras.sampled_ids[1]


@pytest.mark.parametrize("reverse", [False, True])
def test_s11_penalties_are_right_in_any_order_of_rows(client: Client, reverse: bool) -> None:
    best = WANTED[33].argsort(descending=True).tolist()
    wishes = [
        Wish(),
        Wish(repetition=2.0, prompt=(best[0], 5), output=(best[1],)),
        Wish(presence=2.0, frequency=1.0, prompt=(best[0],), output=(best[1], best[1])),
    ]
    rows = wishes[::-1] if reverse else wishes
    answer = client.execute(
        build_step(
            query_lens=[1] * 3, context_lens=[3] * 3, token_ids=[33] * 3, block_counts=[1] * 3, block_ids=[1, 2, 3],
            sampling=StepSampling(
                presence=[row.presence for row in rows], frequency=[row.frequency for row in rows],
                repetition=[row.repetition for row in rows], num_logprobs=[0] * 3, logprobs_mode=[1] * 3,
            ),
            tokens=StepTokens(prompt_ids=[row.prompt for row in rows], output_ids=[row.output for row in rows]),
        )
    )  # fmt: skip
    assert answer.logprobs is not None
    for index, row in enumerate(rows):
        # The row's own token follows its history.
        changed = edited(WANTED[33].tolist(), replace(row, output=(*row.output, 33)))
        token = int(np.argmax(changed))
        assert answer.sampled_ids[index] == token
        assert answer.logprobs.values[index] == pytest.approx(np.log(distribution(changed, row)[token]), abs=1e-4)
    assert len(set(answer.sampled_ids.tolist())) > 1


def test_a_row_whose_masks_leave_no_token_fails_alone_and_its_blocks_are_fine(client: Client) -> None:
    masks = np.zeros((1, VOCAB), np.bool_)
    masks[0, 4] = True
    answer = step(
        client, [[1], [2], [3]], sampling=StepSampling(temperature=[1.0, 1.0, 0.0], num_logprobs=[1, 1, 1]),
        tokens=StepTokens(grammar_rows=[1], grammar_masks=masks, banned_ids=[[], [4], []]),
    )  # fmt: skip
    assert answer.sampled_counts.tolist() == [1, 0, 1]
    assert [(error.index, error.code) for error in answer.row_errors] == [(1, SequenceErrorCode.NO_ALLOWED_TOKEN)]
    assert answer.tainted_block_ids.tolist() == []
    assert client.info().counters['sequence_errors_total{code="NO_ALLOWED_TOKEN"}'] >= 1


def test_prompt_logprobs_are_those_of_each_token_after_those_before_it_in_one_step_or_in_chunks(client: Client) -> None:
    prompt = [5, 9, 2, 80, 33, 34]
    right = WANTED[prompt[:-1]].log_softmax(-1)[range(5), prompt[1:]]
    ranks = [WANTED[a].argsort(descending=True).tolist().index(b) + 1 for a, b in itertools.pairwise(prompt)]
    whole = step(client, [prompt, [1, 2]], prompt_logprobs=[True, False]).prompt_logprobs
    assert whole is not None
    assert whole.counts.tolist() == [5, 0]
    assert whole.token_ids.tolist() == prompt[1:]
    assert whole.ranks.tolist() == ranks
    np.testing.assert_allclose(whole.values, right, atol=1e-4)
    found: list[float] = []
    for start, end in ((0, 2), (2, 3), (3, 6)):
        answer = client.execute(
            build_step(
                query_lens=[end - start], context_lens=[start], token_ids=prompt[start:end], block_counts=[2], block_ids=[1, 2],
                sample=[end == 6], prompt_logprobs=[True], next_prompt_ids=[prompt[end] if end < 6 else -1],
            )
        )  # fmt: skip
        assert answer.prompt_logprobs is not None
        found += answer.prompt_logprobs.values.tolist()
    np.testing.assert_allclose(found, right, atol=1e-4)
    assert step(client, [[1]]).prompt_logprobs is None


def test_drafts_are_accepted_through_the_server_as_far_as_they_are_right(client: Client) -> None:
    chain = [30]
    for _ in range(3):
        chain.append(int(WANTED[chain[-1]].argmax()))
    answer = step(client, [chain[:3], [30, chain[1], (chain[2] + 1) % VOCAB], [30]], draft_lens=[2, 2, 0])
    assert answer.tokens_of_rows == [chain[1:], chain[1:3], chain[1:2]]
    with pytest.raises(InvalidRequestError) as error:
        step(client, [[1, 2], [3, 4, 5]], draft_lens=[1, 1], sample=[False, True])
    assert sorted(violation.field for violation in error.value.violations) == ["draft_lens[0]", "draft_lens[1]"]


def test_the_scheduler_gets_the_most_probable_tokens_with_their_logprobs(client: Client) -> None:
    events: list[Any] = []
    session = FencedSession(client)
    scheduler = Scheduler(session)
    scheduler.add(Request(prompt_ids=(33,), max_tokens=2, sampling=Sampling(num_logprobs=3), stop_token_ids=frozenset()))
    scheduler.run_until_idle(events.append)
    session.release()
    first = next(event.logprobs for event in events if getattr(event, "logprobs", None) is not None)
    assert first.rank == 1
    assert [token for token, _ in first.top] == WANTED[33].topk(3).indices.tolist()
