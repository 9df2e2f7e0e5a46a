"""Lists of tokens, masks, histories, drafts and prompt logprobs on the wire: what is refused, and by which name."""

import math
from typing import Any

import numpy as np
import pytest

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.batch import StepBatch
from modelworker.worker.client import StepTokens, build_step
from modelworker.worker.errors import InvalidStepError
from modelworker.worker.wire import parse_step
from modelworker_testing.descriptions import VOCAB_SIZE, describe_worker
from modelworker_testing.steps import step_request

ROWS = ((3, 1, [1]), (0, 3, [2]), (3, 3, [3, 4]))
REPETITION = pb.SamplingParams(repetition=[2, 1, 1])
Lists = pb.TokenIdLists


def parse(request: pb.ExecuteStepRequest) -> StepBatch:
    return parse_step(request, describe_worker(), arrival_ns=0, deadline_ns=None)


def refused(**fields: Any) -> dict[str, str]:
    with pytest.raises(InvalidStepError) as caught:
        parse(step_request(*ROWS, **fields))
    return {violation.field: violation.description for violation in caught.value.violations}


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"draft_lens": [0, 0, 1]}, "draft_lens[2]"),
        ({"draft_lens": [0, 0, -1]}, "draft_lens[2]"),
        ({"draft_lens": [0, 0, 2**31 - 1]}, "draft_lens[2]"),
        ({"draft_lens": [1, 0, 0]}, "draft_lens[0]"),
        ({"draft_lens": [0, 0, 2], "sample": [True, True, False]}, "draft_lens[2]"),
        ({"draft_lens": [0, 0]}, "draft_lens"),
        ({"allowed_ids": Lists(counts=[1, 0, 0], token_ids=[-1])}, "allowed_ids.token_ids[0]"),
        ({"allowed_ids": Lists(counts=[1, 0, 0], token_ids=[VOCAB_SIZE])}, "allowed_ids.token_ids[0]"),
        ({"banned_ids": Lists(counts=[0, 0, 1], token_ids=[2**31 - 1])}, "banned_ids.token_ids[0]"),
        ({"banned_ids": Lists(counts=[0, 0, 2], token_ids=[1])}, "banned_ids.token_ids"),
        ({"banned_ids": Lists(counts=[1], token_ids=[1])}, "banned_ids.counts"),
        ({"banned_ids": Lists(token_ids=[1])}, "banned_ids.counts"),
        ({"banned_ids": Lists(counts=[2, -1, 0], token_ids=[1])}, "banned_ids.counts[1]"),
        ({"banned_ids": Lists(counts=[2**31 - 1] * 3, token_ids=[1])}, "banned_ids.token_ids"),
        ({"logit_bias": pb.LogitBias(counts=[1, 0, 0], token_ids=[101], values=[5])}, "logit_bias.token_ids[0]"),
        ({"logit_bias": pb.LogitBias(counts=[1, 0, 0], token_ids=[1], values=[math.nan])}, "logit_bias.values[0]"),
        ({"logit_bias": pb.LogitBias(counts=[1, 0, 0], token_ids=[1], values=[-math.inf])}, "logit_bias.values[0]"),
        ({"logit_bias": pb.LogitBias(counts=[1, 0, 0], token_ids=[1], values=[1, 2])}, "logit_bias.values"),
        ({"logit_bias": pb.LogitBias(counts=[0, 3, 0], token_ids=[4, 5, 4], values=[1, 2, 3])}, "logit_bias.token_ids[2]"),
        ({"grammar": pb.GrammarMasks(rows=[0], bitmasks=bytes(15))}, "grammar.bitmasks"),
        ({"grammar": pb.GrammarMasks(bitmasks=bytes(16))}, "grammar.bitmasks"),
        ({"grammar": pb.GrammarMasks(rows=[3], bitmasks=bytes(16))}, "grammar.rows[0]"),
        ({"grammar": pb.GrammarMasks(rows=[-1], bitmasks=bytes(16))}, "grammar.rows[0]"),
        ({"grammar": pb.GrammarMasks(rows=[1, 0], bitmasks=bytes(32))}, "grammar.rows[1]"),
        ({"grammar": pb.GrammarMasks(rows=[1, 1], bitmasks=bytes(32))}, "grammar.rows[0]"),
        ({"grammar": pb.GrammarMasks(rows=[2, 2], bitmasks=bytes(32)), "draft_lens": [0, 0, 2]}, "grammar.rows[0]"),
        ({"sampling": REPETITION}, "history.prompt_lens[0]"),
        (
            {"sampling": REPETITION, "history": pb.TokenHistory(prompt_lens=[2, 0, 0], output_lens=[0, 0, 0], token_ids=[1, 2])},
            "history.prompt_lens[0]",
        ),
        (
            {"sampling": REPETITION, "history": pb.TokenHistory(prompt_lens=[5, 0, 0], output_lens=[0, 0, 0], token_ids=[1] * 5)},
            "history.prompt_lens[0]",
        ),
        ({"history": pb.TokenHistory(prompt_lens=[1, 0, 0], token_ids=[1])}, "history.output_lens"),
        ({"history": pb.TokenHistory(prompt_lens=[1, 0, 0], output_lens=[0, 0, 0], token_ids=[-1])}, "history.token_ids[0]"),
        ({"history": pb.TokenHistory(prompt_lens=[1, 0, 0], output_lens=[0, 0, 0])}, "history.token_ids"),
        ({"history": pb.TokenHistory(prompt_lens=[-1, 0, 0], output_lens=[1, 0, 0])}, "history.prompt_lens[0]"),
        ({"prompt_logprobs": [True, True]}, "prompt_logprobs"),
        ({"prompt_logprobs": [True] * 3, "next_prompt_ids": [0, 101, -1]}, "next_prompt_ids[1]"),
        ({"prompt_logprobs": [True] * 3, "next_prompt_ids": [0, -2, -1]}, "next_prompt_ids[1]"),
        ({"prompt_logprobs": [True, False, True], "next_prompt_ids": [0, 5, -1]}, "next_prompt_ids[1]"),
        ({"next_prompt_ids": [-1, 5, -1]}, "next_prompt_ids[1]"),
    ],
)
def test_a_malformed_field_is_refused_by_its_path(fields: dict[str, Any], path: str) -> None:
    found = refused(**fields)
    assert list(found) == [path]
    assert "found " in found[path]
    assert "expected" in found[path]


def test_all_that_is_said_of_single_tokens_reaches_the_batch() -> None:
    masks = np.arange(3 * VOCAB_SIZE).reshape(3, VOCAB_SIZE) % 5 == 0
    request = build_step(
        query_lens=[1, 3, 3], context_lens=[3, 0, 3], token_ids=[1] * 7, block_counts=[1, 1, 2], block_ids=[1, 2, 3, 4],
        draft_lens=[0, 0, 2], prompt_logprobs=[False, True, False], next_prompt_ids=[-1, 6, -1],
        tokens=StepTokens(
            allowed_ids=[[7], [], [8, 9]], banned_ids=[[], [5, 5], []], logit_bias=[{}, {3: 0.5, 1: -1e30}, {100: 2.0}],
            prompt_ids=[[1, 2], [], [3]], output_ids=[[], [], [4, 5]], grammar_rows=[2, 2, 2], grammar_masks=masks,
        ),
    )  # fmt: skip
    batch = parse(request)
    sampling, wanted = batch.sampling, batch.prompt_logprobs
    assert sampling is not None
    assert sampling.allowed is not None
    assert sampling.banned is not None
    assert sampling.bias is not None
    assert sampling.grammar is not None
    assert sampling.history is not None
    assert wanted is not None
    assert batch.draft_lens.tolist() == [0, 0, 2]
    assert (sampling.allowed.counts.tolist(), sampling.allowed.token_ids.tolist()) == ([1, 0, 2], [7, 8, 9])
    assert (sampling.banned.counts.tolist(), sampling.banned.token_ids.tolist()) == ([0, 2, 0], [5, 5])
    assert sampling.bias.tokens.counts.tolist() == [0, 2, 1]
    assert sampling.bias.tokens.token_ids.tolist() == [3, 1, 100]
    np.testing.assert_allclose(sampling.bias.values, np.array([0.5, -1e30, 2.0], np.float32))
    assert sampling.grammar.rows.tolist() == [2, 2, 2]
    bits = np.unpackbits(sampling.grammar.bits, axis=1, count=VOCAB_SIZE, bitorder="little")
    assert bits.astype(bool).tolist() == masks.tolist()
    assert sampling.history.prompt_lens.tolist() == [2, 0, 1]
    assert sampling.history.output_lens.tolist() == [0, 0, 2]
    assert sampling.history.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert (wanted.wanted.tolist(), wanted.next_ids.tolist()) == ([False, True, False], [-1, 6, -1])


def test_a_history_may_reach_from_the_context_to_the_last_token_before_the_drafts() -> None:
    sampling = pb.SamplingParams(presence=[0, 0, 1])
    for length, drafts in ((3, 0), (6, 0), (3, 2), (4, 2)):
        history = pb.TokenHistory(prompt_lens=[0, 0, length], output_lens=[0, 0, 0], token_ids=[1] * length)
        parse(step_request(*ROWS, sampling=sampling, history=history, draft_lens=[0, 0, drafts]))
    history = pb.TokenHistory(prompt_lens=[0, 0, 5], output_lens=[0, 0, 0], token_ids=[1] * 5)
    found = refused(sampling=sampling, history=history, draft_lens=[0, 0, 2])
    assert found["history.prompt_lens[2]"].startswith("row 2: found 5 tokens of prompt and output, expected 3 .. 4: ")


@pytest.mark.parametrize("part", ["allowed_ids", "banned_ids", "logit_bias", "grammar", "history"])
def test_a_part_that_says_nothing_leaves_a_step_plainly_greedy(part: str) -> None:
    request = step_request(*ROWS)
    getattr(request, part).SetInParent()
    assert parse(request).sampling is None
    if part != "grammar":
        counts = "prompt_lens" if part == "history" else "counts"
        getattr(getattr(request, part), counts).extend([0, 0, 0])
        if part == "history":
            request.history.output_lens.extend([0, 0, 0])
        assert parse(request).sampling is None


def test_rows_that_ask_for_nothing_leave_no_prompt_logprobs() -> None:
    assert parse(step_request(*ROWS, prompt_logprobs=[False] * 3, next_prompt_ids=[-1] * 3)).prompt_logprobs is None
