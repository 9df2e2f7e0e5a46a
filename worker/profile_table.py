"""The table of a profile: from the events of a trace to the time of each op."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from modelworker.worker.machine_limits import MachineLimits
from modelworker.worker.trace_events import REPLAY, STEP, Event, Span, device_spans, host_spans

HOST = "host code between ops"
# Code that Inductor makes for a CPU calls no op that torch's profiler would see.
HOST_AND_GENERATED = "host and generated code between ops"
LIST = "between recorded kernels"
IDLE = "GPU idle: waits for the host"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpTime:
    """The time of an op, or of its calls with one kind of weights, per step.

    Attributes:
        op: name, without its namespace.
        what: parameters that it was given, e.g. `layers.*.mlp.down_proj`; "" if none that is read as a whole.
        calls: per step.
        ms: per step, without what it called.
        weight_bytes: read per step; 0 if none, or not known.
        floor_ms: what the machine can't beat, the longer of reading the weights and computing the products; 0: not known.
    """

    op: str
    what: str
    calls: float
    ms: float
    weight_bytes: int
    floor_ms: float


class Weight(NamedTuple):
    """Parameters of one shape that an op reads as a whole."""

    names: tuple[str, ...]
    num_bytes: int
    numel: int


class WeightUse(NamedTuple):
    """Which argument of an op, by its position and shape, is a weight."""

    op: str
    position: int
    shape: tuple[int, ...]


def op_times(
    events: Sequence[Event],
    weights: Mapping[WeightUse, Weight],
    limits: MachineLimits,
    num_steps: int,
    measured_ms: float,
    *,
    host: str,
) -> list[OpTime]:
    """Sums up what ran, so that the sum is the time of a measured step: what ran on a GPU, where anything did, else on the host.

    Args:
        events: complete ones of the trace.
        weights: that ops read as a whole.
        limits: of the machine.
        num_steps: in the trace.
        measured_ms: of each.
        host: name for what is no op.
    """
    on_device = list(device_spans(events))
    groups: dict[tuple[str, str], list[tuple[Span, Weight | None]]] = defaultdict(list)
    for span in on_device or host_spans(events):
        weight = next(_weights_of(span, weights), None)
        what = "" if weight is None else ", ".join(weight.names)
        groups[_name_of(span, host), what].append((span, weight))
    ops = [_op_time(op, what, spans, limits, num_steps) for (op, what), spans in groups.items()]
    if on_device:
        idle_ms = max(measured_ms - sum(each.ms for each in ops), 0.0)
        ops.append(OpTime(op=IDLE, what="", calls=1, ms=idle_ms, weight_bytes=0, floor_ms=0.0))
    return sorted(ops, key=lambda each: -each.ms)


def _op_time(op: str, what: str, spans: Sequence[tuple[Span, Weight | None]], limits: MachineLimits, num_steps: int) -> OpTime:
    return OpTime(
        op=op,
        what=what,
        calls=len(spans) / num_steps,
        ms=sum(span.own_us for span, _ in spans) / 1e3 / num_steps,
        weight_bytes=sum(weight.num_bytes for _, weight in spans if weight is not None) // num_steps,
        floor_ms=1e3 * sum(_floor_seconds(span, weight, limits) for span, weight in spans if weight is not None) / num_steps,
    )


def _floor_seconds(span: Span, weight: Weight, limits: MachineLimits) -> float:
    num_rows = span.shapes[0][0] if span.shapes and span.shapes[0] else 1
    operations = 2 * weight.numel * num_rows
    return max(weight.num_bytes / limits.read_bytes_per_second, operations / limits.operations_per_second)


def _name_of(span: Span, host: str) -> str:
    if span.category == "user_annotation":
        return {STEP: host, REPLAY: LIST}.get(span.name, span.name)
    return span.name.rpartition("::")[2] if "modelworker" in span.name else span.name


def _weights_of(span: Span, weights: Mapping[WeightUse, Weight]) -> Iterator[Weight]:
    for position, shape in enumerate(span.shapes):
        if (weight := weights.get(WeightUse(span.name, position, shape))) is not None:
            yield weight


def shown_ops(ops: Sequence[OpTime], num_rows: int) -> Iterator[OpTime]:
    """Yields the longest ops, and the others as one."""
    yield from ops[:num_rows]
    if rest := ops[num_rows:]:
        yield OpTime(
            op=f"{len(rest)} other ops",
            what="",
            calls=sum(each.calls for each in rest),
            ms=sum(each.ms for each in rest),
            weight_bytes=0,
            floor_ms=0.0,
        )
