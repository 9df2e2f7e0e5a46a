"""Whatever runs a step - FULL or PIECEWISE graphs of any size, compiled pieces, plain modules - it computes what transformers does.

Each step starts from a cache of NaN in which only its context is filled, static buffers full of garbage, and graph outputs of NaN.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from modelworker.graphs.settings import RuntimeMode
from modelworker.worker.result import GraphMode
from modelworker.worker.step_runner import PLAIN_WAY
from modelworker_testing.batches import with_drafts
from modelworker_testing.mode_world import (
    COMPILED,
    DECODE_QUERY_LENS,
    LENGTH,
    NUM_SEQUENCES,
    ModeWorld,
    Row,
    mode_settings,
    mode_world,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

# Both compute in fp32 but sum in another order; logits are of the order of 1 to 10.
CLOSE = {"atol": 2e-4, "rtol": 2e-4}

WORLDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({}, {}),
    "llama, FULL graphs of any mix": ({"graph_mode": "FULL"}, {}),
    "llama, pieces of native ops": ({"custom_ops": ("none",)}, {}),
    "llama, divided by the compiler": ({"graph_partition": "inductor", "custom_ops": ("none",)}, {}),
    "llama, without graph passes": ({"compiler_passes": ("none",), "custom_ops": ("none",)}, {}),
    "qwen3, norms of the heads, biases, tied": (
        {},
        {"architecture": "Qwen3ForCausalLM", "attention_bias": True, "tie_word_embeddings": True},
    ),
    "mistral, window 5": ({}, {"architecture": "MistralForCausalLM", "sliding_window": 5}),
    "llama, plain modules in FULL graphs": ({"optimization_level": 0, "graph_mode": "FULL_DECODE_ONLY"}, {}),
}


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModeWorld]:
    settings, model = WORLDS[request.param]
    with mode_world(tmp_path_factory.mktemp("world"), mode_settings(**settings), **model) as made:
        yield made


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModeWorld]:
    with mode_world(tmp_path_factory.mktemp("llama"), mode_settings()) as made:
        yield made


def decode_rows(random: np.random.Generator, num_rows: int, query_len: int) -> list[Row]:
    """Rows of different sequences and lengths of context; the first ones have the shortest and the longest."""
    contexts = [1, LENGTH - query_len, *random.integers(1, LENGTH - query_len + 1, num_rows)][:num_rows]
    sequences = random.permutation(NUM_SEQUENCES)[:num_rows]
    return [Row(int(sequence), int(context), query_len) for sequence, context in zip(sequences, contexts, strict=True)]


def mixed_rows(random: np.random.Generator) -> list[Row]:
    """Prompts, chunks of prompts and decodes in any order."""
    rows = []
    for sequence in random.permutation(NUM_SEQUENCES)[: random.integers(1, NUM_SEQUENCES + 1)]:
        query_len = int(random.integers(1, min(LENGTH, 8) + 1))
        context_len = int(random.choice([0, random.integers(0, LENGTH - query_len + 1)]))
        rows.append(Row(int(sequence), context_len, query_len))
    while sum(row.query_len for row in rows) > 128:
        rows.pop()
    return rows


def check_every_way(world: ModeWorld, rows: list[Row], *, spare_blocks: int = 0) -> set[RuntimeMode]:
    """Runs a step in every way there is, and returns the modes that it was run in."""
    modes = set()
    batch = world.batch(rows)
    for name, way in world.ways(batch).items():
        result = world.run(rows, way, spare_blocks=spare_blocks)
        graph, key = result.graph, way.choice.key
        assert graph.mode == GraphMode(int(way.choice.mode)), name
        assert graph.padded_tokens == (batch.num_tokens if key is None else key.num_tokens), name
        padded_sequences = batch.num_sequences if key is None or key.num_sequences is None else key.num_sequences
        assert graph.padded_sequences == padded_sequences, name
        assert graph.compiled == (name == "compiled"), name
        assert result.sequence_errors == ()
        assert result.sampled_ids.tolist() == world.expected_tokens(rows), name
        assert result.logprobs is not None
        np.testing.assert_allclose(result.logprobs.values, world.expected_logprobs(rows), **CLOSE, err_msg=name)
        modes.add(way.choice.mode)
    return modes


@pytest.mark.parametrize("query_len", DECODE_QUERY_LENS)
def test_decode_batches_of_every_size_give_the_tokens_of_transformers_in_every_mode(world: ModeWorld, query_len: int) -> None:
    random = np.random.default_rng(query_len)
    modes = [
        check_every_way(world, decode_rows(random, num_rows, query_len), spare_blocks=num_rows % 2)
        for num_rows in range(1, NUM_SEQUENCES + 1)
    ]
    # The largest batch that the limits allow has a graph, too.
    assert all(RuntimeMode.FULL in found for found in modes)


def test_mixed_batches_give_the_tokens_of_transformers_in_every_mode(world: ModeWorld) -> None:
    random = np.random.default_rng(5)
    modes = [check_every_way(world, mixed_rows(random)) for _ in range(25)]
    mixed_mode = world.engine.runner.dispatcher.settings.mode.mixed_mode
    assert all(mixed_mode in found for found in modes)


def accepted_tokens(world: ModeWorld, row: Row) -> list[int]:
    """What a row whose tokens but the first are drafts samples; a prompt samples once, after its last token."""
    first = row.context_len if row.context_len else row.query_len - 1
    tokens = [int(world.greedy[row.sequence, first])]
    for position in range(first + 1, row.context_len + row.query_len):
        if int(world.sequences[row.sequence, position]) != tokens[-1]:
            break
        tokens.append(int(world.greedy[row.sequence, position]))
    return tokens


def test_greedy_texts_as_the_dispatcher_runs_them_are_those_of_transformers(world: ModeWorld) -> None:
    """Teacher forcing over the sequences: whole prompts, then steps of each decode length in turn, whose tokens are drafts."""
    random = np.random.default_rng(3)
    done = {sequence: int(random.integers(1, 6)) for sequence in range(NUM_SEQUENCES)}
    rows = [Row(sequence, 0, length) for sequence, length in done.items()]
    world.engine.reset_kv_cache()
    for query_len in itertools.cycle(DECODE_QUERY_LENS):
        result = world.engine.step(with_drafts(world.batch(rows)))
        accepted = [accepted_tokens(world, row) for row in rows]
        assert result.sampled_counts.tolist() == list(map(len, accepted))
        assert result.sampled_ids.tolist() == [token for tokens in accepted for token in tokens]
        rows = [Row(sequence, length, query_len) for sequence, length in done.items() if length + query_len <= LENGTH]
        if not rows:
            break
        done |= {row.sequence: row.context_len + query_len for row in rows}
        chosen = world.engine.runner.choose(with_drafts(world.batch(rows)))
        assert chosen.mode is RuntimeMode.FULL


def test_a_step_whose_tables_are_shorter_than_those_of_the_step_before_does_not_see_their_blocks(world: ModeWorld) -> None:
    long, short = [Row(sequence, LENGTH - 1, 1) for sequence in range(5)], [Row(sequence, 1, 1) for sequence in range(5, 10)]
    for name, way in world.ways(world.batch(short)).items():
        with torch.inference_mode():
            for rows in (long, short):
                key = way.choice.key
                inputs = world.engine.runner.stage(world.batch(rows), key)
        assert inputs.block_tables[:, 1:].eq(0).all(), name
        assert world.run(short, way).sampled_ids.tolist() == world.expected_tokens(short), name


def test_hidden_states_of_every_token_are_those_of_transformers_and_of_padding_finite(world: ModeWorld) -> None:
    for rows in ([Row(3, 4, 1), Row(8, 9, 1), Row(1, 2, 1)], [Row(2, 5, 2)] * 1, [Row(4, 0, 7), Row(5, 3, 2)]):
        for name, way in world.ways(world.batch(rows)).items():
            hidden = world.run_decoder(rows, way)
            expected = world.expected_hidden(rows)
            torch.testing.assert_close(hidden[: len(expected)], expected, **CLOSE, msg=f"{name}, {rows}")
            assert hidden.isfinite().all(), name
            assert len(hidden) == (len(expected) if way.choice.key is None else way.choice.key.num_tokens)


def test_a_request_gives_bit_for_bit_the_same_alone_and_in_batches_padded_or_not_in_every_mode(llama: ModeWorld) -> None:
    """Compiled pieces, which fuse ops, may round in another order: their fp32 hidden states agree within 1e-5."""
    request = Row(6, 13, 1)
    alone = llama.run_decoder([request], PLAIN_WAY)[0]
    others = [Row(sequence, 1 + sequence, 1) for sequence in range(NUM_SEQUENCES) if sequence != request.sequence]
    for size in (1, 2, 5, 8):
        for place in sorted({0, size // 2, size - 1}):
            rows = [*others[:place], request, *others[place : size - 1]]
            for name, way in llama.ways(llama.batch(rows)).items():
                hidden = llama.run_decoder(rows, way)[place]
                atol = 1e-5 if name == "compiled" else 0
                torch.testing.assert_close(hidden, alone, atol=atol, rtol=0, msg=f"{name}, {size} sequences, at {place}")


def rms_distance(actual: Tensor, expected: Tensor) -> float:
    return (actual.float() - expected).square().mean().sqrt().item()


def test_bf16_is_in_every_mode_as_near_to_fp32_as_transformers_bf16(tmp_path: Path) -> None:
    """The bound is that of the real model's bf16 test."""
    with mode_world(tmp_path, mode_settings(dtype="bfloat16")) as world:
        reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        with torch.inference_mode():
            theirs = reference.model(world.sequences, use_cache=False).last_hidden_state
        random = np.random.default_rng(4)
        distances: dict[str, list[float]] = {}
        for num_rows in range(1, NUM_SEQUENCES + 1):
            rows = decode_rows(random, num_rows, DECODE_QUERY_LENS[num_rows % 3])
            expected = world.expected_hidden(rows)
            for way in world.ways(world.batch(rows)).values():
                name = "compiled" if way == COMPILED else way.choice.mode.name
                distances.setdefault(name, []).append(rms_distance(world.run_decoder(rows, way)[: len(expected)], expected))
        bound = 1.25 * rms_distance(theirs, world.hidden)
        found = {name: float(np.sqrt(np.mean(np.square(values)))) for name, values in distances.items()}
        print(f"RMS distance to fp32 by mode: {found}, bound {bound:.4f}")
        assert set(found) == {"NONE", "compiled", "PIECEWISE", "FULL"}
        assert max(found.values()) <= bound
