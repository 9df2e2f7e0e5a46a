"""Compiles the C++ kernels once per machine and keeps the library.

The key of a kept library is a hash of everything that it depends on: sources, flags, compiler, torch. A library is written under
another name and renamed, so that workers that start at once don't disturb each other, and a damaged one is linked again. Objects
are kept likewise (`objects.py`), so that an edit costs the compilation of what it changes.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from modelworker.ops.cpu.isa import IsaLevel
from modelworker.ops.cpu.objects import ObjectStore, included_headers

_logger = logging.getLogger(__name__)

_SOURCE_FOLDER = Path(__file__).parent
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-Wall", "-Wno-psabi")


class BuildError(Exception):
    """The kernels can't be compiled on this machine. Its text says why, in one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Toolchain:
    """The compiler, and the folder that keeps its results."""

    compiler: str
    version: str
    cache: Path


def find_toolchain(cache: Path, compiler: str = "g++") -> Toolchain:
    """Finds the compiler.

    Raises:
        BuildError: there is none, or it doesn't work.
    """
    path = shutil.which(compiler)
    if path is None:
        raise BuildError(f"no compiler: {compiler} was not found (on Debian and Ubuntu: install g++)")
    version = _run([path, "--version"]).partition("\n")[0]
    return Toolchain(compiler=path, version=version, cache=cache)


def build_library(toolchain: Toolchain, level: IsaLevel, progress: Callable[[int], None] = lambda amount: None) -> Path:
    """Returns the library of an ISA level, compiled if it isn't kept already.

    Args:
        toolchain: the compiler and the cache.
        level: what it is compiled for.
        progress: called with 1 for each of `num_sources()` files.

    Raises:
        BuildError: the compiler fails, or the cache can't be written.
    """
    sources = _sources()
    flags = (*_FLAGS, *level.compiler_flags, f"-DMODELWORKER_NAMESPACE={level.namespace}")
    keys = {source: _key(toolchain, flags, source) for source in sources}
    folder = toolchain.cache / _digest(*keys.values())[:32]
    library = folder / f"{level.namespace}.so"
    digest = folder / "sha256"
    if _is_intact(library, digest):
        progress(len(sources))
        return library
    try:
        toolchain.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        store = ObjectStore(toolchain.cache / f"objects_{level.name}")
        with tempfile.TemporaryDirectory(dir=toolchain.cache) as scratch:
            built = _compile(toolchain, store, keys, flags, Path(scratch), progress)
            Path(scratch, "sha256").write_text(_digest(built.read_bytes()))
            folder.mkdir(mode=0o700, exist_ok=True)
            built.replace(library)
            Path(scratch, "sha256").replace(digest)
        store.drop_unused(keys.values())
    except OSError as error:
        remedy = "make it writable, or choose another"
        raise BuildError(
            f"{toolchain.cache}, the folder of compiled kernels, can't be written ({error.strerror}): {remedy}"
        ) from error
    return library


def num_sources() -> int:
    """Number of files that are compiled."""
    return len(_sources())


def _sources() -> list[Path]:
    return sorted(_SOURCE_FOLDER.glob("*.cpp"))


def _key(toolchain: Toolchain, flags: tuple[str, ...], source: Path) -> str:
    """Returns a hash of all that an object depends on."""
    files = (source, *sorted(included_headers(source)))
    contents = (part for path in files for part in (path.name, path.read_bytes()))
    return _digest(toolchain.version, torch.__version__, *flags, *contents)


def _digest(*contents: str | bytes) -> str:
    """Returns a hash of contents and of where each ends."""
    result = hashlib.sha256()
    for content in contents:
        encoded = content.encode() if isinstance(content, str) else content
        result.update(len(encoded).to_bytes(8, "little") + encoded)
    return result.hexdigest()


def _is_intact(library: Path, digest: Path) -> bool:
    if not library.exists():
        return False
    try:
        if digest.read_text() == _digest(library.read_bytes()):
            return True
    except OSError:
        pass
    _logger.warning("%s is damaged: linking it again", library)
    return False


def _compile(
    toolchain: Toolchain,
    store: ObjectStore,
    keys: Mapping[Path, str],
    flags: tuple[str, ...],
    folder: Path,
    progress: Callable[[int], None],
) -> Path:
    """Compiles what the store lacks and links all of it; returns the library, in the folder."""
    torch_folder = Path(torch.__file__).parent
    include = f"-I{torch_folder / 'include'}"

    def object_of(source: Path) -> Path:
        kept = store.find(source.stem, keys[source])
        if kept is None:
            target = folder / f"{source.stem}.o"
            _run([toolchain.compiler, *flags, include, "-c", str(source), "-o", str(target)])
            kept = store.keep(target, source.stem, keys[source])
        progress(1)
        return kept

    # The one with torch's headers takes longest: it goes first.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(object_of, sorted(keys, key=lambda source: source.stem != "doors")))
    library = folder / "library.so"
    # Linked to torch's own OpenMP runtime: a second one would bring a second pool of threads that spin beside the first.
    torch_libraries = [f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-ltorch"]
    _run([toolchain.compiler, "-shared", *map(str, objects), *torch_libraries, "-o", str(library)])
    return library


def _run(command: list[str]) -> str:
    """Runs a command of the compiler and returns what it prints."""
    name = Path(command[0]).name
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{name} can't be run: {error.strerror}") from error
    if result.returncode != 0:
        line = next((line for line in result.stderr.splitlines() if "error" in line), result.stderr.partition("\n")[0])
        _logger.error("%s failed:\n%s", command[0], result.stderr)
        raise BuildError(f"{name} failed with status {result.returncode}: {line.strip()}")
    return result.stdout
