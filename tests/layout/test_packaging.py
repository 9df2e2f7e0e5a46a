"""What the wheel holds: every module and data file of the folders, and nothing else."""

import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

FOLDERS = ("compiler", "graphs", "ops", "proto", "worker")
TOP_LEVEL = {
    *FOLDERS,
    *("tests", "deploy", "Makefile", "Dockerfile", "pyproject.toml", "constraints.txt"),
    *("LICENSE", "README.md", "CHANGELOG.md", "DECISIONS.md", "OPERATIONS.md"),
}


def product_files(root: Path) -> set[str]:
    """The files of the folders, as `modelworker/X/...`; what Python and compilers leave behind doesn't count."""
    return {
        f"modelworker/{path.relative_to(root).as_posix()}"
        for folder in FOLDERS
        for path in (root / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".so")
    }


def test_every_folder_with_modules_is_a_listed_package(root: Path) -> None:
    listed = set(tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    assert {str(Path(name).parent).replace("/", ".") for name in product_files(root)} == listed


def test_every_package_has_an_init_and_every_top_package_is_typed(root: Path) -> None:
    files = product_files(root)
    folders = {str(Path(name).parent) for name in files}
    assert {f"{folder}/__init__.py" for folder in folders} <= files
    assert {f"modelworker/{folder}/py.typed" for folder in FOLDERS} <= files


def test_every_data_file_is_covered_by_the_package_data_patterns(root: Path) -> None:
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = settings["package-data"]["*"]
    data = [name for name in product_files(root) if not name.endswith(".py")]
    assert [name for name in data if not any(Path(name).match(pattern) for pattern in patterns)] == []


def test_the_top_level_holds_only_what_belongs_there(root: Path) -> None:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
    )
    top = {line.split("/")[0] for line in listing.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy: a build folder left behind would bring deleted modules back."""
    scratch = tmp_path_factory.mktemp("wheel")
    copy = scratch / "source"
    copy.mkdir()
    for folder in FOLDERS:
        shutil.copytree(root / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(root / name, copy / name)
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(scratch), str(copy)], check=True)
    (built,) = scratch.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_folders_and_nothing_else(root: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == product_files(root)


@pytest.mark.slow
def test_an_installed_wheel_runs_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel)], check=True)
    # -S leaves out the finder of the editable install, and site-packages with it: that folder is put back by name.
    site_packages = sysconfig.get_path("purelib")
    program = (
        f"import sys; sys.path[:0] = [{str(target)!r}, {site_packages!r}]; from modelworker.worker import cli; sys.exit(cli.main())"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, "--version"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    located = subprocess.check_output(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(target)!r}); import modelworker.worker as w; print(w.__file__)",
        ],
        cwd=tmp_path,
        text=True,
    )
    assert Path(located.strip()).is_relative_to(target)


def test_every_make_target_is_described_by_make_help(root: Path) -> None:
    makefile = (root / "Makefile").read_text()
    phony = re.search(r"^\.PHONY:(.*)$", makefile, re.MULTILINE)
    assert phony
    targets = set(phony.group(1).split())
    described = {
        line.split()[1]
        for line in subprocess.check_output(["make", "help"], cwd=root, text=True).splitlines()
        if line.startswith("  make ")
    }
    assert targets == described
    assert targets >= {"demo", "test", "test-full", "serve", "check", "bench", "proto", "wheel", "clean"}


def test_every_direct_dependency_is_pinned_in_the_constraints(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())
    wanted = [
        *project["project"]["dependencies"],
        *(requirement for extra in project["project"]["optional-dependencies"].values() for requirement in extra),
        *project["build-system"]["requires"],
    ]
    pins = [line for line in (root / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin)] == []
    pinned = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
    names = {re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-") for requirement in wanted}  # type: ignore[index]
    assert names - pinned == set()
