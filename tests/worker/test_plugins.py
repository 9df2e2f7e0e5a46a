"""Plug-ins: packages that are found by their entry points, and replace ops from outside of this repository."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from modelworker.worker.client import Client
from modelworker.worker.cpu_kernels import CpuKernels
from modelworker.worker.errors import SettingsError, SetupError
from modelworker.worker.op_plan import plan_ops
from modelworker.worker.settings import OpsSettings
from modelworker_testing import checkpoints
from modelworker_testing.checkpoints import TINY, llama_tensors, save_checkpoint
from modelworker_testing.registries import restored_registries
from modelworker_testing.worker_process import worker_process

SAMPLE = Path(checkpoints.__file__).parents[1] / "sample_plugin"
CPU = torch.device("cpu")
Declare = Callable[..., None]


@pytest.fixture(autouse=True)
def _same_registries() -> Iterator[None]:
    with restored_registries():
        yield


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the sample package is installed. It is built from a copy, as building leaves files behind."""
    scratch = tmp_path_factory.mktemp("plugin")
    shutil.copytree(SAMPLE, scratch / "source")
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-index"]
    subprocess.run([*command, "--no-build-isolation", "--target", str(scratch / "site"), str(scratch / "source")], check=True)
    return scratch / "site"


def test_an_installed_plugin_replaces_an_op_of_the_served_model(site: Path, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, TINY, llama_tensors(TINY))
    with worker_process(tmp_path, "--device", "cpu", environment={"PYTHONPATH": str(site)}) as worker:
        with Client(worker.address) as client:
            ops = {op.name: op for op in client.info().ops}
        command = [sys.executable, "-m", "modelworker.worker.cli", "info", worker.address]
        table = subprocess.run([*command, "--ops"], capture_output=True, text=True, check=True).stdout
        document = json.loads(subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout)
        log = worker.log()
    assert ops["silu_and_mul"].implementation == "out of tree (modelworker_fast_silu.FastSiluAndMul)"
    assert ops["silu_and_mul"].reason == "custom_ops is all"
    assert list(ops["silu_and_mul"].alternatives) == ["native", "c++", "triton"]
    assert ops["rms_norm"].implementation == "c++"
    assert ops["attention"].implementation == "built in"
    assert "loaded plug-in fast_silu of modelworker-fast-silu 1.0" in log
    assert {line.split()[0] for line in table.splitlines()} == {"op", *ops}
    assert "out of tree (modelworker_fast_silu.FastSiluAndMul)" in table
    assert {op["name"] for op in document["ops"]} == set(ops)


@pytest.fixture
def declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Declare]:
    """Makes a distribution of one module that declares itself as a plug-in."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def make(name: str, text: str, value: str | None = None) -> None:
        (tmp_path / f"test_plugin_{name}.py").write_text(text)
        metadata = tmp_path / f"test_plugin_{name}-2.5.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: test-plugin-{name}\nVersion: 2.5\n")
        (metadata / "entry_points.txt").write_text(f"[modelworker.plugins]\n{name} = {value or f'test_plugin_{name}'}\n")
        made.append(f"test_plugin_{name}")

    yield make
    for module in made:
        sys.modules.pop(module, None)


def plan(*custom_ops: str) -> Any:
    return plan_ops(OpsSettings(custom_ops=custom_ops), CPU, CpuKernels(), compiles=False)


REGISTERS = """
from modelworker.ops.custom_op import CustomOp

@CustomOp.register("test_plugged")
class Plugged(CustomOp):
    pass
"""


def test_a_plugin_is_loaded_before_its_ops_are_named_and_only_once(declare: Declare) -> None:
    declare("once", REGISTERS)
    assert plan("-test_plugged").custom_ops == ("all", "-test_plugged")
    assert plan().custom_ops == ("all",)


@pytest.mark.parametrize(
    ("text", "value", "message"),
    [
        (
            "raise RuntimeError('no such device')",
            None,
            r"plug-in bad \(test_plugin_bad\) can't be loaded: RuntimeError: no",
        ),
        ("", "test_plugin_missing", r"plug-in bad \(test_plugin_missing\) can't be loaded: ModuleNotFoundError"),
        ("def register(): ...", "test_plugin_bad:register", "plug-in bad: expected its entry point to name a module, found"),
        (REGISTERS.replace("test_plugged", "rms_norm"), None, "can't be loaded: ValueError: the op name 'rms_norm' is taken"),
    ],
)
def test_a_plugin_that_fails_stops_the_start_with_its_name(declare: Declare, text: str, value: str | None, message: str) -> None:
    declare("bad", text, value)
    with pytest.raises(SetupError, match=message):
        plan()


@pytest.mark.parametrize(
    ("custom_ops", "message"),
    [
        (("-silu",), "--custom-ops: -silu: no op has the name 'silu'; did you mean silu_and_mul"),
        (("+rms_norm", "-rms_norm"), r"--custom-ops: \+rms_norm and -rms_norm contradict each other"),
        (("-attention",), "--custom-ops: -attention: no op has the name 'attention'"),
    ],
)
def test_custom_ops_that_make_no_sense_stop_the_start_with_the_flag(custom_ops: tuple[str, ...], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        plan(*custom_ops)
