import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).with_name("image_check.py")


@pytest.fixture(scope="module")
def image_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("image_check", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is told to be root before anything else")
def test_what_is_not_installed_is_named_in_one_line(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(TOOL.parents[1] / "support")}
    command = [sys.executable, str(TOOL), "--model", str(tmp_path), "--directory", str(tmp_path / "scratch")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: not installed: buildah, debootstrap, ")
    assert "apt-get install buildah debootstrap" in line
    assert not (tmp_path / "scratch").exists()


def test_the_build_gets_the_pip_settings_that_say_where_to_look_and_the_paths_that_they_name(
    image_check: ModuleType, tmp_path: Path
) -> None:
    listing = f"""\
:env:.find-links='{tmp_path} https://example.org/wheels'
:env:.disable-pip-version-check='1'
global.cert='{tmp_path}/missing.crt'
global.constraint='{tmp_path}/constraints.txt'
global.extra-index-url='file://{tmp_path}/simple https://example.org/simple'
global.find-links='/elsewhere'
"""
    settings, paths = image_check.pip_settings(listing)
    assert settings == (
        f"[global]\ncert = {tmp_path}/missing.crt\nextra-index-url = https://example.org/simple\n"
        f"find-links = {tmp_path} https://example.org/wheels\n"
    )
    assert paths == [str(tmp_path)]


def test_a_machine_without_pip_settings_hands_in_an_empty_file(image_check: ModuleType) -> None:
    assert image_check.pip_settings("") == ("[global]\n", [])
