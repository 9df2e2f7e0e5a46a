"""The tests that need a device."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from xml.etree import ElementTree

from gpu_check.plan import Plan
from gpu_check.row import Row, Status

ROOT = Path(__file__).resolve().parents[3]
_FILES: Mapping[str, str] = MappingProxyType(
    {
        "tests/graphs/test_contract.py": "graphs: contract of backends",
        "tests/gpu/test_graphs_on_the_device.py": "graphs: on the device",
        "tests/gpu/test_ops_on_the_device.py": "ops: catalog",
        "tests/gpu/test_worker_on_the_device.py": "worker: all modes",
    }
)
_MAX_FAILURES_SHOWN = 5


def device_tests(plan: Plan) -> Iterator[Row]:
    """Runs the contract on the device's graph backend, the catalog of ops and the worker's modes on the device.

    The conftest above all tests is for machines with all development packages: it is left out.
    """
    report = plan.output / "tests.xml"
    report.unlink(missing_ok=True)
    # Warnings of a torch that the project is not tested with every day are shown, and fail nothing.
    options = ["-q", "--tb=short", "--color=no", "-p", "no:cacheprovider", "-W", "default", f"--junitxml={report}"]
    # Without a GPU, its tests run on the CPU, and of the contract one of the CPU's backends stands in.
    on_cpu = "(test_contract and cpu and not kernels) or on_the_device"
    wanted = ["-m", "cuda"] if plan.device.type == "cuda" else ["-k", on_cpu]
    command = [sys.executable, "-m", "pytest", *options, "--confcutdir=tests/gpu", *wanted, *_FILES]
    environment = {
        # Two threads that wait for each other stand still whenever another process has one of the cores.
        "OMP_NUM_THREADS": "1",
        **os.environ,
        # Of plug-ins that happen to be installed, none is needed.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "MODELWORKER_TEST_DEVICE": plan.device.type,
        "MODELWORKER_TEST_CACHE": str(plan.cache),
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.STDOUT, check=False)
    if not report.exists():
        yield Row(part="tests", what="all", status="FAILED", note=f"pytest ended with {done.returncode}, see the log")
        return
    yield from _rows(report)


def _rows(report: Path) -> Iterator[Row]:
    cases = list(ElementTree.parse(report).iter("testcase"))
    for file, what in _FILES.items():
        module = file.removesuffix(".py").replace("/", ".")
        own = [case for case in cases if module in (case.get("classname"), case.get("name"))]
        skipped = sum(case.find("skipped") is not None for case in own)
        failed = [(case, fault) for case in own for kind in ("failure", "error") if (fault := case.find(kind)) is not None]
        passed = len(own) - skipped - len(failed)
        counts = f"{passed} passed, {len(failed)} failed, {skipped} skipped"
        status: Status = "FAILED" if failed or not own else "ok" if passed else "skipped"
        yield Row(part="tests", what=what, status=status, note=counts)
        for case, fault in failed[:_MAX_FAILURES_SHOWN]:
            message = fault.get("message", "").strip().partition("\n")[0]
            yield Row(part="tests", what=what, status="FAILED", note=f"{case.get('name')}: {message}"[:240])
