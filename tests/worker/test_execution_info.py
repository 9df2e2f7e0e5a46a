"""How a worker of its own process says that it runs steps: WorkerInfo, answers, and `modelworker info`."""

import re
from pathlib import Path

import pytest

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.client import Client
from modelworker.worker.client.step import build_step
from modelworker.worker.command_info import format_info
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.worker_process import worker_process

LIMITS = ("--block-size", "4", "--num-blocks", "64", "--max-tokens-per-step", "64", "--threads", "1")
NONE, PIECEWISE, FULL = pb.GRAPH_MODE_NONE, pb.GRAPH_MODE_PIECEWISE, pb.GRAPH_MODE_FULL


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def run(client: Client, query_lens: list[int], context_lens: list[int]) -> tuple[int, int, int, bool, str]:
    """Runs a step over blocks that were filled before, and returns how the answer says it ran."""
    tables = [[3 * row + 1, 3 * row + 2, 3 * row + 3] for row in range(len(query_lens))]
    request = build_step(
        query_lens=query_lens,
        context_lens=context_lens,
        token_ids=[token % 101 for token in range(sum(query_lens))],
        block_counts=[3] * len(query_lens),
        block_ids=[block for table in tables for block in table],
        # A decode of several tokens is one of drafts.
        draft_lens=[query_len - 1 if context_len else 0 for query_len, context_len in zip(query_lens, context_lens, strict=True)],
    )
    answer = client.execute(request)
    return int(answer.mode), answer.padded_tokens, answer.padded_sequences, answer.compiled, answer.fallback_reason


# Flags; then the level, the graph mode, and the modes that are captured; then how prompts, decodes and prompts beyond all graphs
# run: mode, whether compiled code ran, and why no better mode.
CASES: dict[str, tuple[tuple[str, ...], tuple[int, str, set[int]], list[tuple[int, bool, str]]]] = {
    "by default": (
        (),
        (2, "FULL_AND_PIECEWISE", {PIECEWISE, FULL}),
        [(PIECEWISE, False, "not_decode"), (FULL, False, ""), (NONE, True, "over_max")],
    ),
    "eager": (
        ("--enforce-eager",),
        (0, "NONE", set()),
        [(NONE, False, "disabled"), (NONE, False, "disabled"), (NONE, False, "disabled")],
    ),
    "level 0 with FULL graphs of any mix": (
        ("--optimization-level", "0", "--graph-mode", "FULL"),
        (0, "FULL", {FULL}),
        [(FULL, False, ""), (FULL, False, ""), (NONE, False, "over_max")],
    ),
    "level 1": (
        ("--optimization-level", "1"),
        (1, "NONE", set()),
        [(NONE, True, "disabled"), (NONE, True, "disabled"), (NONE, True, "disabled")],
    ),
    "level 2 with FULL graphs of decode": (
        ("--graph-mode", "FULL_DECODE_ONLY"),
        (2, "FULL_DECODE_ONLY", {FULL}),
        [(NONE, True, "not_decode"), (FULL, False, ""), (NONE, True, "not_decode")],
    ),
    "level 3 with PIECEWISE graphs": (
        ("--optimization-level", "3", "--graph-mode", "PIECEWISE"),
        (3, "PIECEWISE", {PIECEWISE}),
        [(PIECEWISE, False, ""), (PIECEWISE, False, ""), (NONE, True, "over_max")],
    ),
    "pieces whose ops are called one by one": (
        ("--compiler", "eager"),
        (2, "FULL_AND_PIECEWISE", {PIECEWISE, FULL}),
        [(PIECEWISE, False, "not_decode"), (FULL, False, ""), (NONE, False, "over_max")],
    ),
}


# Each starts a process; those that are not in this list only in the full run.
QUICK = ("by default", "eager")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES])
def test_worker_info_and_answers_say_how_steps_run(model: Path, name: str) -> None:
    flags, (level, graph_mode, modes), expected = CASES[name]
    with worker_process(model, *LIMITS, "--max-sequences", "5", *flags) as process, Client(process.address) as client:
        info = client.info()
        prompt = run(client, [5, 3], [0, 0])
        decode = run(client, [1, 1, 1], [5, 3, 2])
        large = run(client, [11, 11, 11], [0, 0, 0])
    execution = info.execution
    assert (execution.optimization_level, execution.graph_mode) == (level, graph_mode)
    assert {size.mode for size in execution.captured} == modes
    assert all(size.cost_ms > 0 for size in execution.captured)
    assert [degradation.reason for degradation in info.degradations] == []
    assert [(mode, compiled, reason) for mode, _, _, compiled, reason in (prompt, decode, large)] == expected
    for (mode, padded_tokens, padded_sequences, _, _), real in ((prompt, (8, 2)), (decode, (3, 3)), (large, (33, 3))):
        ladder = [(size.num_tokens, size.num_sequences or real[1]) for size in execution.captured if size.mode == mode]
        fitting = [size for size in ladder if size[0] >= real[0] and size[1] >= real[1]]
        assert (padded_tokens, padded_sequences) == (real if mode == NONE else min(fitting))
    text = format_info(info)
    assert re.search(f"optimization level +{level}\n", text)
    assert f"{graph_mode}, {len(execution.captured)} captured" in text
    for size in execution.captured:
        assert f" {size.num_tokens}: {size.cost_ms:.2f}" in text
    if FULL in modes and graph_mode != "FULL":
        # The largest allowed batch is a captured one, whatever the strides of the ladder.
        assert re.search(r"FULL, query length 1, ms by tokens: .*\b5: [0-9.]+$", text, re.MULTILINE)


def test_each_decode_length_has_a_ladder_of_its_own_up_to_the_largest_batch(model: Path) -> None:
    flags = ("--max-sequences", "6", "--decode-query-lens", "1,3", "--decode-graph-sizes", "3,6,9,18")
    with worker_process(model, *LIMITS, *flags) as process, Client(process.address) as client:
        captured = client.info().execution.captured
        four_verifications = run(client, [3] * 4, [5] * 4)
        five_decodes = run(client, [1] * 5, [5] * 5)
    ladders = {length: [size.num_tokens for size in captured if size.uniform_query_len == length] for length in (1, 3)}
    assert sorted(ladders[3]) == [3, 6, 9, 18]
    assert max(ladders[1]) == 6
    # 12 tokens are nearer to a PIECEWISE graph of 16, but attention of 18 tokens is in the graph.
    assert four_verifications == (FULL, 18, 6, False, "")
    assert five_decodes == (FULL, 6, 6, False, "")
