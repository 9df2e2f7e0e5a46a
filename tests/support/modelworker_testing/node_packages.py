"""The packages of tests/node, installed into build/node."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "tests" / "node"
_PACKAGE_FILES = ("package.json", "package-lock.json", ".npmrc")
_INSTALL_SECONDS = 120


def installed_node_modules() -> Path:
    """Installs the locked packages once and returns their `node_modules`; skips the test where Node.js is not installed.

    Where it is, a failing installation fails the test: a client that is silently not tested protects nobody.
    """
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (on Debian and Ubuntu: install nodejs and npm)")
    digest = hashlib.sha256(b"".join((SOURCES / name).read_bytes() for name in _PACKAGE_FILES)).hexdigest()[:16]
    target = ROOT / "build" / "node" / digest
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        _install(target)
    return target / "node_modules"


def _install(target: Path) -> None:
    """Installs beside the target and renames, so that it is complete or absent."""
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        scratch = Path(directory, "packages")
        scratch.mkdir()
        for name in _PACKAGE_FILES:
            shutil.copyfile(SOURCES / name, scratch / name)
        command = ["npm", "ci", "--ignore-scripts", "--prefer-offline", "--no-progress"]
        try:
            done = subprocess.run(
                command, cwd=scratch, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False, env=_environment()
            )
            problem = f"ended with {done.returncode}:\n{done.stdout}{done.stderr}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"did not end within {_INSTALL_SECONDS} s"
        if problem:
            pytest.fail(f"the packages of tests/node can't be installed: `{' '.join(command)}` {problem}", pytrace=False)
        if not target.exists():
            scratch.rename(target)


def _environment() -> dict[str, str]:
    return {**os.environ, "NPM_CONFIG_UPDATE_NOTIFIER": "false"}
