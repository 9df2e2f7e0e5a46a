"""Compiled objects, kept so that an edit of one source costs its own compilation and the link."""

import hashlib
import logging
import os
import re
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from modelworker.ops.cpu.own_files import UntrustedError, check_folder, make_folder, open_own, write_own

_logger = logging.getLogger(__name__)

_INCLUDE: Final = re.compile(rb'^#include "(.+)"', re.MULTILINE)
_UNUSED_SECONDS: Final = 24 * 3600


class ObjectStore:
    """Objects by their keys. The name of each says what it holds, so that a damaged one is none.

    Args:
        folder: where they lie; made when the first is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_usable = _is_usable(folder)

    def find(self, stem: str, key: str) -> bytes | None:
        """Returns the object of a source for a key, which then counts as used; None: none is intact and this user's alone."""
        for path in self._folder.glob(f"{stem}-{_short(key)}-*.o") if self._is_usable else ():
            try:
                with open_own(path) as file:
                    content = file.read()
                    if path.name == _name(stem, key, content):
                        os.utime(file.fileno())
                        return content
            except FileNotFoundError:
                continue
            except (OSError, UntrustedError) as error:
                _logger.warning("%s: %s.cpp is compiled again", error, stem)
        return None

    def keep(self, content: bytes, stem: str, key: str) -> None:
        """Puts a compiled object into the store; where that is impossible, the next build compiles it again."""
        if not self._is_usable:
            return
        try:
            make_folder(self._folder.parent)
            make_folder(self._folder)
            write_own(self._folder / _name(stem, key, content), content)
        except (OSError, UntrustedError) as error:
            _logger.debug("%s.o is not kept: %s", stem, error)

    def drop_unused(self, keys: Collection[str]) -> None:
        """Deletes the objects of other keys that no build has used for a day: another version of the sources may be in use, too."""
        used = {_short(key) for key in keys}
        for path in self._folder.glob("*.o"):
            try:
                if path.name.split("-")[1] not in used and time.time() - path.stat().st_mtime > _UNUSED_SECONDS:
                    path.unlink()
            except OSError:
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


def _is_usable(folder: Path) -> bool:
    """Whether nobody but this user can have put objects into a folder, which need not be there yet."""
    try:
        check_folder(folder.parent)
        check_folder(folder)
    except FileNotFoundError:
        return True
    except (OSError, UntrustedError) as error:
        _logger.warning("%s: its objects are compiled again", error)
        return False
    return True


def _name(stem: str, key: str, content: bytes) -> str:
    return f"{stem}-{_short(key)}-{_short(hashlib.sha256(content).hexdigest())}.o"


def _short(digest: str) -> str:
    return digest[:32]
