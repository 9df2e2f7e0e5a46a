"""Measures steps of a model with the shape of Llama-3.2-1B and random weights, as `bench_step.py` does. One JSON object per line.

python tests/benchmarks/bench_step_1b.py [--rounds N] [--threads N]
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from modelworker.worker.cpu_kernels import load_cpu_kernels
from modelworker.worker.machine import choose_threads, read_machine
from modelworker.worker.machine_limits import LimitProbe
from modelworker.worker.progress import LogProgress
from modelworker.worker.settings import (
    CacheSettings,
    DeviceSettings,
    ExecutionSettings,
    KvCacheSettings,
    StepSettings,
    WorkerSettings,
)
from modelworker.worker.step_bench import StepCase, as_record, run_cases
from modelworker_testing.bare_engine import build_bare_engine, model_config_of

ROOT = Path(__file__).resolve().parents[2]
SHAPE: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
CASES = [
    *(StepCase(num_sequences=batch, query_len=1, context_len=128) for batch in (1, 4, 16)),
    StepCase(num_sequences=1, query_len=512, context_len=0),
]


def results(num_threads: int, rounds: int) -> Iterator[dict[str, object]]:
    settings = WorkerSettings(
        kv_cache=KvCacheSettings(num_blocks=400),
        step=StepSettings(max_sequences=16, max_tokens_per_step=512),
        device=DeviceSettings(device="cpu", threads=num_threads),
        execution=ExecutionSettings(optimization_level=2),
        cache=CacheSettings(cache_dir=str(ROOT / "build")),
    )
    device = torch.device("cpu")
    kernels = load_cpu_kernels(settings, device, LogProgress())
    engine = build_bare_engine(settings, config=model_config_of(SHAPE), dtype=torch.bfloat16, device=device, kernels=kernels)
    probe = LimitProbe(device, torch.bfloat16, kernels.library)
    for result in run_cases(engine, CASES, probe, rounds=rounds):
        yield as_record(result)


def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads that compute (default: the CPU quota)")
    options = parser.parse_args()
    num_threads = options.threads or choose_threads(None, read_machine())[0]
    torch.set_num_threads(num_threads)
    for record in results(num_threads, options.rounds):
        print(json.dumps({"benchmark": "step_1b", **record, "threads": num_threads, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
