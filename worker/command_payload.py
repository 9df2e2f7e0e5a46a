"""`modelworker payload`: request bodies of ExecuteStep for grpcurl (JSON) and ghz (binary)."""

import argparse
import dataclasses
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from google.protobuf import json_format
from google.protobuf.proto import serialize_length_prefixed

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.client import Client, WorkerCallError
from modelworker.worker.errors import SettingsError, SetupError
from modelworker.worker.flags import CommandParser, checked_type
from modelworker.worker.payload import PayloadShape, SamplingShape, WorkerShape, build_payload, check_payload
from modelworker.worker.setting_values import fraction, integer_within, positive_float

_EXIT_OK = 0
_MAX_INT32 = 2**31 - 1
_MIN_TEMPERATURE = 1e-5
_MAX_LOGPROBS = 20
_NEEDED = ("vocab_size", "block_size", "num_blocks")
_LIMITS = ("max_model_len", "max_sequences", "max_tokens_per_step")

_DESCRIPTION = """\
Writes request bodies of ExecuteStep, ready to be sent to a worker: unsequenced steps with random tokens, and block tables that fit
the worker's KV cache. The worker is asked for its limits, or, where --vocab-size, --block-size and --num-blocks are all given,
nobody is. Equal flags give equal bodies.
"""


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser("payload", help="write request bodies for grpcurl and ghz", description=_DESCRIPTION)
    add = parser.add_argument
    add("--address", default="127.0.0.1:50051", metavar="HOST:PORT", help="the worker that is asked for its limits")
    add("--timeout", type=checked_type(positive_float), default=10.0, metavar="SECONDS", help="how long to wait for its answer")
    _add_step_flags(parser.add_argument_group("step", "what a body asks for"))
    _add_worker_flags(
        parser.add_argument_group("worker", "what bodies have to fit; beside a running worker, at most what it allows")
    )
    add("--count", type=_integer(1, _MAX_INT32), default=1, metavar="N", help="bodies, with different tokens and blocks")
    add(
        "--format",
        choices=("json", "binary"),
        default="json",
        help="json: one message a line, for grpcurl; binary: each message after its length as a varint, for ghz",
    )
    add("--output", default="-", metavar="FILE", help="where the bodies go; -: stdout")
    parser.set_defaults(run=run)


def _add_step_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--sequences", type=_integer(1, _MAX_INT32), default=1, metavar="N", help="sequences in the step")
    add("--query-len", type=_integer(1, _MAX_INT32), default=1, metavar="N", help="new tokens of each sequence; 1: a decode")
    add("--context-len", type=_integer(0, _MAX_INT32), default=0, metavar="N", help="tokens of each sequence in the KV cache")
    add(
        "--sample",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="sample a token for each sequence; off: a chunk of a prompt that goes on",
    )
    add("--temperature", type=_temperature, metavar="T", help="0: greedy")
    add("--top-k", type=_integer(0, _MAX_INT32), metavar="K", help="sample among the K most probable tokens; 0: all")
    add("--top-p", type=_float32(fraction), metavar="P", help="sample among the most probable tokens that sum up to P")
    add("--min-p", type=_min_p, metavar="P", help="sample among tokens of at least P times the highest probability")
    add("--seed", type=_integer(0, 2**64 - 1), metavar="SEED", help="seed of the first sequence; the others have the next ones")
    add("--logprobs", type=_integer(0, _MAX_LOGPROBS), metavar="N", help="logprobs of each token and of the N most probable")


def _add_worker_flags(group: argparse._ArgumentGroup) -> None:
    texts = {
        "vocab_size": "token ids are below this",
        "block_size": "tokens per KV cache block",
        "num_blocks": "KV cache blocks, the null block included",
        "max_model_len": "largest context + query length",
        "max_sequences": "largest number of sequences",
        "max_tokens_per_step": "largest number of new tokens",
    }
    for name, text in texts.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=_integer(1, _MAX_INT32), metavar="N", help=text)


def _integer(low: int, high: int) -> Callable[[str], int]:
    return checked_type(lambda text: integer_within(text, low, high))


def _float32(parse: Callable[[str], float]) -> Callable[[str], float]:
    """Makes an argparse type of the number that is sent: a bound that holds before rounding to float32 may not hold after it."""
    return checked_type(lambda text: parse(str(_rounded(text))))


def _rounded(text: str) -> float:
    try:
        with np.errstate(over="ignore", under="ignore"):
            return float(np.float32(text))
    except ValueError:
        raise SettingsError(f"{text!r} is not a number") from None


@checked_type
def _temperature(text: str) -> float:
    value = _rounded(text)
    if value != 0 and not np.float32(_MIN_TEMPERATURE) <= value < float("inf"):
        raise SettingsError(
            f"{text!r} is not a temperature: expected 0 (greedy) or a finite number of at least {_MIN_TEMPERATURE:g}"
        )
    return value


@checked_type
def _min_p(text: str) -> float:
    value = _rounded(text)
    if not 0 <= value < 1:
        raise SettingsError(f"{text!r} is not a number of at least 0 and below 1")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Writes the bodies.

    Raises:
        SettingsError: the worker would refuse them.
        SetupError: the worker can't be asked, or the file can't be written.
    """
    if arguments.format == "binary" and arguments.output == "-" and sys.stdout.isatty():
        raise SettingsError("--format binary is not for a terminal: give --output FILE")
    shape = _payload_shape(arguments)
    worker = _worker_shape(arguments)
    check_payload(shape, worker)
    largest = build_payload(shape, worker, arguments.count)
    write = _write_binary if arguments.format == "binary" else _write_json
    if arguments.output == "-":
        _write_all(sys.stdout.buffer, write, shape, worker, arguments.count)
        return _EXIT_OK
    path = Path(arguments.output)
    try:
        with path.open("wb") as file:
            _write_all(file, write, shape, worker, arguments.count)
    except OSError as error:
        raise SetupError(f"{path}: can't be written: {error.strerror or error}") from error
    print(
        f"{path}: {arguments.count:,} steps with {shape.num_sequences:,} sequences, query length {shape.query_len:,}, "
        f"context length {shape.context_len:,}; {largest.ByteSize():,} bytes each"
    )
    return _EXIT_OK


def _payload_shape(arguments: argparse.Namespace) -> PayloadShape:
    return PayloadShape(
        num_sequences=arguments.sequences,
        query_len=arguments.query_len,
        context_len=arguments.context_len,
        sample=arguments.sample,
        sampling=SamplingShape(
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            min_p=arguments.min_p,
            seed=arguments.seed,
            num_logprobs=arguments.logprobs,
        ),
    )


def _worker_shape(arguments: argparse.Namespace) -> WorkerShape:
    """Returns what bodies have to fit: what the flags say, or the running worker within what the flags say."""
    given: dict[str, Any] = {name: getattr(arguments, name) for name in (*_NEEDED, *_LIMITS)}
    if all(given[name] is not None for name in _NEEDED):
        return WorkerShape(**given)
    try:
        with Client(arguments.address) as client:
            info = client.info(timeout=arguments.timeout)
    except WorkerCallError as error:
        without = ", ".join(f"--{name.replace('_', '-')}" for name in _NEEDED)
        raise SetupError(f"worker at {arguments.address}: {error} (bodies without a worker need {without})") from error
    if info.lease_holder:
        print(
            f"modelworker: warning: router {info.lease_holder} owns the worker: until that ends, unsequenced steps are refused",
            file=sys.stderr,
        )
    return _narrowed(WorkerShape.of(info), {name: value for name, value in given.items() if value is not None})


def _narrowed(worker: WorkerShape, given: dict[str, Any]) -> WorkerShape:
    for name, value in given.items():
        actual = getattr(worker, name)
        if name == "block_size" and value != actual:
            raise SettingsError(f"--block-size: found {value}, expected {actual}, as the worker has it")
        if value > actual:
            raise SettingsError(f"--{name.replace('_', '-')}: found {value:,}, expected at most {actual:,}, as the worker has it")
    return dataclasses.replace(worker, **given)


def _write_all(
    file: BinaryIO, write: Callable[[pb.ExecuteStepRequest, BinaryIO], None], shape: PayloadShape, worker: WorkerShape, count: int
) -> None:
    for number in range(1, count + 1):
        write(build_payload(shape, worker, number), file)
    file.flush()


def _write_json(request: pb.ExecuteStepRequest, file: BinaryIO) -> None:
    file.write(json_format.MessageToJson(request, indent=None).encode() + b"\n")


def _write_binary(request: pb.ExecuteStepRequest, file: BinaryIO) -> None:
    """Writes the message after its length, a single one too: ghz first takes whatever a file starts with for a length."""
    buffer = io.BytesIO()
    serialize_length_prefixed(request, buffer)
    file.write(buffer.getvalue())
