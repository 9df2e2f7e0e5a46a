"""The Dockerfile against the repository; `make image-check` builds and runs it."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def dockerfile() -> str:
    return (ROOT / "Dockerfile").read_text()


def copied(dockerfile: str) -> set[str]:
    """The paths that COPY takes from the build context."""
    lines = re.findall(r"^COPY (?!--from)(.*)$", dockerfile, re.MULTILINE)
    return {path for line in lines for path in line.split()[:-1]}


def test_every_folder_of_the_wheel_and_nothing_else_is_copied(dockerfile: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = set(project["tool"]["setuptools"]["package-dir"].values())
    assert copied(dockerfile) == folders | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}


def test_the_build_context_is_what_is_copied(dockerfile: str) -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == copied(dockerfile)


def test_the_version_of_the_image_is_that_of_the_project(dockerfile: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f'org.opencontainers.image.version="{version}"' in dockerfile
