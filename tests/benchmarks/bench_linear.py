"""Measures products on packed weights against the machine's limits. Prints one JSON object per line.

    python tests/benchmarks/bench_linear.py [--rounds N] [--level NAME] [--only-decode]

`product`: one shape at a number of rows, each way called over copies of the weight, 256 MB together, beyond the caches:
the kernels, `F.linear`, and oneDNN on a weight packed for that number of rows. `decode`: the 121 products of a SmolLM2-135M step,
recorded as one list and replayed in one parallel region. A fraction of 1 is the limit: bytes at the read bandwidth, or operations
at the best matrix rate, whichever takes longer, both medians of the rounds in which the times were taken.
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from probe import Probe, linear_onednn, pack_onednn
from torch import Tensor

from modelworker.ops.cpu.isa import LEVELS, cpu_flags, usable_levels
from modelworker.ops.cpu.library import CpuLibrary, load_library
from modelworker.ops.cpu.packing import WeightArena, pack_weight
from modelworker.ops.cpu.recorder import RecordedStep, Recorder
from modelworker.worker.machine import read_machine

ROWS = (1, 4, 16, 64, 512)
SHAPES = {
    "135M": {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)},
    "1B": {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192), "head": (128256, 2048)},
}
NUM_LAYERS = 30
DTYPE = torch.bfloat16
COPIES_BYTES = 256 << 20
CACHE = Path(__file__).resolve().parents[2] / "build" / "cpu-kernels"

Call = Callable[[int], object]


def timed(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def spread(name: str, seconds: list[float], unit: float) -> dict[str, float]:
    values = {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}
    return {f"{name}_{key}": round(value * unit, 3) for key, value in values.items()}


def print_result(**figures: object) -> None:
    print(json.dumps(figures), flush=True)


def ways_of(library: CpuLibrary, weight: Tensor, rows: int, is_head: bool, num_copies: int) -> dict[str, Call]:
    """The ways to multiply by one of the copies of a weight."""
    out_features, in_features = weight.shape
    x = torch.randn(rows, in_features, dtype=DTYPE)
    arena = WeightArena()
    packed = [pack_weight(library, weight, arena) for _ in range(num_copies)]
    plain = [weight.clone() for _ in range(num_copies)]
    product = library.ops.linear_float32 if is_head else library.ops.linear
    arguments = (out_features,) if is_head else (None, out_features)
    ways: dict[str, Call] = {
        library.level.name: lambda copy: product(x, packed[copy], *arguments),
        "F.linear": lambda copy: F.linear(x, plain[copy]),
    }
    if (first := pack_onednn(weight, rows)) is not None:
        onednn = [first, *(pack_onednn(weight, rows) for _ in range(num_copies - 1))]
        ways["onednn packed"] = lambda copy: linear_onednn(x, onednn[copy])
    return ways


def measure_product(library: CpuLibrary, probe: Probe, model: str, name: str, rows: int, rounds: int) -> None:
    weight = torch.randn(SHAPES[model][name], dtype=DTYPE)
    num_bytes, operations = 2 * weight.numel(), 2 * rows * weight.numel()
    num_copies = max(min(COPIES_BYTES // num_bytes, int(2e10) // operations), 1)
    ways = ways_of(library, weight, rows, name == "head", num_copies)
    times: dict[str, list[float]] = {way: [] for way in ways}
    bandwidths, rates = [], []
    for _ in range(rounds + 1):
        bandwidths.append(probe.read_bandwidth())
        rates.append(probe.matrix_rate())
        for way, call in ways.items():
            times[way].append(timed(lambda call=call: [call(copy) for copy in range(num_copies)]) / num_copies)
    bandwidth, rate = statistics.median(bandwidths[1:]), statistics.median(rates[1:])
    limit = max(num_bytes / bandwidth, operations / rate)
    for way, seconds in times.items():
        print_result(
            benchmark="product",
            model=model,
            weight=name,
            rows=rows,
            way=way,
            **spread("us", seconds[1:], 1e6),
            fraction_of_limit=round(limit / statistics.median(seconds[1:]), 3),
            limited_by="bandwidth" if limit > operations / rate else "matrix rate",
            gb_per_second=round(bandwidth / 1e9, 2),
            tera_operations_per_second=round(rate / 1e12, 3),
        )


def record_decode(library: CpuLibrary, weights: list[Tensor], rows: int) -> RecordedStep[None]:
    """Records all products of a decode step of the 135M shape."""
    inputs = {size: torch.randn(rows, size, dtype=DTYPE) for size in (576, 1536)}

    def run() -> None:
        for packed, (out_features, in_features) in zip(weights, decode_shapes(), strict=True):
            if out_features == SHAPES["135M"]["head"][0]:
                library.ops.linear_argmax(inputs[in_features], packed, out_features)
            else:
                library.ops.linear(inputs[in_features], packed, None, out_features)

    return Recorder(library).record(run)


def decode_shapes() -> Iterator[tuple[int, int]]:
    shapes = SHAPES["135M"]
    for _ in range(NUM_LAYERS):
        yield from (shapes[name] for name in ("qkv", "o", "gate_up", "down"))
    yield shapes["head"]


def measure_decode(library: CpuLibrary, probe: Probe, rounds: int) -> None:
    arena = WeightArena()
    weights = [pack_weight(library, torch.randn(shape, dtype=DTYPE), arena) for shape in decode_shapes()]
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    lists = {rows: record_decode(library, weights, rows) for rows in ROWS[:-1]}
    times: dict[int, list[float]] = {rows: [] for rows in lists}
    bandwidths = []
    for _ in range(3 * rounds + 1):
        bandwidths.append(probe.read_bandwidth())
        for rows, recorded in lists.items():
            times[rows].append(timed(recorded.replay))
    floor = num_bytes / statistics.median(bandwidths[1:])
    alone = statistics.median(times[1][1:])
    for rows, seconds in times.items():
        print_result(
            benchmark="decode",
            model="135M",
            weight="all 121",
            rows=rows,
            way=library.level.name,
            **spread("us", seconds[1:], 1e6),
            fraction_of_limit=round(floor / statistics.median(seconds[1:]), 3),
            times_floor=round(statistics.median(seconds[1:]) / floor, 3),
            # The least disturbed rounds of both, on a machine that others use, too.
            times_floor_best=round(min(seconds[1:]) * max(bandwidths[1:]) / num_bytes, 3),
            times_one_row=round(statistics.median(seconds[1:]) / alone, 3),
            times_one_row_best=round(min(seconds[1:]) / min(times[1][1:]), 3),
            gb_per_second=round(statistics.median(bandwidths[1:]) / 1e9, 2),
            huge_pages=arena.has_huge_pages,
        )


def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="times that every way is measured, in turns (default: %(default)s)")
    parser.add_argument("--level", choices=[level.name for level in LEVELS], help="default: the best of this machine")
    parser.add_argument("--only-decode", action="store_true", help="leave single products out")
    arguments = parser.parse_args()
    levels = {level.name: level for level in usable_levels(cpu_flags())}
    if arguments.level and arguments.level not in levels:
        parser.error(f"--level {arguments.level}: this machine has {', '.join(levels)}")
    torch.set_num_threads(read_machine().num_threads)
    torch.manual_seed(0)
    library = load_library(levels[arguments.level or next(iter(levels))], CACHE)
    probe = Probe(library, DTYPE)
    print_result(
        benchmark="machine",
        way=library.level.name,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        huge_pages=probe.has_huge_pages,
        cpu_flags=sorted(cpu_flags() & frozenset().union(*(level.cpu_flags for level in LEVELS))),
    )
    with torch.inference_mode():
        measure_decode(library, probe, arguments.rounds)
        if not arguments.only_decode:
            for model, rows in itertools.product(SHAPES, ROWS):
                for name in SHAPES[model]:
                    # A head multiplies only the rows that are sampled.
                    if name != "head" or rows < ROWS[-1]:
                        measure_product(library, probe, model, name, rows, arguments.rounds)


if __name__ == "__main__":
    main()
