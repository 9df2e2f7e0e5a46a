"""`modelworker info`: what a running worker is and can, as a table or as JSON."""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import groupby

from google.protobuf import json_format

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.client import Client, WorkerCallError, WorkerInfo
from modelworker.worker.flags import CommandParser, checked_type
from modelworker.worker.setting_values import positive_float
from modelworker.worker.terminal import format_bytes, format_table

_EXIT_OK = 0
_EXIT_FAILED = 1
_DEFAULT_COLUMNS = 120
# Narrower, a text is hard to read, and lines that wrap by themselves are better.
_MIN_VALUE_CHARACTERS = 40
# Stands for a space at which no line ends.
_FIRM_SPACE = "\0"

_Section = tuple[str, list[tuple[str, str]]]


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "info", help="show what a running worker is and can", description="Shows what a running worker is."
    )
    parser.add_argument("address", nargs="?", default="127.0.0.1:50051", metavar="ADDRESS", help="host:port of the worker")
    parser.add_argument("--ops", action="store_true", help="print every op: its implementation, why this one, and the others")
    parser.add_argument("--json", action="store_true", help="print WorkerInfo as canonical protobuf JSON")
    parser.add_argument(
        "--timeout", type=checked_type(positive_float), default=10.0, metavar="SECONDS", help="how long to wait for the answer"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Asks the worker and prints the answer."""
    try:
        with Client(arguments.address) as client:
            info = client.info(timeout=arguments.timeout)
    except WorkerCallError as error:
        print(f"modelworker: error: worker at {arguments.address}: {error}", file=sys.stderr)
        return _EXIT_FAILED
    if arguments.json:
        print(json_format.MessageToJson(info, always_print_fields_with_no_presence=True))
    else:
        columns = shutil.get_terminal_size((_DEFAULT_COLUMNS, 0)).columns
        print(format_ops(info) if arguments.ops else format_info(info, columns))
    return _EXIT_OK


def format_info(info: WorkerInfo, columns: int = _DEFAULT_COLUMNS) -> str:
    """Returns WorkerInfo as text for people: one titled block of aligned lines for each of its parts.

    What isn't as it should be comes first, what is long last.

    Args:
        info: what a worker says.
        columns: of the terminal; longer texts go on in the next line, but words and counters are not cut.
    """
    sections = [_state(info), _degradations(info), _model(info), _kv_cache(info), _limits(info), _checks(info), _execution(info)]
    sections.append(("versions", sorted(info.versions.items())))
    sections.append(("counters", [(key, f"{value:,}") for key, value in sorted(info.counters.items())]))
    # The names of counters are long: each block has columns of its own.
    return "\n\n".join(_block(title, rows, columns) for title, rows in sections if rows)


def _block(title: str, rows: list[tuple[str, str]], columns: int) -> str:
    indent = "  "
    room = max(columns - len(indent) - max(len(name) for name, _ in rows) - 2, _MIN_VALUE_CHARACTERS)
    lines = format_table([line for name, text in rows for line in _wrapped(name, text, room)]).splitlines()
    return "\n".join([title, *(f"{indent}{line}" for line in lines)])


def _wrapped(name: str, text: str, room: int) -> list[tuple[str, str]]:
    first, *others = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
    return [(name, first.replace(_FIRM_SPACE, " ")), *(("", other.replace(_FIRM_SPACE, " ")) for other in others)]


def format_ops(info: WorkerInfo) -> str:
    """Returns a table of the worker's ops for people."""
    if not info.ops:
        return "the worker reports no ops"
    rows = [(op.name, op.implementation or "-", ", ".join(op.alternatives) or "-", op.reason) for op in info.ops]
    return format_table(rows, header=("op", "runs", "alternatives", "why"))


def _state(info: WorkerInfo) -> _Section:
    return "state", [
        ("epoch", str(info.worker_epoch)),
        ("next step id", str(info.next_step_id)),
        ("last executed step id", str(info.last_executed_step_id) if info.last_executed_step_id else "none"),
        ("lease holder", str(info.lease_holder) if info.lease_holder else "nobody"),
    ]


def _degradations(info: WorkerInfo) -> _Section:
    return "degraded", [(degradation.reason, degradation.message) for degradation in info.degradations]


def _model(info: WorkerInfo) -> _Section:
    model = info.model
    return "model", [
        ("name", model.name),
        ("architecture", model.architecture),
        ("parameters", f"{model.num_parameters / 1e6:,.1f} million"),
        ("computes in", model.dtype),
        ("vocabulary", f"{model.vocab_size:,} tokens"),
        ("longest sequence", f"{model.max_model_len:,} tokens"),
        ("shape", f"{model.num_layers} layers, hidden size {model.hidden_size}"),
        ("attention heads", f"{model.num_heads} of size {model.head_dim}, {model.num_kv_heads} for keys and values"),
        ("end of text", ", ".join(map(str, model.eos_token_ids)) or "none"),
        ("weights", model.weights_digest),
        ("config", model.config_digest),
    ]


def _kv_cache(info: WorkerInfo) -> _Section:
    cache = info.kv_cache
    usable = max(cache.num_blocks - 1, 0)
    return "KV cache", [
        ("blocks", f"{usable:,} usable of {cache.block_size} tokens = {usable * cache.block_size:,} tokens"),
        ("memory", f"{format_bytes(cache.num_blocks * cache.bytes_per_block)} ({format_bytes(cache.bytes_per_block)} a block)"),
        ("stored in", cache.dtype),
        ("layout", cache.layout_fingerprint),
    ]


def _limits(info: WorkerInfo) -> _Section:
    limits = info.limits
    return "limits", [
        ("sequences in a step", f"{limits.max_sequences:,}"),
        ("new tokens in a step", f"{limits.max_tokens_per_step:,}"),
        ("steps in flight", f"{limits.max_steps_in_flight:,}"),
        ("message", format_bytes(limits.max_message_bytes)),
        ("lease ends after", f"{limits.lease_idle_ms / 1000:g} s without a step" if limits.lease_idle_ms else "no leases"),
        ("answers kept", f"{limits.max_replays:,} for retries" if limits.max_replays else "none"),
        ("token feedback", f"{limits.max_feedback_sequences:,} sequences" if limits.max_feedback_sequences else "none"),
    ]


def _execution(info: WorkerInfo) -> _Section:
    execution = info.execution
    device = f"{execution.device} ({execution.device_name})" if execution.device_name else execution.device
    return "execution", [
        ("device", device),
        ("threads", str(execution.num_threads)),
        ("attention", execution.attention),
        ("optimization level", str(execution.optimization_level)),
        ("tensor parallel", str(execution.tensor_parallel_size)),
        ("capabilities", ", ".join(info.capabilities) or "none"),
        ("graphs", f"{execution.graph_mode}, {len(execution.captured)} captured"),
        *_ladders(execution.captured),
    ]


def _ladders(captured: Sequence[pb.CapturedSize]) -> list[tuple[str, str]]:
    """Returns a row for each kind of graphs: its sizes in tokens, ascending, and what each costs."""

    def kind(size: pb.CapturedSize) -> tuple[int, int, int]:
        # Where all rows have one query length, tokens say how many rows there are.
        return -size.mode, size.uniform_query_len, 0 if size.uniform_query_len else size.num_sequences

    rows = []
    for (mode, query_len, num_sequences), sizes in groupby(sorted(captured, key=lambda size: (kind(size), size.num_tokens)), kind):
        name = pb.GraphMode.Name(pb.GraphMode.ValueType(-mode)).removeprefix("GRAPH_MODE_")
        query = f", query length {query_len}" if query_len else ""
        sequences = f", up to {num_sequences} sequences" if num_sequences else ""
        costs = ", ".join(f"{size.num_tokens}:{_FIRM_SPACE}{size.cost_ms:.2f}" for size in sizes)
        rows.append(("", f"{name}{query}{sequences}, ms by tokens: {costs}"))
    return rows


def _checks(info: WorkerInfo) -> _Section:
    return "checks", [
        ("self-check", "passed" if info.self_check.passed else "NOT PASSED"),
        *(("", finding) for finding in info.self_check.findings),
    ]
