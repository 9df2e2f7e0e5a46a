"""The wheel, installed outside the repository, serves and generates.

The environment is new and sees, besides the wheel, only the distributions that the wheel's metadata asks for (extras worker and
demo), as links to those that are installed here: an import that isn't declared fails, and nothing is downloaded. `make image-check`
installs the dependencies for real: gigabytes, with a CUDA build of torch.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from modelworker.worker.client import Client

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("compiler", "graphs", "ops", "proto", "worker", "pyproject.toml", "README.md", "LICENSE")
EXTRAS = frozenset({"worker", "demo"})
# Root may write where no permission bit says so, unless it gives that power up.
WITHOUT_OVERRIDE = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"] if os.geteuid() == 0 else []

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Installation:
    """A virtual environment with the wheel, and an empty folder to run in."""

    environment: Path
    site_packages: Path
    cwd: Path

    def command(self, *arguments: str) -> list[str]:
        return [*WITHOUT_OVERRIDE, str(self.environment / "bin" / arguments[0]), *arguments[1:]]

    @property
    def variables(self) -> dict[str, str]:
        """No HOME, and nothing of this test's own environment but what finds programs and sets the threads."""
        return {"PATH": "/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"]}

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            self.command(*arguments), cwd=self.cwd, env=self.variables, capture_output=True, text=True, check=False, timeout=300
        )

    def listing(self) -> set[str]:
        return {str(path) for path in self.environment.rglob("*")}


def build_wheel(directory: Path) -> Path:
    """Builds from a copy: a build folder left behind would bring deleted modules back."""
    copy = directory / "source"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        else:
            shutil.copyfile(ROOT / name, copy / name)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(directory), str(copy)], check=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def needed(distribution: metadata.Distribution, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """The names, with their extras, that a distribution asks for on this machine."""
    for text in distribution.requires or ():
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def closure(root: metadata.Distribution, extras: frozenset[str]) -> dict[str, metadata.Distribution]:
    """Every distribution that `root` asks for, directly or not."""
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = list(needed(root, extras))
    while waiting:
        if (wanted := waiting.pop()) not in seen:
            seen.add(wanted)
            found[wanted[0]] = metadata.distribution(wanted[0])
            waiting += needed(found[wanted[0]], wanted[1])
    return found


def link(distribution: metadata.Distribution, into: Path) -> None:
    """Links what a distribution installed at the top of site-packages; scripts and the like are left out."""
    tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        if not (into / top).exists():
            (into / top).symlink_to(Path(sysconfig.get_path("purelib"), top))


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    directory = tmp_path_factory.mktemp("installed-wheel")
    environment, cwd = directory / "environment", directory / "elsewhere"
    cwd.mkdir()
    venv.create(environment, symlinks=True)
    (site_packages,) = environment.glob("lib/python*/site-packages")
    command = [sys.executable, "-m", "pip", "--python", str(environment), "install", "-q", "--no-deps", str(build_wheel(directory))]
    subprocess.run(command, check=True)
    (installed,) = metadata.distributions(name="modelworker", path=[str(site_packages)])
    for distribution in closure(installed, EXTRAS).values():
        link(distribution, site_packages)
    folders = [environment, *(path for path in environment.rglob("*") if path.is_dir() and not path.is_symlink())]
    for folder in folders:
        folder.chmod(0o555)
    yield Installation(environment, site_packages, cwd)
    for folder in folders:
        folder.chmod(0o755)


def test_the_environment_is_read_only_and_sees_nothing_but_what_the_wheel_asks_for(installation: Installation) -> None:
    program = (
        "import importlib.util, os, modelworker.worker\n"
        "print(modelworker.worker.__file__)\n"
        "print([name for name in ('pytest', 'transformers', 'hypothesis', 'pip') if importlib.util.find_spec(name)])\n"
        f"try: os.mkdir({str(installation.site_packages / 'probe')!r})\n"
        "except PermissionError: print('read-only')\n"
    )
    done = installation.run("python", "-c", program)
    assert done.returncode == 0, done.stderr
    where, undeclared, writing = done.stdout.splitlines()
    assert Path(where).is_relative_to(installation.site_packages)
    assert (undeclared, writing) == ("[]", "read-only")


@contextlib.contextmanager
def served(installation: Installation, model: Path) -> Iterator[str]:
    """A worker of the installed wheel; afterwards it must drain and exit with 0."""
    port_file, log_path = installation.cwd / "port", installation.cwd.parent / "log"
    command = installation.command("modelworker", "serve", "--model", str(model), "--port", "0", "--port-file", str(port_file))
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, cwd=installation.cwd, env=installation.variables, stdout=log, stderr=subprocess.STDOUT)

    def check_alive(state: str) -> None:
        if process.poll() is not None:
            pytest.fail(f"{state}: the worker ended with {process.poll()}:\n{log_path.read_text()}")

    try:
        while not port_file.exists():
            check_alive("not listening")
            time.sleep(0.05)
        address = f"127.0.0.1:{port_file.read_text().strip()}"
        with Client(address) as client:
            client.wait_ready(120, check_alive)
        yield address
        process.terminate()
        assert process.wait(60) == 0, log_path.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_it_serves_and_generates_and_writes_nothing_where_it_is_installed(installation: Installation, smollm2_dir: Path) -> None:
    before = installation.listing()
    with served(installation, smollm2_dir) as address:
        prompt = ["--no-chat", "--prompt", "The capital of France is", "--max-tokens", "4", "--json"]
        done = installation.run("modelworker", "generate", "--address", address, "--tokenizer", str(smollm2_dir), *prompt)
        assert done.returncode == 0, done.stderr
        (result,) = json.loads(done.stdout)["results"]
        assert result["text"].startswith(" Paris.")
    assert installation.listing() == before
    assert [path.name for path in installation.cwd.iterdir()] == ["port"]
