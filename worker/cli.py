"""The command `modelworker`.

Only the module of the chosen command is imported, by its name: `modelworker info` needs no torch, `serve` no tokenizer.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from modelworker.worker.errors import SettingsError, SetupError, WorkerError
from modelworker.worker.flags import USAGE_EXIT_CODE, CommandParser

_EXIT_OK = 0
_EXIT_FAILED = 1
_EXIT_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True, slots=True)
class _Command:
    """A subcommand.

    Its module has `add_parser(subparsers)`; that parser's default `run` takes the arguments and returns the exit code.

    Attributes:
        module: in modelworker.worker.
        summary: one line for `--help`.
        extra: the extra of the distribution that the command needs; "" = none.
    """

    module: str
    summary: str
    extra: str = ""


_COMMANDS = {
    "serve": _Command(module="command_serve", summary="serve a model", extra="worker"),
    "doctor": _Command(module="command_doctor", summary="examine machine, settings and model without loading it", extra="worker"),
    "info": _Command(module="command_info", summary="show what a running worker is and can"),
    "generate": _Command(module="command_generate", summary="generate text with a running worker", extra="demo"),
    "bench": _Command(module="command_bench", summary="measure steps on this machine", extra="worker"),
    "profile": _Command(module="command_profile", summary="show where the time of a step goes", extra="worker"),
    "replay": _Command(module="command_replay", summary="execute recorded steps again and compare their tokens", extra="worker"),
    "payload": _Command(module="command_payload", summary="write request bodies for grpcurl and ghz"),
    "demo": _Command(module="demo", summary="start a worker and generate six texts with it", extra="worker,demo"),
    "import-gguf": _Command(module="import_gguf", summary="turn a GGUF file into a model directory", extra="demo"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0, 1 = failed (one line on stderr says why), 2 = wrong usage."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["serve"]:
        # Until the server takes the signal over: as the first process of a container, Python would not notice it at all.
        signal.signal(signal.SIGTERM, _stop_while_starting)
    try:
        parsed = _parser(words).parse_args(words)
        run: Callable[[argparse.Namespace], int] = parsed.run
        code = run(parsed)
        sys.stdout.flush()
    except SettingsError as error:
        return _fail(str(error), USAGE_EXIT_CODE)
    except (SetupError, WorkerError) as error:
        return _fail(str(error), _EXIT_FAILED)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`). What is still buffered must not fail again when the interpreter flushes it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_FAILED
    return code


def _stop_while_starting(number: int, frame: object) -> None:
    """Nothing has begun that would have to be ended in order."""
    os._exit(_EXIT_OK)


def _parser(words: Sequence[str]) -> CommandParser:
    """Builds the parser; of the commands, only the named one in full."""
    parser = CommandParser(prog="modelworker", description="Executes the steps of an external scheduler on a transformer model.")
    parser.add_argument("--version", action="version", version=f"modelworker {version('modelworker')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, command in _COMMANDS.items():
        if name == chosen:
            _import(name, command).add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=command.summary)
    return parser


def _import(name: str, command: _Command) -> Any:
    try:
        return importlib.import_module(f"modelworker.worker.{command.module}")
    except ModuleNotFoundError as error:
        if not command.extra or (error.name or "").startswith("modelworker"):
            raise
        raise SetupError(f"`{name}` needs the package {error.name}: pip install 'modelworker[{command.extra}]'") from error


def _fail(text: str, code: int) -> int:
    line = " ".join(text.split())
    print(f"modelworker: error: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
