"""Compiled objects, kept so that an edit of one source costs its own compilation and the link."""

import hashlib
import os
import re
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

_INCLUDE: Final = re.compile(rb'^#include "(.+)"', re.MULTILINE)
_UNUSED_SECONDS: Final = 24 * 3600


class ObjectStore:
    """Objects by their keys. The name of each says what it holds, so that a damaged one is none.

    Args:
        folder: where they lie; made when the first is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, stem: str, key: str) -> Path | None:
        """Returns the intact object of a source for a key, which then counts as used; None: there is none."""
        for path in self._folder.glob(f"{stem}-{_short(key)}-*.o"):
            try:
                if path.name == _name(stem, key, path.read_bytes()):
                    os.utime(path)
                    return path
            except FileNotFoundError:
                continue
        return None

    def keep(self, compiled: Path, stem: str, key: str) -> Path:
        """Moves a compiled object, which lies on the same file system, into the store, and returns where it is."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        kept = self._folder / _name(stem, key, compiled.read_bytes())
        return compiled.replace(kept)

    def drop_unused(self, keys: Collection[str]) -> None:
        """Deletes the objects of other keys that no build has used for a day: another version of the sources may be in use, too."""
        used = {_short(key) for key in keys}
        for path in self._folder.glob("*.o"):
            try:
                if path.name.split("-")[1] not in used and time.time() - path.stat().st_mtime > _UNUSED_SECONDS:
                    path.unlink()
            except FileNotFoundError:
                continue


def included_headers(source: Path) -> frozenset[Path]:
    """Returns the headers beside a source that it includes, directly or through others. The compiler tells of missing ones."""
    found: set[Path] = set()
    unread = [source]
    while unread:
        path = unread.pop()
        named = {path.with_name(name.decode()) for name in _INCLUDE.findall(path.read_bytes())}
        headers = {header for header in named if header.is_file()}
        unread += headers - found
        found |= headers
    return frozenset(found)


def _name(stem: str, key: str, content: bytes) -> str:
    return f"{stem}-{_short(key)}-{_short(hashlib.sha256(content).hexdigest())}.o"


def _short(digest: str) -> str:
    return digest[:32]
