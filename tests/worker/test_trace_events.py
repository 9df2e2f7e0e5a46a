"""Own times of nested events: they sum up to the time of the steps, however events nest and times are rounded."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelworker.worker.trace_events import (
    RECORDED,
    REPLAY,
    STEP,
    annotations,
    complete_events,
    device_spans,
    host_spans,
    recorded_event,
)

# Of a machine that has been up for two months; a float there is 1 ns exact.
LONG_AGO_US = 5_134_566_782_873.957


def event(name: str, ts: float, dur: float, category: str = "cpu_op", tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": LONG_AGO_US + ts, "dur": dur, "args": args}


def step(ts: float, dur: float) -> dict[str, Any]:
    return event(STEP, ts, dur, "user_annotation")


@dataclass
class Node:
    """An op: its own time before each thing that it calls, and after the last."""

    name: str
    own_us: list[float]
    called: "list[Node]"


names = st.sampled_from("abc")
own_times = st.floats(0.02, 50).map(lambda us: round(us, 3))


def node(called: "st.SearchStrategy[Node]") -> "st.SearchStrategy[Node]":
    return st.lists(called, max_size=4).flatmap(
        lambda nodes: st.builds(Node, names, st.lists(own_times, min_size=len(nodes) + 1, max_size=len(nodes) + 1), st.just(nodes))
    )


leaves = st.builds(lambda name, own_us: Node(name, [own_us], []), names, own_times)
trees = st.recursive(leaves, node, max_leaves=20)


def lay_out(tree: Node, ts: float, events: list[dict[str, Any]], own: dict[str, float]) -> float:
    """Appends the events of a tree that begins at a time; returns when it ends."""
    begun = ts
    for before, called in zip(tree.own_us, tree.called, strict=False):
        ts = lay_out(called, ts + before, events, own)
    ts += tree.own_us[-1]
    own[tree.name] = own.get(tree.name, 0.0) + sum(tree.own_us)
    events.append(event(tree.name, begun, ts - begun))
    return ts


@given(forest=st.lists(trees, min_size=1, max_size=4), data=st.data())
def test_own_times_are_right_whatever_the_order_of_events(forest: list[Node], data: st.DataObject) -> None:
    events: list[dict[str, Any]] = []
    own: dict[str, float] = {}
    ts = 1.0
    for tree in forest:  # Without a gap: one begins when the other ends.
        ts = lay_out(tree, ts, events, own)
    events.append(step(0, ts + 1))
    found: dict[str, float] = {}
    for span in host_spans(data.draw(st.permutations(events))):
        found[span.name] = found.get(span.name, 0.0) + span.own_us
    assert found.pop(STEP) == pytest.approx(2, abs=0.01 * len(events))
    assert found == pytest.approx(own, abs=0.01 * len(events))


def test_what_is_outside_of_steps_and_on_other_threads_does_not_count() -> None:
    events = [event("before", 0, 5), step(10, 10), event("a", 11, 4), event("after", 20, 5), event("other", 11, 4, tid=2)]
    assert {span.name: span.own_us for span in host_spans(events)} == pytest.approx({STEP: 6, "a": 4})


def test_kernels_of_a_gpu_are_told_from_ops_of_the_host() -> None:
    events = [step(0, 10), event("launch", 1, 2), event("gemm", 2, 5, "kernel", tid=7), event("copy", 8, 1, "gpu_memcpy", tid=7)]
    assert [(span.name, span.own_us) for span in device_spans(events)] == [("gemm", 5), ("copy", 1)]
    assert {span.name for span in host_spans(events)} == {STEP, "launch"}


def test_recorded_ops_lie_inside_of_their_replay_and_share_its_thread() -> None:
    replay = event(REPLAY, 100, 50, "user_annotation")
    made = [recorded_event(replay, "linear", [(1, 2), ()], 5.0, 20.0), recorded_event(replay, "norm", [], 20.0, 60.0)]
    assert [(each["cat"], each["tid"], each["args"]["Input Dims"]) for each in made] == [
        (RECORDED, 1, [[1, 2], []]),
        (RECORDED, 1, []),
    ]
    spans = {span.name: span for span in host_spans([step(90, 100), replay, *made])}
    assert {name: span.own_us for name, span in spans.items()} == pytest.approx(
        {STEP: 50, REPLAY: 5, "linear": 15, "norm": 30}, abs=0.01
    )
    assert spans["linear"].shapes == ((1, 2), ())


def test_annotations_come_in_the_order_of_time_and_instants_are_left_out() -> None:
    events = [step(5, 1), step(1, 1), {"ph": "i", "name": STEP, "ts": 0}, event(STEP, 0, 1)]
    found = annotations(complete_events({"traceEvents": events}), STEP)
    assert [each["ts"] - LONG_AGO_US for each in found] == pytest.approx([1, 5], abs=0.01)


def test_shapes_of_lists_of_tensors_are_empty() -> None:
    joined = event("cat", 1, 1, **{"Input Dims": [[[1, 2], [3]], [4, 5], []]})
    shapes = {span.name: span.shapes for span in host_spans([step(0, 10), joined])}
    assert shapes == {STEP: (), "cat": ((), (4, 5), ())}
