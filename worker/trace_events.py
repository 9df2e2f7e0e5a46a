"""Events of a Chrome trace: read, completed, and summed up.

Format: Google's "Trace Event Format"; only complete events (`"ph": "X"`) are looked at. Their `ts` and `dur` are in microseconds.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEP = "step"
REPLAY = "replay"
RECORDED = "recorded op"

_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
# Times count from long ago: what begins when another event ends may seem to begin before that.
_ROUNDING_US = 0.005
_HOST_CATEGORIES = frozenset({"cpu_op", "user_annotation", RECORDED})

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """An event, and what of it is its own.

    Attributes:
        name: of the op or annotation.
        category: of the trace.
        shapes: of the arguments, in order; empty for what is no tensor.
        own_us: time in it and in nothing that it called.
    """

    name: str
    category: str
    shapes: tuple[tuple[int, ...], ...]
    own_us: float


def complete_events(trace: Mapping[str, Any]) -> Iterator[Event]:
    """Yields the events of a trace that have a beginning and a duration."""
    return (event for event in trace["traceEvents"] if event.get("ph") == "X")


def host_spans(events: Iterable[Event]) -> Iterator[Span]:
    """Yields what ran inside of the steps on the thread that ran them, the steps included: their own times sum up to the steps'."""
    found = [event for event in events if event.get("cat") in _HOST_CATEGORIES]
    threads = {(event["pid"], event["tid"]) for event in annotations(found, STEP)}
    # What begins with another event and lasts longer is around it.
    ordered = sorted(
        (event for event in found if (event["pid"], event["tid"]) in threads), key=lambda event: (event["ts"], -event["dur"])
    )
    open_events: list[tuple[Event, float]] = []  # Each with the time of what it called directly.

    def close() -> Span | None:
        event, called_us = open_events.pop()
        is_inside = any(around["name"] == STEP for around, _ in open_events) or event["name"] == STEP
        return _span(event, max(event["dur"] - called_us, 0.0)) if is_inside else None

    for event in ordered:
        while open_events and event["ts"] >= _end_us(open_events[-1][0]) - _ROUNDING_US:
            if span := close():
                yield span
        if open_events:
            around, called_us = open_events[-1]
            open_events[-1] = (around, called_us + min(event["dur"], _end_us(around) - event["ts"]))
        open_events.append((event, 0.0))
    while open_events:
        if span := close():
            yield span


def device_spans(events: Iterable[Event]) -> Iterator[Span]:
    """Yields what ran on a GPU."""
    return (_span(event, event["dur"]) for event in events if event.get("cat") in _DEVICE_CATEGORIES)


def annotations(events: Iterable[Event], name: str) -> Sequence[Event]:
    """Returns what the program itself marked with a name, in the order of time."""
    found = [event for event in events if event.get("cat") == "user_annotation" and event["name"] == name]
    return sorted(found, key=lambda event: event["ts"])


def recorded_event(replay: Event, name: str, shapes: Sequence[Sequence[int]], begin_us: float, end_us: float) -> Event:
    """Makes an event of an op inside of a replay, from times that count from the replay's beginning."""
    return {
        "ph": "X",
        "cat": RECORDED,
        "name": name,
        "pid": replay["pid"],
        "tid": replay["tid"],
        "ts": replay["ts"] + begin_us,
        "dur": min(end_us, replay["dur"]) - begin_us,
        "args": {"Input Dims": [list(shape) for shape in shapes]},
    }


def _span(event: Event, own_us: float) -> Span:
    dims = event.get("args", {}).get("Input Dims", ())
    # Lists of tensors have a shape for each; none of them is a weight.
    shapes = tuple(tuple(dim) if all(isinstance(size, int) for size in dim) else () for dim in dims)
    return Span(name=event["name"], category=event["cat"], shapes=shapes, own_us=own_us)


def _end_us(event: Event) -> float:
    return float(event["ts"] + event["dur"])
