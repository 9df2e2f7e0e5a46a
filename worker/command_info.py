"""`modelworker info`: what a running worker is and can, as a table or as JSON."""

import argparse
import sys
import textwrap

from google.protobuf import json_format

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.client import Client, WorkerCallError, WorkerInfo
from modelworker.worker.flags import CommandParser, checked_type
from modelworker.worker.setting_values import positive_float
from modelworker.worker.terminal import format_bytes, format_table

_EXIT_OK = 0
_EXIT_FAILED = 1
_MAX_VALUE_CHARACTERS = 90

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
        print(format_ops(info) if arguments.ops else format_info(info))
    return _EXIT_OK


def format_info(info: WorkerInfo) -> str:
    """Returns WorkerInfo as text for people: one titled block of aligned lines for each of its parts."""
    sections = [_state(info), _model(info), _kv_cache(info), _limits(info), _execution(info), _checks(info)]
    sections.append(("versions", sorted(info.versions.items())))
    sections.append(("counters", [(key, f"{value:,}") for key, value in sorted(info.counters.items())]))
    # The names of counters are long: each block has columns of its own.
    blocks = []
    for title, rows in sections:
        if rows:
            blocks.append("\n".join([title, *(f"  {line}" for line in format_table(rows).splitlines())]))
    return "\n\n".join(blocks)


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
        ("graphs", f"{execution.graph_mode}, {len(execution.captured)} captured"),
        *(("", _captured(size)) for size in execution.captured),
        ("tensor parallel", str(execution.tensor_parallel_size)),
        *_wrapped("capabilities", ", ".join(info.capabilities) or "none"),
    ]


def _wrapped(name: str, text: str) -> list[tuple[str, str]]:
    first, *others = textwrap.wrap(text, _MAX_VALUE_CHARACTERS)
    return [(name, first), *(("", other) for other in others)]


def _captured(size: pb.CapturedSize) -> str:
    mode = pb.GraphMode.Name(size.mode).removeprefix("GRAPH_MODE_")
    sequences = f", {size.num_sequences} sequences" if size.num_sequences else ""
    query = f", query length {size.uniform_query_len}" if size.uniform_query_len else ""
    return f"{mode} {size.num_tokens} tokens{sequences}{query}: {size.cost_ms:.2f} ms"


def _checks(info: WorkerInfo) -> _Section:
    return "checks", [
        ("self-check", "passed" if info.self_check.passed else "NOT PASSED"),
        *(("", finding) for finding in info.self_check.findings),
        *((f"degraded: {degradation.reason}", degradation.message) for degradation in info.degradations),
    ]
