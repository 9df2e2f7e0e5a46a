"""Command-line flags and their environment twins.

Every option `--some-name` of every command can also be given as MODELWORKER_SOME_NAME; the command line wins. This is the one place
where the environment is read.
"""

import argparse
import dataclasses
import difflib
import os
import re
import shlex
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from modelworker.worker.errors import SettingsError

ENVIRONMENT_PREFIX = "MODELWORKER_"
USAGE_EXIT_CODE = 2

_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}

Settings = TypeVar("Settings")


class _HelpFormatter(argparse.HelpFormatter):
    """Shows each option's default and environment variable."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=120)

    def _get_help_string(self, action: argparse.Action) -> str:
        # Python 3.11 and 3.12 add the default to the help of booleans themselves.
        text = (action.help or "").removesuffix(" (default: %(default)s)")
        if (variable := environment_name(action)) is None:
            return text
        notes = [variable]
        if default := _shown(action):
            notes.insert(0, f"default: {default}")
        return text + f" [{'; '.join(notes)}]".replace("%", "%%")


class CommandParser(argparse.ArgumentParser):
    """An argument parser with environment twins and errors of one line."""

    def __init__(self, *args: Any, environment: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", _HelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self.environment = os.environ if environment is None else environment

    def error(self, message: str) -> NoReturn:
        """Ends the process with one line and exit code 2."""
        self.exit(USAGE_EXIT_CODE, f"modelworker: error: {message} (see `{self.prog} --help`)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments; what they leave out is taken from the environment."""
        words = list(sys.argv[1:] if args is None else args)
        for action in self._actions:
            variable = environment_name(action)
            # An empty variable is an unset one: manifests often carry empty ones.
            if variable is not None and not _is_given(action, words) and (text := self.environment.get(variable)):
                action.default = self._environment_value(action, variable, text)
                action.required = False
        return super().parse_known_args(words, namespace)

    def variables(self) -> set[str]:
        """Names of the environment variables that this parser reads."""
        return {variable for action in self._actions if (variable := environment_name(action)) is not None}

    def _environment_value(self, action: argparse.Action, variable: str, text: str) -> Any:
        if action.nargs == 0:
            if text.strip().lower() not in _BOOLEANS:
                self.error(f"environment variable {variable}: {text!r} is not a boolean: expected one of {', '.join(_BOOLEANS)}")
            return _BOOLEANS[text.strip().lower()]
        words = shlex.split(text) if action.nargs in ("*", "+") else [text]
        try:
            values = [self._get_value(action, word) for word in words]
            for value in values:
                self._check_value(action, value)
        except argparse.ArgumentError as error:
            self.error(f"environment variable {variable}: {error.message}")
        appended = action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction)
        return values if appended else values[0]


def environment_name(action: argparse.Action) -> str | None:
    """Returns the environment twin of an option or an optional positional argument; None for --help, commands and the like."""
    if isinstance(action, argparse._HelpAction | argparse._VersionAction):
        return None
    names = [option.removeprefix("--") for option in action.option_strings if option.startswith("--")]
    if not names and action.nargs != argparse.OPTIONAL:
        return None
    name = names[0] if names else action.dest
    return ENVIRONMENT_PREFIX + name.upper().replace("-", "_")


def _is_given(action: argparse.Action, words: list[str]) -> bool:
    """Whether the command line names an option. Then its variable counts for nothing, not even if its value is wrong."""
    return any(word == option or word.startswith(f"{option}=") for option in action.option_strings for word in words)


def _shown(action: argparse.Action) -> str:
    """Returns a default for people; "" where there is none worth showing."""
    value = action.default
    if isinstance(value, bool):
        return ("on" if value else "off") if isinstance(action, argparse.BooleanOptionalAction) else ""
    if isinstance(value, int) and value >= 2**20 and value % 2**20 == 0:
        return f"{value // 2**20}M"
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return value if isinstance(value, str) and value != argparse.SUPPRESS else ""


def checked_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Makes a parse function of settings usable as an argparse type: its message becomes the error's."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except SettingsError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def add_settings(parser: argparse.ArgumentParser, settings: type[Any], *, has_defaults: bool = True) -> None:
    """Adds one flag for every field of a settings class; fields that are settings classes become groups with their title.

    Args:
        parser: gets the flags.
        settings: class of the settings.
        has_defaults: what is not given gets its default; else it is missing from the parsed arguments.
    """
    hints = typing.get_type_hints(settings)
    plain = [field for field in dataclasses.fields(settings) if not dataclasses.is_dataclass(hints[field.name])]
    if plain:
        summary, _, _ = (settings.__doc__ or "").partition("\n")
        name = re.sub("(?<!^)(?=[A-Z])", " ", settings.__name__.removesuffix("Settings")).lower().replace("kv ", "KV ")
        group = parser.add_argument_group(name, summary)
        for field in plain:
            default = field.default if has_defaults else argparse.SUPPRESS
            _add_flag(group, field, default, is_boolean=hints[field.name] is bool)
    for field in dataclasses.fields(settings):
        if field not in plain:
            add_settings(parser, hints[field.name], has_defaults=has_defaults)


def _add_flag(group: argparse._ArgumentGroup, field: "dataclasses.Field[Any]", default: object, *, is_boolean: bool) -> None:
    flag = "--" + field.name.replace("_", "-")
    if is_boolean:
        group.add_argument(flag, default=default, help=field.metadata["help"], action=argparse.BooleanOptionalAction)
        return
    choices = field.metadata["choices"] or None
    group.add_argument(
        flag,
        default=default,
        help=field.metadata["help"],
        type=checked_type(field.metadata["parse"]),
        choices=choices,
        metavar=None if choices else field.metadata["metavar"] or field.name.upper(),
    )


def read_settings(settings: type[Settings], arguments: argparse.Namespace) -> Settings:
    """Makes a settings object from parsed arguments."""
    hints = typing.get_type_hints(settings)
    values = {
        field.name: read_settings(hints[field.name], arguments)
        if dataclasses.is_dataclass(hints[field.name])
        else getattr(arguments, field.name)
        for field in dataclasses.fields(settings)  # type: ignore[arg-type]
    }
    return settings(**values)


def unknown_variables(known: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the MODELWORKER_* variables that no flag reads, each with the nearest that one does, or ""."""
    names = {name.removeprefix(ENVIRONMENT_PREFIX): name for name in sorted(known)}
    found = {}
    for variable in sorted(environment):
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in names.values():
            nearest = difflib.get_close_matches(variable.removeprefix(ENVIRONMENT_PREFIX), names, n=1)
            found[variable] = names[nearest[0]] if nearest else ""
    return found


def warn_of_unknown_variables(parser: CommandParser) -> None:
    """Writes a line to stderr for each MODELWORKER_* variable that the command does not read."""
    for name, nearest in unknown_variables(parser.variables(), parser.environment).items():
        hint = f": did you mean {nearest}?" if nearest else ""
        print(f"modelworker: warning: environment variable {name} is not read by `{parser.prog}`{hint}", file=sys.stderr)
