"""The compiled kernels, loaded into this process."""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelworker.ops.cpu.build import BuildError, build_library, find_toolchain
from modelworker.ops.cpu.fakes import register_fakes
from modelworker.ops.cpu.isa import IsaLevel, cpu_flags, usable_levels


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """A loaded library.

    Attributes:
        level: what it was compiled for.
        ops: its torch ops, as attributes.
        functions: its C functions (see recording.cpp, memory_pool.cpp and read_bandwidth.cpp).
    """

    level: IsaLevel
    ops: Any
    functions: ctypes.CDLL


def load_library(level: IsaLevel, cache: Path, progress: Callable[[int], None] = lambda amount: None) -> CpuLibrary:
    """Compiles the kernels for an ISA level, unless that was done before, and loads them, unless this process did that before.

    Args:
        level: one of `usable_levels`.
        cache: the folder that keeps compiled kernels.
        progress: called with 1 for each of `num_sources()` compiled files.

    Raises:
        BuildError: this process can't use the level, has loaded another build of it, or the kernels can't be compiled or loaded.
    """
    if level not in usable_levels(cpu_flags()):
        raise BuildError(f"this machine can't run kernels for {level.name}")
    path = build_library(find_toolchain(cache), level, progress).resolve()
    if str(path) not in torch.ops.loaded_libraries:
        _load(path, level)
    return CpuLibrary(level, getattr(torch.ops, level.namespace), _functions(path))


def _load(path: Path, level: IsaLevel) -> None:
    # torch ends the process when a library defines ops that there are already.
    if hasattr(getattr(torch.ops, level.namespace), "linear"):
        raise BuildError(f"{path}: this process has loaded another build of the kernels for {level.name}; start a new one")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise BuildError(f"{path}: can't be loaded: {_explain(str(error.__cause__ or error))}") from error
    register_fakes(level.namespace)


def _explain(message: str) -> str:
    """Names a function of ours that the linker didn't find as the sources name it, and says what was forgotten."""
    found = re.search(r"undefined symbol: (\w*11modelworker\w+)", message)
    if found is None:
        return message
    name = found[1]
    if (demangler := shutil.which("c++filt")) is not None:
        name = subprocess.run([demangler, name], capture_output=True, text=True, check=True).stdout.strip()
    return (
        f"undefined symbol: {name}: it is declared, and no .cpp file defines it"
        " (a kernel needs `template void NAME<float>(const void*, Team);` and the same for BFloat16 behind its definition)"
    )


def _functions(path: Path) -> ctypes.CDLL:
    functions = ctypes.CDLL(str(path))
    pointer, size, flag = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool
    for name, result, *arguments in (
        ("pool_new", pointer),
        ("pool_free", None, pointer),
        ("pool_num_bytes", size, pointer),
        ("pool_holds", flag, pointer, pointer),
        ("list_new", pointer, pointer),
        ("list_free", None, pointer),
        ("list_size", size, pointer),
        ("list_replay", None, pointer),
        ("record_begin", flag, pointer),
        ("record_end", None),
        ("read_seconds", ctypes.c_double, pointer, ctypes.c_int64),
    ):
        function = getattr(functions, f"modelworker_{name}")
        function.restype, function.argtypes = result, arguments
    return functions
