"""The worker's greedy tokens through a real server are those of transformers, however the router cuts and places the work."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from modelworker.worker.client import Client
from modelworker.worker.client.session import FencedSession
from modelworker.worker.scheduler import Request, RequestPreempted, Scheduler, SchedulerSettings
from modelworker_testing.worker_process import WorkerProcess, worker_process

PROMPTS_FILE = Path(__file__).parents[1] / "data" / "prompts.json"
NUM_TOKENS = 48
# Where the oracle's two best logits are nearer than this, another order of summation may choose the other one.
TIE_GAP = 1e-3
MAX_TIES_PER_POSITION = 1 / 1000

Tokens = tuple[int, ...]


class Oracle:
    """transformers in fp32 on the same directory."""

    def __init__(self, model_dir: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self._num_ties: dict[tuple[Tokens, Tokens], int] = {}

    def check(self, prompts: list[Tokens], outputs: list[Tokens]) -> None:
        """Asserts that each token is the most probable one after those before it, but for one near tie in 1,000 positions."""
        num_ties = sum(self._ties_of(prompt, output) for prompt, output in zip(prompts, outputs, strict=True))
        assert num_ties <= math.ceil(sum(len(output) for output in outputs) * MAX_TIES_PER_POSITION)

    def _ties_of(self, prompt: Tokens, output: Tokens) -> int:
        """Counts the positions at which the other one of two nearly equal tokens stands."""
        if (prompt, output) not in self._num_ties:
            with torch.inference_mode():
                logits = self.model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
            values, candidates = logits.topk(2)
            others = [position for position, token in enumerate(output) if token != candidates[position, 0]]
            for position in others:
                assert output[position] == candidates[position, 1], f"{prompt=} {position=}"
                assert (values[position, 0] - values[position, 1]).item() < TIE_GAP, f"{prompt=} {position=}"
            self._num_ties[prompt, output] = len(others)
        return self._num_ties[prompt, output]


@pytest.fixture(scope="module")
def prompts(smollm2_dir: Path) -> list[Tokens]:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    return [tuple(tokenizer.encode(text).ids) for text in json.loads(PROMPTS_FILE.read_text())]


@pytest.fixture(scope="module")
def oracle(smollm2_dir: Path) -> Oracle:
    return Oracle(smollm2_dir)


@pytest.fixture(scope="module")
def worker(smollm2_dir: Path) -> Iterator[WorkerProcess]:
    with worker_process(smollm2_dir, "--dtype", "float32", "--kv-cache-memory", "2G", "--block-size", "16") as process:
        yield process


def generate(worker: WorkerProcess, prompts: list[Tokens], settings: SchedulerSettings) -> tuple[list[Tokens], int]:
    """Returns the outputs, and how many times a sequence was preempted."""
    preemptions = []
    with Client(worker.address) as client:
        session = FencedSession(client)
        scheduler = Scheduler(session, settings)
        ids = [scheduler.add(Request(prompt_ids=prompt, max_tokens=NUM_TOKENS, stop_token_ids=frozenset())) for prompt in prompts]
        finished = scheduler.run_until_idle(
            lambda event: preemptions.append(event) if isinstance(event, RequestPreempted) else None
        )
        session.release()
    assert all(finished[request_id].error == "" for request_id in ids)
    outputs = [finished[request_id].output_ids for request_id in ids]
    assert all(len(output) == NUM_TOKENS for output in outputs)
    return outputs, len(preemptions)


@pytest.mark.parametrize(
    "settings",
    [
        SchedulerSettings(),
        SchedulerSettings(prefill_chunk=1),
        SchedulerSettings(prefill_chunk=7, block_order="reversed"),
        SchedulerSettings(prefill_chunk=64, block_order="interleaved", max_sequences=5),
    ],
    ids=["whole prompts", "chunks of 1", "chunks of 7, reversed blocks", "chunks of 64, interleaved blocks, batches of 5"],
)
def test_greedy_tokens_are_those_of_transformers(
    worker: WorkerProcess, prompts: list[Tokens], oracle: Oracle, settings: SchedulerSettings
) -> None:
    outputs, _ = generate(worker, prompts, settings)
    oracle.check(prompts, outputs)


def test_greedy_tokens_of_a_sequence_alone_are_those_of_transformers(
    worker: WorkerProcess, prompts: list[Tokens], oracle: Oracle
) -> None:
    chosen = prompts[::5]
    outputs, _ = generate(worker, chosen, SchedulerSettings(max_sequences=1))
    oracle.check(chosen, outputs)


def test_greedy_tokens_after_preemption_and_recompute_are_those_of_transformers(
    worker: WorkerProcess, prompts: list[Tokens], oracle: Oracle
) -> None:
    outputs, num_preemptions = generate(worker, prompts, SchedulerSettings(prefill_chunk=33, max_blocks=60))
    assert num_preemptions > 3
    oracle.check(prompts, outputs)
