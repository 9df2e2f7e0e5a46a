"""Settings as JSON and back, so that a worker can be built again as another one was."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from modelworker.worker.errors import SettingsError

Settings = TypeVar("Settings")


def settings_as_record(settings: Any) -> dict[str, Any]:
    """Returns a settings object by field, sections as objects of their own."""
    return dataclasses.asdict(settings)


def settings_from_record(settings: type[Settings], record: Mapping[str, Any], path: str = "") -> Settings:
    """Makes a settings object of what `settings_as_record` returned; what it doesn't mention has its default.

    Args:
        settings: class of it.
        record: may have been through JSON, which knows no tuples.
        path: of the record, for errors.

    Raises:
        SettingsError: it names a setting that this version doesn't have.
    """
    hints = typing.get_type_hints(settings)
    values: dict[str, Any] = {}
    for name, value in record.items():
        if name not in hints:
            raise SettingsError(f"{path}{name}: this version has no such setting; use the version that wrote it")
        if dataclasses.is_dataclass(hints[name]):
            values[name] = settings_from_record(typing.cast(type[Any], hints[name]), value, f"{path}{name}.")
        else:
            values[name] = tuple(value) if isinstance(value, list) else value
    return settings(**values)


def with_overrides(settings: Settings, overrides: Mapping[str, Any]) -> Settings:
    """Returns settings with other values in some fields, whichever section has them."""
    hints = typing.get_type_hints(type(settings))
    changes: dict[str, Any] = {}
    for name, hint in hints.items():
        if dataclasses.is_dataclass(hint):
            changes[name] = with_overrides(getattr(settings, name), overrides)
        elif name in overrides:
            changes[name] = overrides[name]
    return dataclasses.replace(settings, **changes)  # type: ignore[type-var]
