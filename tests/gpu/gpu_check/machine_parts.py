"""What the machine is, and what it can do at most."""

import platform
from collections.abc import Iterator
from importlib import metadata

import torch

from gpu_check.plan import Plan
from gpu_check.row import Row
from modelworker.worker.cpu_kernels import load_cpu_kernels
from modelworker.worker.machine import read_cpu
from modelworker.worker.machine_limits import LimitProbe
from modelworker.worker.progress import LogProgress
from modelworker.worker.settings import CacheSettings, WorkerSettings

_PACKAGES = ("torch", "triton", "numpy", "safetensors", "pytest", "transformers")
_ROUNDS = 5


def versions(plan: Plan) -> Iterator[Row]:
    """Yields what is installed, and the card."""
    yield Row(part="versions", what="python", note=platform.python_version())
    for name in _PACKAGES:
        try:
            yield Row(part="versions", what=name, note=metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Row(part="versions", what=name, status="skipped", note="is not installed")
    if plan.device.type == "cuda":
        properties = torch.cuda.get_device_properties(plan.device)
        free, total = torch.cuda.mem_get_info(plan.device)
        yield Row(
            part="versions",
            what="card",
            note=f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.multi_processor_count} multiprocessors, "
            f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free, CUDA {torch.version.cuda}",
        )
    else:
        yield Row(part="versions", what="card", note=f"none: {read_cpu().name}, {torch.get_num_threads()} threads")


def limits(plan: Plan) -> Iterator[Row]:
    """Measures what steps are held against."""
    settings = WorkerSettings(cache=CacheSettings(cache_dir=str(plan.cache)))
    kernels = load_cpu_kernels(settings, plan.device, LogProgress())
    probe = LimitProbe(plan.device, torch.bfloat16, kernels.library)
    probe.measure()
    measured = [probe.measure() for _ in range(_ROUNDS)]
    reads = sorted(one.read_bytes_per_second for one in measured)
    rates = sorted(one.operations_per_second for one in measured)
    spread = "least {:.3g}, most {:.3g} of " + str(_ROUNDS)
    what = "bandwidth of copies" if plan.device.type == "cuda" else "bandwidth of reads"
    yield Row(
        part="limits", what=what, value=reads[_ROUNDS // 2] / 1e9, unit="GB/s", note=spread.format(reads[0] / 1e9, reads[-1] / 1e9)
    )
    yield Row(
        part="limits",
        what="bf16 products, best shape",
        value=rates[_ROUNDS // 2] / 1e12,
        unit="TFLOP/s",
        note=spread.format(rates[0] / 1e12, rates[-1] / 1e12),
    )
