"""Layers that a package outside of this repository can replace when they are instantiated."""

import logging
from collections.abc import Callable
from typing import Any, Self, TypeVar, overload

from torch import nn

from modelworker.ops.registry import OPS, REPLACEMENTS, full_name

_logger = logging.getLogger(__name__)

Class = TypeVar("Class", bound=type)


class Replaceable(nn.Module):
    """What ops and pluggable layers have in common: a registered name, and replacement at construction.

    Attributes:
        op_name: the registered name; an instance of a replacement has the name of what it replaces.
        replaced: the class that the instance's class replaces; None: it is no replacement.
    """

    op_name: str
    replaced: type | None

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """Makes the replacement of the class where there is one.

        Raises:
            TypeError: the class is a base that nobody registers, or its replacement does not derive from it.
        """
        if Replaceable in cls.__bases__ or cls is Replaceable:
            raise TypeError(
                f"{cls.__name__} can't be instantiated: derive a class and register that with @{cls.__name__}.register(name)"
            )
        chosen = REPLACEMENTS.entries.get(cls.__name__, cls)
        if not issubclass(chosen, cls):
            # Python would not call __init__.
            raise TypeError(f"{full_name(chosen)} replaces {full_name(cls)}, so it must derive from it")
        if chosen is not cls:
            _logger.debug("%s is built in place of %s", full_name(chosen), full_name(cls))
            REPLACEMENTS.warned.add(cls.__name__)
        layer: Self = super().__new__(chosen)
        replaced_name = REPLACEMENTS.key_of(chosen)
        layer.replaced = next((base for base in chosen.__mro__[1:] if base.__name__ == replaced_name), None)
        origin = layer.replaced or chosen
        layer.op_name = origin.__dict__.get("op_name", origin.__name__)
        if "op_name" not in origin.__dict__ and OPS.warns_first(full_name(origin)):
            _logger.warning("%s was never registered: it follows the global setting of custom_ops", full_name(origin))
        return layer

    @classmethod
    def register(cls, name: str) -> Callable[[Class], Class]:
        """Gives the decorated class its name.

        Raises:
            ValueError: the name is taken.
            TypeError: what is decorated is no class of this kind.
        """

        def decorate(layer: Class) -> Class:
            if not isinstance(layer, type) or not issubclass(layer, cls):
                raise TypeError(f"{cls.__name__}.register({name!r}) decorates classes that derive from it, found {layer!r}")
            OPS.add(name, layer)
            layer.op_name = name
            return layer

        return decorate

    @overload
    @classmethod
    def register_oot(cls, name: Class) -> Class: ...

    @overload
    @classmethod
    def register_oot(cls, name: str | None = None) -> Callable[[Class], Class]: ...

    @classmethod
    def register_oot(cls, name: Any = None) -> Any:
        """Lets the decorated class replace another: with parentheses or without.

        Args:
            name: of the class to replace; by default the one that this is called on.

        Raises:
            TypeError: what is decorated is not a class, or nothing says what it replaces.
            ValueError: the class is replaced already.
        """
        if name is None or isinstance(name, str):
            return lambda decorated: cls._replace(decorated, name)
        return cls._replace(name, None)

    @classmethod
    def _replace(cls, decorated: Class, name: str | None) -> Class:
        if not isinstance(decorated, type):
            raise TypeError(f"register_oot decorates a class, found {decorated!r}")
        if name is None and Replaceable in cls.__bases__:
            raise TypeError(
                f"{cls.__name__}.register_oot needs the name of the class to replace, or is called on that class itself"
            )
        REPLACEMENTS.add(name or cls.__name__, decorated)
        return decorated


class PluggableLayer(Replaceable):
    """A composed layer with state of its own that can be replaced as a whole. It has no implementations to choose from."""


def warn_of_unused_replacements() -> None:
    """Warns, once, of each replacement that nothing has instantiated. Called when the model is built."""
    for name, replacement in REPLACEMENTS.entries.items():
        if REPLACEMENTS.warns_first(name):
            _logger.warning("%s replaces %s, which this model does not use", full_name(replacement), name)
