"""Versions of the interpreter and of the packages that decide how a worker behaves."""

import importlib.metadata
import platform
from collections.abc import Mapping

_PACKAGES = ("modelworker", "torch", "triton", "safetensors", "grpcio", "protobuf", "numpy")


def installed_versions() -> Mapping[str, str]:
    """Returns the versions of what is installed, by name; nothing is imported for it."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
