"""Measures every implementation of every op of the catalog at the sizes of real models. Prints one JSON object per line.

python tests/benchmarks/bench_ops.py [--op NAME] [--seconds S] [--threads N]
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modelworker.ops.catalog import CATALOG
from modelworker.ops.op_spec import SampleShape
from modelworker_testing.kernels import own_kernels

NUM_TOKENS = (1, 16, 256)


def measure(run: Callable[[], Any], seconds: float) -> dict[str, float]:
    """Times calls one by one for a while and returns their spread."""
    for _ in range(3):
        run()
    times_us = []
    end = time.perf_counter() + seconds
    while len(times_us) < 5 or time.perf_counter() < end:
        begun = time.perf_counter_ns()
        run()
        times_us.append((time.perf_counter_ns() - begun) / 1000)
    return {"min_us": min(times_us), "median_us": statistics.median(times_us), "max_us": max(times_us)}


def num_bytes(arguments: tuple[Any, ...]) -> int:
    """Bytes of the tensors that the op is given: what it has to read or write at least once, but for what it skips."""
    return sum(argument.nbytes for argument in arguments if isinstance(argument, Tensor))


def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=sorted(CATALOG), help="measure only this one")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each measurement (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads that compute (default: torch's)")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    kernels = own_kernels()
    machine = {"threads": torch.get_num_threads(), "torch": torch.__version__, "machine": platform.machine()}
    for spec in CATALOG.values():
        if options.op not in (None, spec.name):
            continue
        for variant in spec.benchmark_variants:
            for num_tokens in NUM_TOKENS:
                for dtype in spec.tolerances:
                    shape = SampleShape(num_tokens=num_tokens, dtype=dtype, variant=variant)
                    for implementation in spec.implementations(kernels):
                        if "cpu" in implementation.devices:
                            arguments = spec.sample(shape)
                            times = measure(lambda run=implementation.run, given=arguments: run(*given), options.seconds)
                            result = {
                                "benchmark": spec.name,
                                "implementation": implementation.name,
                                "shape": str(shape),
                                **{name: round(value, 1) for name, value in times.items()},
                                "gb_per_s": round(num_bytes(arguments) / times["median_us"] / 1000, 2),
                            }
                            print(json.dumps({**result, **machine}), flush=True)


if __name__ == "__main__":
    main()
