"""The compiled kernels, loaded into this process."""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelworker.ops.cpu.build import BuildError, Toolchain, build_library, find_toolchain, library_key, num_sources
from modelworker.ops.cpu.fakes import register_fakes
from modelworker.ops.cpu.isa import IsaLevel, cpu_flags, usable_levels

_DESCRIPTORS = "/proc/self/fd/"


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
    toolchain = find_toolchain(cache)
    path = _loaded_path(library_key(toolchain, level))
    if path is not None:
        progress(num_sources())
    else:
        path = _load(toolchain, level, progress)
    return CpuLibrary(level, getattr(torch.ops, level.namespace), _functions(path))


def _loaded_path(key: str) -> str | None:
    """Returns under which path this process has loaded a build."""
    own = (path for path in torch.ops.loaded_libraries if path.startswith(_DESCRIPTORS))
    return next((path for path in own if Path(path).readlink().parent.name == key), None)


def _load(toolchain: Toolchain, level: IsaLevel, progress: Callable[[int], None]) -> str:
    """Loads a library as the file that was verified, and returns under which path.

    Its descriptor stays open as long as the process lives: the path names nothing else, and the loader knows the library by it.
    """
    with build_library(toolchain, level, progress) as library:
        # torch ends the process when a library defines ops that there are already.
        if hasattr(getattr(torch.ops, level.namespace), "linear"):
            raise BuildError(
                f"{library.name}: this process has loaded another build of the kernels for {level.name}; start a new one"
            )
        descriptor = os.dup(library.fileno())
        path = f"{_DESCRIPTORS}{descriptor}"
        try:
            # As torch.ops.load_library does, which would resolve the path to one that may name another file by now.
            ctypes.CDLL(path)
        except OSError as error:
            os.close(descriptor)
            raise BuildError(f"{library.name}: can't be loaded: {_explain(str(error))}") from error
    torch.ops.loaded_libraries.add(path)
    register_fakes(level.namespace)
    return path


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


def _functions(path: str) -> ctypes.CDLL:
    functions = ctypes.CDLL(path)
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
        ("list_replay_timed", None, pointer, pointer),
        ("record_begin", flag, pointer),
        ("record_end", None),
        ("read_seconds", ctypes.c_double, pointer, ctypes.c_int64),
    ):
        function = getattr(functions, f"modelworker_{name}")
        function.restype, function.argtypes = result, arguments
    return functions
