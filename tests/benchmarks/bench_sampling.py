"""Measures what sampling costs a step. One JSON object per line.

    python tests/benchmarks/bench_sampling.py [--rounds N] [--batch N] [--model DIR]

Rows of the table: neutral ones (the head's argmax alone), each feature alone, and everything at once, at two sizes of vocabulary.
Where there is a model, its forward (decode of that batch, context 128) is measured in the same process, and costs are told as
fractions of it.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from modelworker.worker.arrays import IndexArray, Int32Array
from modelworker.worker.batch import GrammarMasks, LogitBias, SamplingBatch, StepBatch, TokenHistory, TokenLists
from modelworker.worker.check_batch import CheckRow, make_check_batch
from modelworker.worker.counters import Counters
from modelworker.worker.progress import LogProgress
from modelworker.worker.sampling.choice import choose, greedy_samples
from modelworker.worker.sampling.history import complete_history
from modelworker.worker.sampling.positions import sampled_positions
from modelworker.worker.settings import DeviceSettings, ExecutionSettings, KvCacheSettings, ModelSettings, WorkerSettings
from modelworker.worker.startup import build_engine

HISTORY_LEN = 512
VOCAB_SIZES = (49_152, 128_256)


def sampling_of(batch_size: int, vocab_size: int, features: frozenset[str]) -> SamplingBatch:
    """Parameters of rows that use some features."""
    random = np.random.default_rng(0)

    def filled(feature: str, value: float, neutral: float, dtype: type[np.generic] = np.float32) -> np.ndarray:
        return np.full(batch_size, value if feature in features else neutral, dtype)

    def lists(size: int) -> TokenLists:
        ids = np.concatenate([random.choice(vocab_size, size, replace=False) for _ in range(batch_size)]).astype(np.int32)
        return TokenLists(counts=np.full(batch_size, size, np.int32), token_ids=ids)

    bits = random.integers(0, 256, (batch_size, 4 * -(-vocab_size // 32)), dtype=np.uint8)
    bias = LogitBias(tokens=lists(20), values=random.normal(size=20 * batch_size).astype(np.float32))
    return SamplingBatch(
        temperature=filled("temperature", 0.8, 0),
        top_k=filled("top_k", 50, 0, np.int32),
        top_p=filled("top_p", 0.9, 1),
        min_p=filled("min_p", 0.05, 0),
        seed=np.arange(batch_size, dtype=np.uint64),
        has_seed=np.ones(batch_size, np.bool_),
        presence=filled("penalties", 0.5, 0),
        frequency=filled("penalties", 0.5, 0),
        repetition=filled("penalties", 1.2, 1),
        num_logprobs=filled("logprobs", 20, -1, np.int32),
        processed_logprobs=filled("processed", 1, 0, np.bool_),
        allowed=lists(2000) if "allowed" in features else None,
        banned=lists(20) if "banned" in features else None,
        grammar=GrammarMasks(rows=np.arange(batch_size, dtype=np.int32), bits=bits) if "grammar" in features else None,
        bias=bias if "bias" in features else None,
        history=TokenHistory(
            prompt_lens=np.full(batch_size, HISTORY_LEN // 2, np.int32),
            output_lens=np.full(batch_size, HISTORY_LEN // 2, np.int32),
            token_ids=random.integers(0, vocab_size, HISTORY_LEN * batch_size).astype(np.int32),
        )
        if "penalties" in features
        else None,
    )


CASES: dict[str, frozenset[str]] = {
    "temperature": frozenset({"temperature"}),
    "top_k": frozenset({"temperature", "top_k"}),
    "top_p": frozenset({"temperature", "top_p"}),
    "min_p": frozenset({"temperature", "min_p"}),
    "top_k_top_p": frozenset({"temperature", "top_k", "top_p"}),
    "penalties": frozenset({"penalties"}),
    "bias": frozenset({"bias"}),
    "banned": frozenset({"banned"}),
    "allowed": frozenset({"allowed"}),
    "grammar": frozenset({"grammar"}),
    "logprobs_20": frozenset({"logprobs"}),
    "everything": frozenset(
        {"temperature", "top_k", "top_p", "min_p", "penalties", "bias", "banned", "grammar", "logprobs", "processed"}
    ),
}


def decodes(batch_size: int, context_len: int, sampling: SamplingBatch | None) -> StepBatch:
    """A decode step; every row has blocks of its own."""
    num_blocks = context_len // 16 + 1
    tables = np.arange(1, 1 + batch_size * num_blocks, dtype=np.int32).reshape(batch_size, -1)
    rows = [
        CheckRow(token_ids=np.array([5 + row], np.int32), context_len=context_len, blocks=tables[row]) for row in range(batch_size)
    ]
    return replace(make_check_batch(rows), sampling=sampling)


def whole_histories(_batch: StepBatch, rows: IndexArray, _firsts: Int32Array) -> Int32Array:
    """Stands where kept tokens would be asked for: the cases send whole histories."""
    raise ValueError(f"{len(rows)} rows have gaps")


def run_case(batch: StepBatch, logits: torch.Tensor) -> None:
    """Does what a step does beside the model."""
    assert batch.sampling is not None
    streams = complete_history(batch, whole_histories, np.zeros(0, np.intp))
    choose(logits, batch.sampling, sampled_positions(batch), batch.sampling.seed, streams)


def cases_of(batch_size: int, vocab_size: int) -> dict[str, Callable[[], float]]:
    """Calls that measure one case each and return its milliseconds."""
    # As peaked as a language model's: a few tokens have most of the probability.
    uniform = torch.rand(batch_size, vocab_size, generator=torch.Generator().manual_seed(0)).clamp_(1e-6, 1 - 1e-6)
    logits = -2 * torch.log(-torch.log(uniform))
    scratch = torch.empty_like(logits)
    token_ids, finite = torch.zeros(batch_size, dtype=torch.int64), torch.ones(batch_size, dtype=torch.bool)

    def run(batch: StepBatch) -> float:
        scratch.copy_(logits)
        with torch.inference_mode():
            return timed(lambda: run_case(batch, scratch))

    cases: dict[str, Callable[[], float]] = {"neutral": lambda: timed(lambda: greedy_samples(token_ids, finite))}
    for name, features in CASES.items():
        batch = decodes(batch_size, HISTORY_LEN, sampling_of(batch_size, vocab_size, features))
        cases[name] = partial(run, batch)
    return cases


def measure(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each of several things, measured in turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            times[name].append(run())
    return {name: found[1:] for name, found in times.items()}


def timed(run: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    begun = time.perf_counter()
    run()
    return (time.perf_counter() - begun) * 1000


def forward_ms(model: Path, batch_size: int, rounds: int) -> float:
    """Median of a model's decode step, forward and head, at context 128."""
    settings = WorkerSettings(
        model=ModelSettings(model=str(model)),
        kv_cache=KvCacheSettings(block_size=16, num_blocks=batch_size * 10),
        device=DeviceSettings(device="cpu"),
        execution=ExecutionSettings(optimization_level=0),
    )
    engine = build_engine(settings, LogProgress(), Counters())
    batch = decodes(batch_size, 128, None)
    return statistics.median([engine.step(batch).timings.forward_ns / 1e6 for _ in range(rounds + 2)][2:])


def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="of every measurement (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="rows (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a model directory whose forward is the measure")
    arguments = parser.parse_args()
    forward = None if arguments.model is None else forward_ms(arguments.model, arguments.batch, arguments.rounds)
    if forward is not None:
        print(json.dumps({"benchmark": "forward", "batch": arguments.batch, "median_ms": round(forward, 2)}))
    for vocab_size in VOCAB_SIZES:
        for name, times in measure(cases_of(arguments.batch, vocab_size), arguments.rounds).items():
            median = statistics.median(times)
            figures: dict[str, object] = {"benchmark": "sampling", "case": name, "batch": arguments.batch, "vocab_size": vocab_size}
            figures |= {"min_ms": round(min(times), 2), "median_ms": round(median, 2), "max_ms": round(max(times), 2)}
            if forward is not None:
                figures["of_forward"] = round(median / forward, 3)
            versions = {"python": platform.python_version(), "torch": torch.__version__, "threads": torch.get_num_threads()}
            print(json.dumps(figures | versions), flush=True)


if __name__ == "__main__":
    main()
