"""The compiled kernels, loaded into this process."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelworker.ops.cpu.build import BuildError, build_library, find_toolchain
from modelworker.ops.cpu.isa import IsaLevel


@dataclass(frozen=True, slots=True)
class CpuLibrary:
    """A loaded library.

    Attributes:
        level: what it was compiled for.
        ops: its torch ops, as attributes.
        functions: its C functions (recording and replaying, see launch.cpp).
    """

    level: IsaLevel
    ops: Any
    functions: ctypes.CDLL


def load_library(level: IsaLevel, cache: Path, progress: Callable[[int], None] = lambda amount: None) -> CpuLibrary:
    """Compiles the kernels for an ISA level, unless that was done before, and loads them.

    Raises:
        BuildError: they can't be compiled or loaded.
    """
    path = build_library(find_toolchain(cache), level, progress)
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise BuildError(f"{path}: can't be loaded: {error}") from error
    return CpuLibrary(level, getattr(torch.ops, level.namespace), ctypes.CDLL(str(path)))
