"""Plug-ins: packages whose modules register ops, layers or replacements when they are imported.

A package declares them as entry points of the group `modelworker.plugins`, each naming a module:

    [project.entry-points."modelworker.plugins"]
    fast_silu = "fast_silu.ops"
"""

import logging
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

GROUP = "modelworker.plugins"

_logger = logging.getLogger(__name__)


class PluginError(Exception):
    """A plug-in can't be loaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plugin:
    """A plug-in that is loaded: its name, the distribution that it came with, and that one's version."""

    name: str
    distribution: str
    version: str


def load_plugins() -> tuple[Plugin, ...]:
    """Imports every installed plug-in, in the order of their names. One that is loaded already is left as it is.

    Raises:
        PluginError: one fails, or its entry point does not name a module.
    """
    return tuple(_load(entry) for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name))


def _load(entry: EntryPoint) -> Plugin:
    if entry.attr:
        raise PluginError(f"plug-in {entry.name}: expected its entry point to name a module, found {entry.value!r}")
    try:
        entry.load()
    except Exception as error:
        _logger.debug("plug-in %s failed", entry.name, exc_info=True)
        raise PluginError(f"plug-in {entry.name} ({entry.value}) can't be loaded: {type(error).__name__}: {error}") from error
    plugin = Plugin(
        name=entry.name,
        distribution=entry.dist.name if entry.dist else "",
        version=entry.dist.version if entry.dist else "",
    )
    _logger.info("loaded plug-in %s of %s %s", plugin.name, plugin.distribution, plugin.version)
    return plugin
