"""Measures steps of SmolLM2-135M in every way to run them, beside transformers in the same rounds. Prints one JSON object per line.

    python tests/benchmarks/bench_step.py [--rounds N] [--model DIR] [--threads N] [--only NAME]

`step`: decodes at several batches and contexts, prompts, and a prompt's chunk among decodes; eager (plain modules on the same
kernels), native (plain modules on plain PyTorch ops), compiled, PIECEWISE, FULL and transformers eager, each held against the floor
of the same rounds. `start`: a worker from exec to ready, with an empty cache and with a filled one, and its resident memory.
The picture build/bench/step_time.svg shows the time over the batch.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot

from modelworker.worker.client import Client
from modelworker.worker.counters import Counters
from modelworker.worker.cpu_kernels import load_cpu_kernels
from modelworker.worker.engine import Engine
from modelworker.worker.machine import choose_threads, read_machine
from modelworker.worker.machine_limits import LimitProbe
from modelworker.worker.progress import LogProgress
from modelworker.worker.settings import (
    CacheSettings,
    DeviceSettings,
    ExecutionSettings,
    KvCacheSettings,
    ModelSettings,
    OpsSettings,
    StepSettings,
    WorkerSettings,
)
from modelworker.worker.startup import build_engine
from modelworker.worker.step_bench import StepCase, StepTimes, as_record, run_cases

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build"
PICTURE = ROOT / "build" / "bench" / "step_time.svg"
DECODES = [(1, 128), (4, 128), (16, 128), (64, 128), (1, 1024), (16, 1024), (1, 4096)]
PROMPTS = [512, 2048]
NUM_BLOCKS = 1200
NATIVE = ("none",)


def settings_of(model: Path, num_threads: int, custom_ops: tuple[str, ...], level: int) -> WorkerSettings:
    return WorkerSettings(
        model=ModelSettings(model=str(model)),
        kv_cache=KvCacheSettings(num_blocks=NUM_BLOCKS),
        step=StepSettings(max_sequences=64, max_tokens_per_step=2048),
        device=DeviceSettings(device="cpu", threads=num_threads),
        ops=OpsSettings(custom_ops=custom_ops),
        execution=ExecutionSettings(optimization_level=level),
        cache=CacheSettings(cache_dir=str(CACHE)),
    )


def make_engine(settings: WorkerSettings) -> Engine:
    return build_engine(settings, LogProgress(), Counters())


class Transformers:
    """The same model in transformers, eager, in the model's dtype."""

    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM, DynamicCache  # noqa: PLC0415  (slow to import, and not always wanted)

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
        self._new_cache = DynamicCache

    def seconds(self, case: StepCase, rounds: int) -> list[float]:
        """Runs a case several times, each on the cache as it was before."""
        ids = torch.randint(100, 1000, (case.num_sequences, case.query_len))
        with torch.inference_mode():
            cache = self._new_cache()
            if case.context_len:
                self._model(
                    torch.randint(100, 1000, (case.num_sequences, case.context_len)), past_key_values=cache, logits_to_keep=1
                )
            times = []
            for _ in range(rounds + 1):
                begun = time.perf_counter()
                self._model(ids, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
                times.append(time.perf_counter() - begun)
                cache.crop(-case.query_len)
        return times[1:]


def step_results(model: Path, num_threads: int, rounds: int) -> Iterator[dict[str, object]]:
    settings = settings_of(model, num_threads, (), 2)
    engine = make_engine(settings)
    device = torch.device("cpu")
    kernels = load_cpu_kernels(settings, device, LogProgress()).library
    probe = LimitProbe(device, torch.bfloat16, kernels)
    native = make_engine(settings_of(model, num_threads, NATIVE, 0))
    peer = Transformers(model, torch.bfloat16)
    cases = [StepCase(num_sequences=batch, query_len=1, context_len=context) for batch, context in DECODES]
    cases += [StepCase(num_sequences=1, query_len=tokens, context_len=0) for tokens in PROMPTS]
    cases.append(StepCase(num_sequences=15, query_len=1, context_len=128, chunk=256))
    for case in cases:
        results = list(run_cases(engine, [case], probe, rounds=rounds))
        floor_ms = results[0].floor_ms
        few = max(rounds // 3, 3)
        results += [replace(result, way="native", floor_ms=floor_ms) for result in run_cases(native, [case], probe, rounds=few)]
        if not case.chunk:  # transformers would pad all rows to the length of the chunk
            results.append(peer_times(case, peer, few, floor_ms))
        yield from (as_record(result) for result in results)


def peer_times(case: StepCase, peer: Transformers, rounds: int, floor_ms: float) -> StepTimes:
    milliseconds = [1000 * seconds for seconds in peer.seconds(case, rounds)]
    return StepTimes(
        case=str(case),
        way="transformers",
        step_ms=statistics.median(milliseconds),
        min_ms=min(milliseconds),
        max_ms=max(milliseconds),
        kernel_ms=0.0,
        host_ms=0.0,
        floor_ms=floor_ms,
    )


def start_results(model: Path, num_threads: int) -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "warm", "warm"):
            yield {"start": name, **_start(model, num_threads, Path(folder))}


def _start(model: Path, num_threads: int, folder: Path) -> dict[str, object]:
    port_file = folder / "port"
    port_file.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "modelworker.worker.cli", "serve", "--model", str(model)),
        *("--port", "0", "--port-file", str(port_file), "--cache-dir", str(folder / "cache")),
        *("--threads", str(num_threads), "--num-blocks", "400", "--log-level", "error"),
    ]
    begun = time.perf_counter()
    process = subprocess.Popen(command, env={**os.environ, "PYTHONSAFEPATH": "1"}, stdout=subprocess.DEVNULL)
    try:
        while not port_file.exists():
            time.sleep(0.01)
        with Client(f"127.0.0.1:{port_file.read_text().strip()}") as client:
            client.wait_ready(300)
            seconds = time.perf_counter() - begun
            info = client.info()
        status = Path(f"/proc/{process.pid}/status").read_text()
        resident = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) * 1024
        weights = 2 * info.model.num_parameters
        return {
            "seconds": round(seconds, 2),
            "resident_mb": round(resident / 1e6, 1),
            "beyond_weights_mb": round((resident - weights) / 1e6, 1),
        }
    finally:
        process.terminate()
        process.wait()


def draw(records: list[dict[str, Any]], target: Path) -> None:
    """Draws the time of a decode over the batch, for every way and the floor."""
    mpl.use("svg")
    # The same data gives the same file.
    mpl.rcParams["svg.hashsalt"] = "modelworker"
    context = f"context {DECODES[0][1]}"
    decodes = [
        record for record in records if str(record.get("case", "")).startswith("decode") and str(record["case"]).endswith(context)
    ]
    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for way, group in itertools.groupby(
        sorted(decodes, key=lambda record: str(record["way"])), key=lambda record: str(record["way"])
    ):
        points = sorted((int(str(record["case"]).split()[1]), float(record["step_ms"])) for record in group)
        axes.plot(*zip(*points, strict=True), marker="o", label=way)
    floors = sorted({int(str(record["case"]).split()[1]): float(record["floor_ms"]) for record in decodes}.items())
    axes.plot(*zip(*floors, strict=True), linestyle="--", color="black", label="floor")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="sequences in the step",
        ylabel="milliseconds",
        title=f"A decode step of SmolLM2-135M, {context}",
    )
    axes.set_xticks([batch for batch, _ in floors], [str(batch) for batch, _ in floors])
    axes.grid(True, which="both", alpha=0.3)
    figure.legend(loc="outside right center")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=12, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads that compute (default: the CPU quota)")
    parser.add_argument("--only", choices=("step", "start"), help="measure only this")
    options = parser.parse_args()
    num_threads = options.threads or choose_threads(None, read_machine())[0]
    machine = {"threads": num_threads, "torch": torch.__version__}
    parts: dict[str, Callable[[], Iterator[dict[str, object]]]] = {
        "step": lambda: step_results(options.model, num_threads, options.rounds),
        "start": lambda: start_results(options.model, num_threads),
    }
    records = []
    for name, part in parts.items():
        if options.only in (None, name):
            for record in part():
                records.append({"benchmark": name, **record, **machine})
                print(json.dumps(records[-1]), flush=True)
    if options.only != "start":
        draw(records, PICTURE)


if __name__ == "__main__":
    main()
