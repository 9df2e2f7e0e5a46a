"""Triton's compiled kernels as part of an artifact: collected from the cache that Triton wrote, and put back for it to find them.

Triton keeps a folder for every kernel and configuration, and in each a file that lists the others by their absolute paths.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory

from modelworker.compiler.environment import environment

_DIRECTORY = "TRITON_CACHE_DIR"
_GROUP_PREFIX = "__grp__"
# Stands for the directory in kept files.
_PLACEHOLDER = b"{triton cache}"


def collect_triton_files(directory: Path) -> dict[str, bytes]:
    """Returns the files below Triton's cache directory, by their paths in it."""
    return {
        str(path.relative_to(directory)): _replaced(path, path.read_bytes(), str(directory).encode(), _PLACEHOLDER)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.suffix != ".lock"
    }


def restore_triton_files(files: Mapping[str, bytes], directory: Path) -> None:
    """Writes collected files below another directory.

    Raises:
        ValueError: a name leads out of it; nothing is written then.
    """
    for name in files:
        if not PurePosixPath(name).parts or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"a kernel's file is named {name!r}, which is no place below its directory")
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_replaced(path, content, _PLACEHOLDER, str(directory).encode()))


@contextlib.contextmanager
def triton_directory(files: Mapping[str, bytes] | None = None) -> Iterator[Path]:
    """Lets Triton keep its files in a private directory, as long as it is open.

    Args:
        files: that it finds there.
    """
    with TemporaryDirectory(prefix="modelworker-triton-") as name:
        restore_triton_files(files or {}, Path(name))
        with environment(**{_DIRECTORY: name}):
            yield Path(name)


def _replaced(path: Path, content: bytes, old: bytes, new: bytes) -> bytes:
    return content.replace(old, new) if path.name.startswith(_GROUP_PREFIX) else content
