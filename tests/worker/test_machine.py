"""CPU and memory limits, read from directories that look like those of real containers."""

import os
from pathlib import Path

import pytest

from modelworker.worker.machine import Machine, choose_threads, read_cpu, read_machine

MEMINFO = "MemTotal:       64000000 kB\nMemAvailable:   32000000 kB\n"


def tree(root: Path, **files: str) -> Path:
    """Writes files into a root; `__` in a name stands for a slash and `_dot_` for a dot."""
    for name, text in {"proc__meminfo": MEMINFO, **files}.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cpu_max", "quota"),
    [("200000 100000", 2.0), ("250000 100000", 2.5), ("50000 100000", 0.5), ("max 100000", None), ("", None), ("nonsense", None)],
)
def test_the_quota_of_cgroup_v2_is_read(tmp_path: Path, cpu_max: str, quota: float | None) -> None:
    root = tree(tmp_path, proc__self__cgroup="0::/\n", sys__fs__cgroup__cpu_dot_max=cpu_max)
    assert read_machine(root, {}).cpu_quota == quota


def test_the_tightest_quota_of_a_group_and_its_parents_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        proc__self__cgroup="0::/pods/pod1/main\n",
        sys__fs__cgroup__pods__pod1__main__cpu_dot_max="max 100000",
        sys__fs__cgroup__pods__pod1__cpu_dot_max="300000 100000",
        sys__fs__cgroup__pods__cpu_dot_max="400000 100000",
    )
    assert read_machine(root, {}).cpu_quota == 3.0


@pytest.mark.parametrize(("quota", "expected"), [("150000", 1.5), ("-1", None), ("0", 0.0)])
def test_the_quota_of_cgroup_v1_is_read(tmp_path: Path, quota: str, expected: float | None) -> None:
    root = tree(
        tmp_path,
        proc__self__cgroup="12:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n",
        sys__fs__cgroup__cpu__cpu_dot_cfs_quota_us=quota,
        sys__fs__cgroup__cpu__cpu_dot_cfs_period_us="100000",
    )
    assert read_machine(root, {}).cpu_quota == expected


def machine(**changes: object) -> Machine:
    fields: dict[str, object] = {"num_cpus": 16, "cpu_quota": None, "omp_num_threads": None, "free_bytes": 2**30}
    return Machine(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "threads"),
    [
        ({"cpu_quota": 2.0}, 2), ({"cpu_quota": 2.9}, 2), ({"cpu_quota": 0.5}, 1), ({}, 16), ({"cpu_quota": 64.0}, 16),
        ({"num_cpus": 3}, 3), ({"cpu_quota": 2.0, "omp_num_threads": 5}, 5),
    ],
)  # fmt: skip
def test_threads_follow_quota_rounded_down_affinity_and_the_users_word(facts: dict[str, object], threads: int) -> None:
    assert machine(**facts).num_threads == threads


@pytest.mark.parametrize(("text", "expected"), [("3", 3), ("4,2", 4), ("0", None), ("many", None), ("", None)])
def test_omp_num_threads_is_taken_when_it_is_a_number(tmp_path: Path, text: str, expected: int | None) -> None:
    assert read_machine(tree(tmp_path), {"OMP_NUM_THREADS": text}).omp_num_threads == expected


def test_affinity_is_the_processes_own(tmp_path: Path) -> None:
    assert read_machine(tree(tmp_path), {}).num_cpus == len(os.sched_getaffinity(0))


def test_free_memory_is_what_the_machine_has_available_when_no_group_limits_it(tmp_path: Path) -> None:
    assert read_machine(tree(tmp_path), {}).free_bytes == 32_000_000 * 1024


def test_free_memory_is_what_the_groups_limit_leaves_with_file_pages_counted_as_free(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        proc__self__cgroup="0::/\n",
        sys__fs__cgroup__memory_dot_max="8000000000",
        sys__fs__cgroup__memory_dot_current="3000000000",
        sys__fs__cgroup__memory_dot_stat="anon 1000\ninactive_file 1000000000\n",
    )
    assert read_machine(root, {}).free_bytes == 6_000_000_000


def test_cgroup_v1s_unlimited_memory_is_no_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        proc__self__cgroup="5:memory:/\n",
        sys__fs__cgroup__memory__memory_dot_limit_in_bytes="9223372036854771712",
        sys__fs__cgroup__memory__memory_dot_usage_in_bytes="1000",
    )
    assert read_machine(root, {}).free_bytes == 32_000_000 * 1024


@pytest.mark.parametrize(
    ("wanted", "facts", "threads", "source"),
    [
        (3, {"cpu_quota": 2.0, "omp_num_threads": 5}, 3, "--threads 3"),
        (None, {"cpu_quota": 2.0, "omp_num_threads": 5}, 5, "OMP_NUM_THREADS=5"),
        (None, {"cpu_quota": 2.5}, 2, "the CPU quota of 2.5, at most 16 CPUs by affinity"),
        (None, {"cpu_quota": 64.0}, 16, "16 CPUs by affinity, no lower quota"),
        (None, {}, 16, "16 CPUs by affinity, no lower quota"),
    ],
)
def test_the_number_of_threads_comes_with_its_source(
    wanted: int | None, facts: dict[str, object], threads: int, source: str
) -> None:
    assert choose_threads(wanted, machine(**facts)) == (threads, source)


@pytest.mark.parametrize(
    ("flags", "abilities"),
    [
        ("sse4_2 avx", set()),
        ("avx2 fma", {"avx2"}),
        ("avx2 fma avx512f avx512bw avx512dq avx512vl", {"avx2", "avx512"}),
        ("avx2 fma avx512f avx512bw avx512dq avx512vl avx512_bf16", {"avx2", "avx512", "bfloat16"}),
        ("avx2 fma avx512f avx512bw avx512dq avx512vl amx_tile amx_bf16", {"avx2", "avx512", "bfloat16", "amx"}),
    ],
)
def test_what_a_cpu_can_do_is_read_from_its_flags(tmp_path: Path, flags: str, abilities: set[str]) -> None:
    cpu = read_cpu(tree(tmp_path, proc__cpuinfo=f"processor\t: 0\nmodel name\t: Fast 9000\nflags\t\t: {flags}\n\nprocessor\t: 1\n"))
    assert cpu.name == "Fast 9000"
    assert {ability for ability in ("avx2", "avx512", "bfloat16", "amx") if getattr(cpu, f"has_{ability}")} == abilities


def test_an_arm_cpu_and_a_system_that_says_nothing_have_a_name_too(tmp_path: Path) -> None:
    assert read_cpu(tree(tmp_path / "arm", proc__cpuinfo="processor\t: 0\nFeatures\t: fp asimd bf16\n")).has_bfloat16
    silent = read_cpu(tree(tmp_path / "silent"))
    assert silent.name
    assert silent.features == frozenset()
