"""Files of code that this process will run: only those are read that nobody but this user can have written."""

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedError(Exception):
    """Somebody else could have written what would be run. Its text says what and why, in one line."""


def check_folder(folder: Path) -> None:
    """Refuses a folder whose files others may exchange.

    Raises:
        UntrustedError: it is another user's, or others may write to it.
        OSError: it can't be looked at.
    """
    _check(folder, folder.stat())


def make_folder(folder: Path) -> None:
    """Makes a folder that only this user may read and write, unless there is one.

    Raises:
        UntrustedError: there is one whose files others may exchange.
        OSError: it can't be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_folder(folder)


def open_own(path: Path) -> BinaryIO:
    """Opens a file to be read. What is checked is the open file, whatever the path names by then.

    Raises:
        UntrustedError: it is another user's, or no file, or others may write to it.
        OSError: it can't be opened, or is a symbolic link.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW))  # noqa: SIM115
    try:
        status = os.fstat(file.fileno())
        _check(path, status)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedError(f"{path}: no regular file, so it is not used")
    except BaseException:
        file.close()
        raise
    return file


def write_own(path: Path, content: bytes) -> None:
    """Writes a file that only this user may read and write, so that a reader sees all of it or what was there before.

    Raises:
        OSError: it can't be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _check(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise UntrustedError(f"{path}: belongs to user {status.st_uid}, not to {os.geteuid()}, so it is not used")
    if status.st_mode & _OTHERS_MAY_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        raise UntrustedError(f"{path}: others may write to it (mode {mode:04o}), so it is not used; chmod go-w makes it usable")
