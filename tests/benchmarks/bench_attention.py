"""Measures the attention kernels at the head shapes of real models. Prints one JSON object per line.

    python tests/benchmarks/bench_attention.py [--rounds N] [--threads N] [--level NAME]

Decode: the layers of a recorded list read 256 MiB of keys and values in one parallel region; the result is the share of the read
bandwidth measured in the same rounds. Prefill: a prompt's attention in operations per second, of the products that causality asks
for, and their share of the best matrix rate.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from probe import Probe
from torch import Tensor

from modelworker.ops.cpu.isa import LEVELS, cpu_flags, usable_levels
from modelworker.ops.cpu.kernel_list import KernelList
from modelworker.ops.cpu.library import CpuLibrary, load_library
from modelworker.ops.cpu.memory_pool import MemoryPool
from modelworker.ops.cpu.packing import advise_huge_pages

CACHE = Path(__file__).resolve().parents[2] / "build" / "cpu-kernels"
BLOCK_SIZE = 32
KV_BYTES = 256 << 20
SHAPES = {"SmolLM2-135M": (9, 3, 64), "1B": (32, 8, 64), "8B": (32, 8, 128)}


class Layers:
    """Caches of as many layers as fill the memory, each with its blocks in random order, and the kernels that attend to them."""

    def __init__(
        self, library: CpuLibrary, memory: Tensor, heads: tuple[int, int, int], query_lens: list[int], seq_lens: list[int]
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        needed = [-(-length // BLOCK_SIZE) for length in seq_lens]
        size = 2 * sum(needed) * num_kv_heads * BLOCK_SIZE * head_dim
        self.num_layers = max(1, memory.numel() // size) if len(query_lens) == sum(query_lens) else 1
        blocks = torch.randperm(sum(needed), dtype=torch.int32).split(needed)
        tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
        starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
        lengths = torch.tensor(seq_lens, dtype=torch.int32)
        query = torch.randn(sum(query_lens), num_heads, head_dim).bfloat16()
        output = torch.empty_like(query)
        self.kernels = KernelList(MemoryPool(library))
        self._bound = (query, output, starts, lengths, tables)
        with self.kernels.recording():
            for layer in range(self.num_layers):
                caches = memory[layer * size : (layer + 1) * size].view(2, sum(needed), num_kv_heads, BLOCK_SIZE, head_dim)
                lists = (starts, lengths, tables, torch.empty(0))
                library.ops.paged_attention(query, *caches, output, *lists, head_dim**-0.5, 0, 0.0)
        self.kv_bytes = self.num_layers * sum(seq_lens) * num_kv_heads * head_dim * 4
        seen = sum(length * q - q * (q - 1) // 2 for q, length in zip(query_lens, seq_lens, strict=True))
        self.operations = self.num_layers * 4 * seen * num_heads * head_dim

    def seconds(self) -> float:
        begun = time.perf_counter()
        self.kernels.replay()
        return time.perf_counter() - begun


def measure(layers: Layers, limit: Callable[[], float], amount: int, rounds: int) -> tuple[list[float], list[float]]:
    """Alternates between the kernels and the limit; returns the amounts per second and their shares of the limit."""
    layers.seconds()
    rates, shares = [], []
    for _ in range(rounds):
        reached = limit()
        rates.append(amount / layers.seconds())
        shares.append(rates[-1] / max(reached, limit()))
    return rates, shares


def report(fields: dict[str, Any], unit: str, scale: float, rates: list[float], shares: list[float]) -> None:
    """Prints a result."""
    values = {unit: max(rates) / scale, "share": statistics.median(shares), "share_min": min(shares), "share_max": max(shares)}
    machine = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    print(json.dumps({**fields, **{name: round(value, 3) for name, value in values.items()}, **machine}), flush=True)


def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, help="threads that compute (default: torch's)")
    parser.add_argument("--level", choices=[level.name for level in LEVELS], help="default: the best that this machine has")
    parser.add_argument("--shape", choices=SHAPES, help="measure only this one")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    level = next(level for level in usable_levels(cpu_flags()) if options.level in (None, level.name))
    library = load_library(level, CACHE)
    probe = Probe(library)
    memory = torch.empty(KV_BYTES // 2, dtype=torch.bfloat16)
    advise_huge_pages(memory)
    memory.normal_()
    for shape, heads in SHAPES.items():
        if options.shape not in (None, shape):
            continue
        for batch in (1, 16):
            for context in (128, 1024, 4096):
                if batch * context * heads[1] * heads[2] * 4 > KV_BYTES:
                    continue
                layers = Layers(library, memory, heads, [1] * batch, [context] * batch)
                fields = {"op": "decode", "level": level.name, "shape": shape, "batch": batch, "tokens": context}
                report(fields, "GB/s", 1e9, *measure(layers, probe.read_bandwidth, layers.kv_bytes, options.rounds))
        for tokens in (512, 2048):
            layers = Layers(library, memory, heads, [tokens], [tokens])
            fields = {"op": "prefill", "level": level.name, "shape": shape, "batch": 1, "tokens": tokens}
            report(fields, "TFLOP/s", 1e12, *measure(layers, probe.matrix_rate, layers.operations, options.rounds))


if __name__ == "__main__":
    main()
