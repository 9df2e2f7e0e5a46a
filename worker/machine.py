"""What this process may use of the machine: CPUs and memory, as limited by affinity and control groups.

A container's CPU quota is not visible in the number of cores or in the affinity; threads sized by those would throttle each other.
File formats: the Linux kernel's documentation of cgroup v1 (cpu, memory) and v2.
"""

import math
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

# cgroup v1 says "no limit" with a number near 2**63.
_UNLIMITED_BYTES = 2**60


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A snapshot.

    Attributes:
        num_cpus: CPUs in the process's affinity mask.
        cpu_quota: CPUs' worth of time that control groups allow, or None.
        omp_num_threads: what the user asked for through OMP_NUM_THREADS, or None.
        free_bytes: memory that can still be used.
    """

    num_cpus: int
    cpu_quota: float | None
    omp_num_threads: int | None
    free_bytes: int

    @property
    def num_threads(self) -> int:
        """Threads that compute: the user's OMP_NUM_THREADS, else what affinity and quota (rounded down) leave, at least 1."""
        if self.omp_num_threads is not None:
            return self.omp_num_threads
        quota = self.num_cpus if self.cpu_quota is None else math.floor(self.cpu_quota)
        return max(1, min(self.num_cpus, quota))


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """The processor.

    Attributes:
        name: as it calls itself, or at least its architecture.
        features: as the kernel names them, e.g. avx2; empty where it does not say.
    """

    name: str
    features: frozenset[str]

    @property
    def has_avx2(self) -> bool:
        """Whether vectors of 256 bits can be used, with fused multiplication and addition."""
        return {"avx2", "fma"} <= self.features

    @property
    def has_avx512(self) -> bool:
        """Whether it has the parts of AVX-512 that torch needs to use vectors of 512 bits."""
        return {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= self.features

    @property
    def has_bfloat16(self) -> bool:
        """Whether there are instructions that multiply bfloat16 (AVX-512 BF16, AMX or Arm's bf16)."""
        return bool({"avx512_bf16", "amx_bf16", "bf16"} & self.features)

    @property
    def has_amx(self) -> bool:
        """Whether tiles of bfloat16 are multiplied by AMX."""
        return {"amx_tile", "amx_bf16"} <= self.features


def read_cpu(root: Path = Path("/")) -> Cpu:
    """Reads what the kernel says of the first processor.

    Args:
        root: where /proc is looked for.
    """
    fields: dict[str, str] = {}
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, separator, value = line.partition(":")
        if separator:
            fields.setdefault(name.strip().lower(), value.strip())
    features = fields.get("flags") or fields.get("features") or ""
    return Cpu(name=fields.get("model name") or platform.processor() or platform.machine(), features=frozenset(features.split()))


def choose_threads(wanted: int | None, machine: Machine) -> tuple[int, str]:
    """Resolves --threads. Returns the number of threads that compute, and where it comes from."""
    if wanted is not None:
        return wanted, f"--threads {wanted}"
    if machine.omp_num_threads is not None:
        return machine.num_threads, f"OMP_NUM_THREADS={machine.omp_num_threads}"
    if machine.cpu_quota is not None and machine.cpu_quota < machine.num_cpus:
        return machine.num_threads, f"the CPU quota of {machine.cpu_quota:g}, at most {machine.num_cpus} CPUs by affinity"
    return machine.num_threads, f"{machine.num_cpus} CPUs by affinity, no lower quota"


def read_machine(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Machine:
    """Reads the limits of this process.

    Args:
        root: where /proc and /sys are looked for.
        environment: where OMP_NUM_THREADS is looked for.
    """
    groups = list(_control_groups(root))
    quotas = [quota for group in groups if (quota := _cpu_quota(group)) is not None]
    frees = [free for group in groups if (free := _free_bytes(group)) is not None]
    affinity = getattr(os, "sched_getaffinity", None)
    # A list ("4,2") gives a number per nesting level; the first one counts here.
    omp = environment.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return Machine(
        num_cpus=len(affinity(0)) if affinity is not None else os.cpu_count() or 1,
        cpu_quota=min(quotas, default=None),
        omp_num_threads=int(omp) if omp.isdecimal() and int(omp) > 0 else None,
        free_bytes=min([_available_bytes(root), *frees]),
    )


def _control_groups(root: Path) -> Iterator[Path]:
    """Yields the directories of the groups that limit this process, parents included, of both versions."""
    mount = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = controllers.split(",")
        if controllers and not {"cpu", "memory"} & set(names):
            continue
        # In a container the group's path may not be mounted: then the mount itself is the container's group.
        for top in [mount / controllers, *(mount / name for name in names)] if controllers else [mount]:
            group = top / path.lstrip("/")
            while group != top and top in group.parents:
                yield group
                group = group.parent
            yield top


def _cpu_quota(group: Path) -> float | None:
    quota, _, period = _read(group / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _free_bytes(group: Path) -> int | None:
    limit, used = _read(group / "memory.max"), _read(group / "memory.current")
    if not limit:
        limit, used = _read(group / "memory.limit_in_bytes"), _read(group / "memory.usage_in_bytes")
    if not limit.isdecimal() or not used.isdecimal() or int(limit) >= _UNLIMITED_BYTES:
        return None
    # Cached file pages count as used, but are given back when memory runs short.
    statistics = dict(line.split(" ", 1) for line in _read(group / "memory.stat").splitlines() if " " in line)
    reclaimable = statistics.get("total_inactive_file", statistics.get("inactive_file", "0"))
    return max(0, int(limit) - int(used) + int(reclaimable))


def _available_bytes(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
