"""How far bf16 moves the model from fp32, against how far it moves transformers, over teacher-forced positions of real text."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from modelworker.worker.models.causal_lm import AttentionMetadata
from modelworker.worker.settings import KvCacheSettings, WorkerSettings
from modelworker_testing.engines import engine_of, tiny_settings

PROMPTS_FILE = Path(__file__).parents[1] / "data" / "prompts.json"
NUM_POSITIONS = 2_000
CHUNK = 250


@dataclass(frozen=True)
class Outputs:
    """[num_positions, hidden_size] and [num_positions, vocab_size], both fp32."""

    hidden: Tensor
    logits: Tensor


def rms_distance(actual: Tensor, expected: Tensor) -> float:
    return (actual.float() - expected).square().mean().sqrt().item()


def text_tokens(model_dir: Path) -> list[list[int]]:
    """The committed prompts in a row, cut into sequences of 250 tokens."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    text = "\n\n".join(json.loads(PROMPTS_FILE.read_text()))
    ids = tokenizer.encode(text).ids
    # The prompts once forwards and once in reverse order give enough positions.
    ids += tokenizer.encode("\n\n".join(reversed(json.loads(PROMPTS_FILE.read_text())))).ids
    assert len(ids) >= NUM_POSITIONS
    return [ids[start : start + CHUNK] for start in range(0, NUM_POSITIONS, CHUNK)]


def outputs_of_transformers(model_dir: Path, sequences: list[list[int]], dtype: torch.dtype) -> Outputs:
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="eager").eval()
    hidden, logits = [], []
    with torch.inference_mode():
        for sequence in sequences:
            states = model.model(torch.tensor([sequence])).last_hidden_state
            hidden.append(states[0].float())
            logits.append(model.lm_head(states)[0].float())
    return Outputs(torch.cat(hidden), torch.cat(logits))


def outputs_of_the_worker(model_dir: Path, sequences: list[list[int]], dtype: str) -> Outputs:
    def settings(path: Path) -> WorkerSettings:
        base = tiny_settings(path)
        return replace(
            base,
            model=replace(base.model, dtype=dtype, max_model_len=CHUNK),
            kv_cache=KvCacheSettings(block_size=16, num_blocks=CHUNK // 16 + 2),
            device=replace(base.device, threads=torch.get_num_threads()),
        )

    hidden, logits = [], []
    with engine_of(model_dir, settings) as engine, torch.inference_mode():
        for sequence in sequences:
            positions = torch.arange(len(sequence), dtype=torch.int32)
            table = torch.arange(1, CHUNK // 16 + 2, dtype=torch.int32)
            attention = AttentionMetadata(
                query_starts=torch.tensor([0, len(sequence)], dtype=torch.int32),
                seq_lens=torch.tensor([len(sequence)], dtype=torch.int32),
                block_tables=table.view(1, -1),
                slots=positions.long() + 16,
            )
            states = engine.model(torch.tensor(sequence, dtype=torch.int32), positions, attention, engine.kv_cache.layers)
            hidden.append(states.float())
            logits.append(engine.model.compute_logits(states))
    return Outputs(torch.cat(hidden), torch.cat(logits))


@pytest.fixture(scope="module")
def outputs(smollm2_dir: Path) -> tuple[Outputs, Outputs, Outputs]:
    sequences = text_tokens(smollm2_dir)
    return (
        outputs_of_transformers(smollm2_dir, sequences, torch.float32),
        outputs_of_transformers(smollm2_dir, sequences, torch.bfloat16),
        outputs_of_the_worker(smollm2_dir, sequences, "bfloat16"),
    )


def test_bf16_hidden_states_and_logits_are_as_near_to_fp32_as_transformers_bf16(
    outputs: tuple[Outputs, Outputs, Outputs],
) -> None:
    reference, theirs, ours = outputs
    hidden = rms_distance(ours.hidden, reference.hidden) / rms_distance(theirs.hidden, reference.hidden)
    logits = rms_distance(ours.logits, reference.logits) / rms_distance(theirs.logits, reference.logits)
    print(f"RMS distance to fp32, as a multiple of transformers': hidden {hidden:.3f}, logits {logits:.3f}")
    assert hidden <= 1.25
    assert logits <= 1.0


def test_bf16_agrees_with_fp32_on_the_most_probable_token_as_often_as_transformers_bf16(
    outputs: tuple[Outputs, Outputs, Outputs],
) -> None:
    reference, theirs, ours = outputs
    best = reference.logits.argmax(-1)
    our_share, their_share = ((each.logits.argmax(-1) == best).float().mean().item() for each in (ours, theirs))
    print(f"top-1 agreement with fp32: {our_share:.4f}, transformers {their_share:.4f}")
    assert our_share >= their_share
