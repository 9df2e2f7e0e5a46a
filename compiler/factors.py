"""What compiled code depends on: the factors of a cache key."""

import dataclasses
import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from modelworker.compiler.artifact import Factors
from modelworker.compiler.graph_pass import GraphPass
from modelworker.compiler.model_source import ModelSource
from modelworker.compiler.settings import CompileSettings

# Of the environment, what steers the compilers; where they keep their files is no part of what they make.
_ENVIRONMENT = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_", "TRITON_", "ATEN_CPU_CAPABILITY", "CXX", "CFLAGS", "CXXFLAGS")
_NO_FACTORS = frozenset(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"))


def collect_factors(model: ModelSource, settings: CompileSettings, passes: Iterable[GraphPass]) -> Factors:
    """Collects everything that the code of a model depends on.

    Args:
        model: to compile.
        settings: of the compiler.
        passes: that follow our own; the files that they are defined in are counted among the sources.
    """
    passes = tuple(passes)
    devices = {tensor.device for tensor in model.bound.values()} | {step_input.device for step_input in model.inputs.values()}
    # In their order: the code binds them by position.
    inputs = [[name, [*given.shape], str(given.dtype), str(given.device)] for name, given in model.inputs.items()]
    files = {*model.sources, *Path(__file__).parent.glob("*.py"), *(Path(one.apply.__code__.co_filename) for one in passes)}
    return {
        "versions": _versions(),
        "cpu": _cpu(),
        "devices": sorted(_device(device) for device in devices),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_ENVIRONMENT) and name not in _NO_FACTORS
        },
        "settings": dataclasses.asdict(settings),
        "passes": [one.name for one in passes],
        "model": dict(sorted(model.identity.items())),
        "inputs": inputs,
        "max_sizes": dict(sorted(model.max_sizes.items())),
        "bound": _digest(_kinds(model)),
        "splitting_ops": sorted(model.splitting_ops),
        "op_schemas": _digest(_schemas(model.op_namespaces)),
        "sources": sorted([f"{path.parent.name}/{path.name}", hashlib.sha256(path.read_bytes()).hexdigest()] for path in files),
    }


def _kinds(model: ModelSource) -> Iterator[str]:
    """Yields what is known of each tensor, and with which one it is the same or overlaps.

    That tensors lie in one block of memory, as packed weights do, is no property of the model: which do differs between starts.
    """
    first_with: dict[int, str] = {}
    overlapping = _overlapping(model.bound)
    for name, tensor in model.bound.items():
        same = first_with.setdefault(id(tensor), name)
        shape = ("any", *tensor.shape[1:]) if name in model.any_length else tuple(tensor.shape)
        yield f"{name} {same} {overlapping.get(name)} {shape} {tensor.stride()} {tensor.dtype} {tensor.device}"


def _overlapping(bound: Mapping[str, Tensor]) -> dict[str, str]:
    """Returns, of each tensor whose range of addresses overlaps another one's, a name that all of the group have in common."""
    groups: list[list[str]] = []
    end = 0
    for name, tensor in sorted(bound.items(), key=lambda item: (item[1].data_ptr(), item[0])):
        if tensor.numel() == 0 or tensor.data_ptr() == 0:
            continue
        if tensor.data_ptr() < end:
            groups[-1].append(name)
        else:
            groups.append([name])
        end = max(end, _end_of(tensor))
    return {name: min(group) for group in groups if len(group) > 1 for name in group}


def _end_of(tensor: Tensor) -> int:
    """Returns the address behind the last element of a tensor that has some."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.itemsize


def _schemas(namespaces: Iterable[str]) -> Iterator[str]:
    wanted = tuple(f"{namespace}::" for namespace in namespaces)
    yield from sorted(str(schema) for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(wanted))


def _versions() -> dict[str, str | None]:
    return {
        "python": sys.implementation.cache_tag,
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "triton": metadata.version("triton") if find_spec("triton") else None,
        "c++": _cpp_compiler(),
    }


def _cpp_compiler() -> str | None:
    """Returns which C++ compiler there is: where it is and when that was changed, which takes no child process to find out."""
    path = shutil.which(os.environ.get("CXX", "g++"))
    if path is None:
        return None
    real = Path(path).resolve()
    return f"{real} {real.stat().st_size} {real.stat().st_mtime_ns}"


def _cpu() -> dict[str, object]:
    """Returns what decides about the instructions of generated code, and into how many threads it divides loops."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    kinds = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in reversed(lines)}
    return {
        "machine": platform.machine(),
        "name": kinds.get("model name"),
        "flags": _digest(sorted(kinds.get("flags", "").split())),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }


def _device(device: torch.device) -> str:
    if device.type != "cuda":
        return str(device)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} {torch.cuda.get_device_name(device)} {major}.{minor} CUDA {torch.version.cuda}"


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()
