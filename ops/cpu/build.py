"""Compiles the C++ kernels once per machine and keeps the library.

The key of a kept library is a hash of everything that it depends on: sources, flags, compiler, torch. A library is written under
another name and renamed, so that workers that start at once don't disturb each other. Objects are kept likewise (`objects.py`), so
that an edit costs the compilation of what it changes.

A cache that can't be used costs a compilation, never the kernels: what is damaged, or could be somebody else's, is made again, in a
folder that is private to this process, and kept if that is possible.
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
from typing import BinaryIO

import torch

from modelworker.ops.cpu.isa import IsaLevel
from modelworker.ops.cpu.objects import ObjectStore, included_headers
from modelworker.ops.cpu.own_files import UntrustedError, check_folder, make_folder, open_own, write_own

_logger = logging.getLogger(__name__)

_SOURCE_FOLDER = Path(__file__).parent
_DIGEST = "sha256"
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


def library_key(toolchain: Toolchain, level: IsaLevel) -> str:
    """Returns what names a build: libraries with the same key do the same."""
    return _digest(*_source_keys(toolchain, level).values())[:32]


def build_library(toolchain: Toolchain, level: IsaLevel, progress: Callable[[int], None] = lambda amount: None) -> BinaryIO:
    """Returns the library of an ISA level, compiled if it isn't kept already.

    Args:
        toolchain: the compiler and the cache.
        level: what it is compiled for.
        progress: called with 1 for each of `num_sources()` files.

    Returns:
        The library, open: what was verified, even if its path names something else by now, or nothing. It lies in a folder that has
        the name of its key.

    Raises:
        BuildError: the compiler fails, or there is no place where it could write.
    """
    keys = _source_keys(toolchain, level)
    folder = toolchain.cache / library_key(toolchain, level)
    library = folder / f"{level.namespace}.so"
    if (kept := _open_kept(library)) is not None:
        progress(len(keys))
        return kept
    store = ObjectStore(toolchain.cache / f"objects_{level.name}")
    try:
        with tempfile.TemporaryDirectory(prefix="modelworker-") as scratch:
            private = Path(scratch, folder.name)
            private.mkdir()
            built = _compile(toolchain, store, keys, _flags(level), private, progress)
            if (kept := _keep(built, library)) is not None:
                store.drop_unused(keys.values())
                return kept
            return built.open("rb")
    except OSError as error:
        raise BuildError(f"{tempfile.gettempdir()}, where kernels are compiled, can't be written ({error.strerror})") from error


def num_sources() -> int:
    """Number of files that are compiled."""
    return len(_sources())


def _sources() -> list[Path]:
    return sorted(_SOURCE_FOLDER.glob("*.cpp"))


def _flags(level: IsaLevel) -> tuple[str, ...]:
    return (*_FLAGS, *level.compiler_flags, f"-DMODELWORKER_NAMESPACE={level.namespace}")


def _source_keys(toolchain: Toolchain, level: IsaLevel) -> Mapping[Path, str]:
    """Returns of each source a hash of all that its object depends on."""

    def key_of(source: Path) -> str:
        files = (source, *sorted(included_headers(source)))
        contents = (part for path in files for part in (path.name, path.read_bytes()))
        return _digest(toolchain.version, torch.__version__, *_flags(level), *contents)

    return {source: key_of(source) for source in _sources()}


def _digest(*contents: str | bytes) -> str:
    """Returns a hash of contents and of where each ends."""
    result = hashlib.sha256()
    for content in contents:
        encoded = content.encode() if isinstance(content, str) else content
        result.update(len(encoded).to_bytes(8, "little") + encoded)
    return result.hexdigest()


def _open_kept(library: Path) -> BinaryIO | None:
    """Opens a kept library; None: there is none that is intact and that this user alone wrote."""
    file = None
    try:
        for folder in (library.parents[1], library.parent):
            check_folder(folder)
        file = open_own(library)
        with open_own(library.with_name(_DIGEST)) as digest:
            if digest.read() == _digest(file.read()).encode():
                file.seek(0)
                return file
        _logger.warning("%s is damaged: linking it again", library)
    except FileNotFoundError:
        if file is not None:
            _logger.warning("%s is damaged, for it has no digest: linking it again", library)
    except (OSError, UntrustedError) as error:
        _logger.warning("%s: the kernels are made again", error)
    if file is not None:
        file.close()
    return None


def _keep(built: Path, library: Path) -> BinaryIO | None:
    """Puts a library into the cache and opens it there; None, with a warning: that is impossible, or it would not be safe there."""
    cache = library.parents[1]
    try:
        make_folder(cache)
        make_folder(library.parent)
        content = built.read_bytes()
        write_own(library, content)
        write_own(library.with_name(_DIGEST), _digest(content).encode())
        return open_own(library)
    except (OSError, UntrustedError) as error:
        remedy = "make it a folder that only this user may write to, or choose another"
        _logger.warning("%s: compiled kernels can't be kept there (%s), every start compiles them: %s", cache, error, remedy)
    return None


def _compile(
    toolchain: Toolchain,
    store: ObjectStore,
    keys: Mapping[Path, str],
    flags: tuple[str, ...],
    folder: Path,
    progress: Callable[[int], None],
) -> Path:
    """Compiles what the store lacks and links all of it; returns the library. Only the folder, which is private, is linked from."""
    torch_folder = Path(torch.__file__).parent
    include = f"-I{torch_folder / 'include'}"

    def object_of(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        if (content := store.find(source.stem, keys[source])) is not None:
            target.write_bytes(content)
        else:
            _run([toolchain.compiler, *flags, include, "-c", str(source), "-o", str(target)])
            store.keep(target.read_bytes(), source.stem, keys[source])
        progress(1)
        return target

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
