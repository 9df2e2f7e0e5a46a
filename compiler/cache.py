"""Compiled models on disk.

An artifact is code that this process will run. So only files are read that nobody but this user can have written, and what is run
is what was verified. Whatever is wrong with the cache, the model is compiled instead, and the reason is logged and counted.
"""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from modelworker.compiler.artifact import Artifact, DamagedArtifactError, Factors, read_artifact, write_artifact

_logger = logging.getLogger(__name__)

_KEPT_SECONDS = 30 * 24 * 3600
# Nobody takes longer to write a file.
_WRITING_SECONDS = 3600
_TEMPORARY_BYTES = 8
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class Miss:
    """Why there is nothing in the cache.

    Attributes:
        reason: "absent", "damaged", "untrusted" or "unreadable".
        message: a line for the operator.
    """

    reason: str
    message: str


class ArtifactCache:
    """A directory of compiled models. Several workers may use it at once.

    For each there is NAME.artifact and, only to be read by people, NAME.json with what NAME stands for.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def load(self, factors: Factors) -> Artifact | Miss:
        """Returns the model that was made from the same factors, or why there is none."""
        path = self.directory / f"{name_of(factors)}.artifact"
        try:
            found = read_artifact(self._read(path), factors)
            with contextlib.suppress(OSError):
                os.utime(path)
            return found
        except FileNotFoundError:
            return Miss("absent", f"{path}: not compiled before")
        except _UntrustedError as error:
            return Miss("untrusted", str(error))
        except DamagedArtifactError as error:
            return Miss("damaged", f"{path}: {error}")
        except OSError as error:
            return Miss("unreadable", f"{path}: can't be read: {error.strerror}")

    def store(self, artifact: Artifact, factors: Factors) -> str | None:
        """Keeps a model.

        Returns:
            None, or why that is impossible.
        """
        name = name_of(factors)
        try:
            self._prepare()
            self._write(f"{name}.json", json.dumps(factors, indent=2, sort_keys=True).encode())
            self._write(f"{name}.artifact", write_artifact(artifact, factors))
            self._forget_old()
        except _UntrustedError as error:
            return str(error)
        except OSError as error:
            return f"{self.directory}: can't be written to: {error.strerror}"
        return None

    def _forget_old(self) -> None:
        """Removes what no worker has used for a long time, and what those left behind that were killed while they wrote.

        Each change of model, settings or code makes an artefact useless.
        """
        before = time.time() - _KEPT_SECONDS
        for path in self.directory.glob("*.artifact"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < before:
                    path.unlink()
                    path.with_suffix(".json").unlink(missing_ok=True)
        for path in self.directory.glob(f".*.{'[0-9a-f]' * 2 * _TEMPORARY_BYTES}"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - _WRITING_SECONDS:
                    path.unlink()

    def _prepare(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(self.directory, self.directory.stat())

    def _read(self, path: Path) -> bytes:
        _check_owner(self.directory, self.directory.stat())
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            _check_owner(path, os.fstat(descriptor))
            return file.read()

    def _write(self, name: str, content: bytes) -> None:
        """Writes a file so that a reader sees all of it or what was there before."""
        temporary = self.directory / f".{name}.{secrets.token_hex(_TEMPORARY_BYTES)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            temporary.replace(self.directory / name)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


class _UntrustedError(Exception):
    """Somebody else could have written what would be run."""


def name_of(factors: Factors) -> str:
    """Returns the name under which a model is kept that is made from these factors."""
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()[:32]


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise _UntrustedError(f"{path}: belongs to user {status.st_uid}, not to {os.geteuid()}, so it is not used")
    if status.st_mode & _OTHERS_MAY_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        raise _UntrustedError(f"{path}: others may write to it (mode {mode:04o}), so it is not used; chmod go-w makes it usable")
