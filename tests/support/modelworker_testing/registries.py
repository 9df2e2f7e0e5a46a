"""What a test registers is forgotten afterwards."""

import contextlib
from collections.abc import Iterator

from modelworker.ops.registry import OPS, REPLACEMENTS


@contextlib.contextmanager
def restored_registries() -> Iterator[None]:
    """Puts the registries of ops back to what they were."""
    saved = [(registry, dict(registry.entries), set(registry.warned)) for registry in (OPS, REPLACEMENTS)]
    try:
        yield
    finally:
        for registry, entries, warned in saved:
            registry.entries, registry.warned = entries, warned
