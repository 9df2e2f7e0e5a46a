import argparse
import dataclasses
import typing

import pytest

from modelworker.worker.flags import CommandParser, add_settings, checked_type, read_settings, unknown_variables
from modelworker.worker.setting_values import positive_int
from modelworker.worker.settings import WorkerSettings


def parse(*words: str, **environment: str) -> WorkerSettings:
    parser = CommandParser(prog="modelworker serve", environment=environment)
    add_settings(parser, WorkerSettings)
    return read_settings(WorkerSettings, parser.parse_args(list(words)))


def leaves(settings: type = WorkerSettings) -> dict[str, "dataclasses.Field[object]"]:
    hints = typing.get_type_hints(settings)
    found = {}
    for field in dataclasses.fields(settings):
        found |= leaves(hints[field.name]) if dataclasses.is_dataclass(hints[field.name]) else {field.name: field}
    return found


def value_of(settings: WorkerSettings, name: str) -> object:
    return next(getattr(group, name) for group in vars_of(settings) if hasattr(group, name))


def vars_of(settings: WorkerSettings) -> list[object]:
    return [getattr(settings, field.name) for field in dataclasses.fields(settings)]


EXAMPLES: dict[str, tuple[str, object]] = {
    "model": ("some/dir", "some/dir"),
    "dtype": ("float32", "float32"),
    "max_model_len": ("77", 77),
    "kv_cache_memory": ("2G", 2 * 2**30),
    "kv_cache_fraction": ("0.5", 0.5),
    "port": ("0", 0),
    "drain_seconds": ("1.5", 1.5),
    "log_level": ("debug", "debug"),
    "max_message_size": ("1MiB", 2**20),
}


def test_without_flags_and_environment_the_settings_are_the_defaults():
    assert parse() == WorkerSettings()


def test_no_two_settings_share_a_name():
    counted = sum(len(dataclasses.fields(group)) for group in vars_of(WorkerSettings()))
    assert len(leaves()) == counted


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_flag_and_its_variable_set_the_same_field(name: str):
    text, value = EXAMPLES[name]
    flag, variable = "--" + name.replace("_", "-"), "MODELWORKER_" + name.upper()
    assert value_of(parse(flag, text), name) == value
    assert value_of(parse(f"{flag}={text}"), name) == value
    assert value_of(parse(**{variable: text}), name) == value


def test_flags_win_over_the_environment_even_over_a_wrong_value():
    assert parse("--port", "5", MODELWORKER_PORT="6").server.port == 5
    assert parse("--port=5", MODELWORKER_PORT="nonsense").server.port == 5
    assert parse("--no-reflection", MODELWORKER_REFLECTION="true").server.reflection is False


def test_an_empty_variable_is_an_unset_one():
    assert parse(MODELWORKER_PORT="", MODELWORKER_MODEL="", MODELWORKER_REFLECTION="") == WorkerSettings()


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("true", True), ("Yes", True), ("on", True), ("0", False), ("FALSE", False), ("off", False)]
)
def test_booleans_have_two_flags_and_several_spellings_in_the_environment(text: str, value: bool):
    assert parse("--require-fencing").fencing.require_fencing is True
    assert parse("--no-require-fencing").fencing.require_fencing is False
    assert parse(MODELWORKER_REQUIRE_FENCING=text).fencing.require_fencing is value


WRONG = [
    ("port", "70000", "'70000' is not a port of 0 .. 65535"),
    ("port", "x", "'x' is not a port"),
    ("dtype", "float16", "invalid choice: 'float16' (choose from"),
    ("max_sequences", "0", "'0' is not an integer of 1 .. 1073741824"),
    ("kv_cache_fraction", "1.5", "'1.5' is above 1"),
    ("kv_cache_memory", "lots", "'lots' is not a size: expected something like 512M or 1.5G"),
    ("stall_seconds", "nan", "'nan' is not a number above 0"),
]


@pytest.mark.parametrize(("name", "text", "message"), WRONG)
def test_a_wrong_value_is_one_line_that_names_flag_or_variable(
    name: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
):
    flag, variable = "--" + name.replace("_", "-"), "MODELWORKER_" + name.upper()
    for words, environment, where in (
        ((flag, text), {}, f"argument {flag}: "),
        ((), {variable: text}, f"environment variable {variable}: "),
    ):
        with pytest.raises(SystemExit) as caught:
            parse(*words, **environment)
        assert caught.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"modelworker: error: {where}{message}")
        assert line.endswith("(see `modelworker serve --help`)")


def test_a_wrong_boolean_in_the_environment_names_the_variable(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse(MODELWORKER_REFLECTION="maybe")
    assert (
        "environment variable MODELWORKER_REFLECTION: 'maybe' is not a boolean: expected one of 1, true" in capsys.readouterr().err
    )


@pytest.mark.parametrize("word", ["--prot", "--mod", "--port2", "extra"])
def test_unknown_and_shortened_flags_are_refused(word: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        parse(word, "5")
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert word in line


def test_help_shows_every_flag_with_its_text_default_and_variable():
    parser = CommandParser(prog="modelworker serve", environment={})
    add_settings(parser, WorkerSettings)
    text = " ".join(parser.format_help().split())
    for name, field in leaves().items():
        assert f"--{name.replace('_', '-')}" in text
        assert f"MODELWORKER_{name.upper()}]" in text
        assert field.metadata["help"] in text
    for part in (
        "[default: 50051; MODELWORKER_PORT]",
        "[default: on; MODELWORKER_REFLECTION]",
        "[default: 64M; MODELWORKER_MAX_MESSAGE_SIZE]",
    ):
        assert part in text
    assert "%" not in text


def test_unknown_variables_are_named_with_the_nearest_known_one():
    known = {"MODELWORKER_PORT", "MODELWORKER_MODEL"}
    environment = {"MODELWORKER_PROT": "1", "MODELWORKER_MODEL": "x", "MODELWORKER_ZZZZZZZZZ": "1", "HOME": "/"}
    assert unknown_variables(known, environment) == {"MODELWORKER_PROT": "MODELWORKER_PORT", "MODELWORKER_ZZZZZZZZZ": ""}


def test_flags_of_any_command_have_twins_repeatable_required_and_positional_ones_included():
    def command(**environment: str) -> CommandParser:
        parser = CommandParser(prog="x", environment=environment)
        parser.add_argument("address", nargs="?", default="here")
        parser.add_argument("--prompt", action="append", default=[])
        parser.add_argument("--words", nargs="+")
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--count", type=checked_type(positive_int), required=True)
        return parser

    environment = {
        "MODELWORKER_ADDRESS": "there", "MODELWORKER_PROMPT": "a b", "MODELWORKER_WORDS": "a 'b c'",
        "MODELWORKER_JSON": "1", "MODELWORKER_COUNT": "3",
    }  # fmt: skip
    parsed = command(**environment).parse_args([])
    assert parsed == argparse.Namespace(address="there", prompt=["a b"], words=["a", "b c"], json=True, count=3)
    given = command(**environment).parse_args(["elsewhere", "--prompt", "c", "--count", "5"])
    assert (given.address, given.prompt, given.count) == ("elsewhere", ["c"], 5)
