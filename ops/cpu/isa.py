"""The instruction sets that the C++ kernels are compiled for, and which of them this process may use."""

import ctypes
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ARCH_PRCTL: Final = 158
_ARCH_REQ_XCOMP_PERM: Final = 0x1023
_AMX_TILE_DATA: Final = 18


@dataclass(frozen=True, slots=True)
class IsaLevel:
    """A set of instructions that a whole library is compiled for.

    Attributes:
        name: also the suffix of the library's op namespace, modelworker_<name>.
        cpu_flags: what /proc/cpuinfo must list.
        compiler_flags: for g++ and clang++.
    """

    name: str
    cpu_flags: frozenset[str]
    compiler_flags: tuple[str, ...]

    @property
    def namespace(self) -> str:
        """Of the library's ops in torch.ops."""
        return f"modelworker_{self.name}"


_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512_BF16 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16")
_AVX512_FLAGS = frozenset({"avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})

LEVELS: Final = (
    IsaLevel("amx_bf16", _AVX512_FLAGS | {"amx_tile", "amx_bf16"}, (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16")),
    IsaLevel("avx512_bf16", _AVX512_FLAGS, _AVX512_BF16),
    IsaLevel("avx2", frozenset({"avx2", "fma", "f16c", "bmi2"}), _AVX2),
    IsaLevel("portable", frozenset(), ()),
)
"""Best first."""


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Returns the CPU's feature flags as the kernel names them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def may_use_amx() -> bool:
    """Asks the kernel for the use of AMX tiles in this process. It may refuse, on a CPU that has them."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _AMX_TILE_DATA) == 0)


def usable_levels(flags: Iterable[str]) -> tuple[IsaLevel, ...]:
    """Returns the levels that this process can run, best first; the portable one is always among them."""
    available = frozenset(flags)
    levels = (level for level in LEVELS if level.cpu_flags <= available)
    return tuple(level for level in levels if "amx_tile" not in level.cpu_flags or may_use_amx())
