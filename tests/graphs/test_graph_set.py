"""The order of capture, what surrounds it, and what happens when a capture fails."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from modelworker.graphs.backend import Tensors, UnknownKeyError
from modelworker.graphs.dispatch import Dispatcher, Reason
from modelworker.graphs.full import FullGraphs
from modelworker.graphs.graph_set import GraphMemoryError, GraphSet, Program
from modelworker.graphs.piecewise import PiecewiseGraphs, Stage
from modelworker.graphs.settings import GraphMode, GraphSettings, RuntimeMode
from modelworker.graphs.shapes import GraphKey, StepShape
from modelworker_testing.noting_backend import NotingBackend

PIECEWISE, FULL = RuntimeMode.PIECEWISE, RuntimeMode.FULL


class Step:
    """A step that doubles its tokens, in one part and in two, and notes how it ran."""

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self.buffer = torch.zeros(8)

    def inputs_for(self, key: GraphKey) -> Tensors:
        self.notes.append(f"inputs {key}")
        return (self.buffer[: key.num_tokens],)

    def whole(self, tokens: Tensor) -> Tensors:
        self.notes.append(f"whole {len(tokens)}")
        return (tokens * 2,)

    def half(self, arguments: list[Tensor]) -> Tensors:
        (tokens,) = arguments
        self.notes.append(f"half {len(tokens)}")
        return (tokens * 2**0.5,)

    def programs(self) -> dict[RuntimeMode, Program]:
        pieces = [Stage(name=f"half {i}", run=self.half, arguments=(i,), results=(i + 1,), is_piece=True) for i in range(2)]
        return {FULL: FullGraphs(self.whole), PIECEWISE: PiecewiseGraphs(pieces, num_inputs=1, outputs=(2,))}


SETTINGS = GraphSettings(max_sequences=2, max_tokens_per_step=4)
"""PIECEWISE 4, 2, 1 and FULL 2, 1 tokens."""


def _captured(
    failing: dict[int, Exception] | None = None,
    settings: GraphSettings = SETTINGS,
    progress: Callable[[GraphKey], None] | None = None,
) -> tuple[GraphSet, Step, NotingBackend, Dispatcher, Any]:
    backend = NotingBackend(failing=failing)
    step, dispatcher = Step(backend.notes), Dispatcher(settings)
    graphs = GraphSet(backend=backend, programs=step.programs())
    more = {} if progress is None else {"progress": progress}
    report = graphs.capture(dispatcher, inputs_for=step.inputs_for, **more)
    return graphs, step, backend, dispatcher, report


def test_each_size_is_warmed_up_once_and_captured_in_order_in_one_session() -> None:
    _, _, backend, dispatcher, report = _captured()
    assert backend.notes == [
        *("session",),
        *("inputs PIECEWISE 4 tokens", "half 4", "half 4", "capture 0", "half 4", "capture 1", "half 4"),
        *("inputs PIECEWISE 2 tokens", "half 2", "half 2", "capture 2", "half 2", "capture 3", "half 2"),
        *("inputs PIECEWISE 1 tokens", "half 1", "half 1", "capture 4", "half 1", "capture 5", "half 1"),
        *("inputs FULL 2 tokens 2 sequences of 1", "whole 2", "capture 6", "whole 2"),
        *("inputs FULL 1 tokens 1 sequences of 1", "whole 1", "capture 7", "whole 1"),
        *("end of session",),
    ]
    assert report.captured == dispatcher.keys
    assert report.failures == ()
    assert report.num_bytes == 800
    assert report.seconds > 0


def test_where_a_capture_runs_what_it_captures_there_is_no_other_run() -> None:
    backend = NotingBackend(runs_what_it_captures=True)
    step = Step(backend.notes)
    graphs = GraphSet(backend=backend, programs=step.programs())
    report = graphs.capture(Dispatcher(SETTINGS), inputs_for=step.inputs_for)
    assert backend.notes == [
        *("session",),
        *("inputs PIECEWISE 4 tokens", "capture 0", "half 4", "capture 1", "half 4"),
        *("inputs PIECEWISE 2 tokens", "capture 2", "half 2", "capture 3", "half 2"),
        *("inputs PIECEWISE 1 tokens", "capture 4", "half 1", "capture 5", "half 1"),
        *("inputs FULL 2 tokens 2 sequences of 1", "capture 6", "whole 2"),
        *("inputs FULL 1 tokens 1 sequences of 1", "capture 7", "whole 1"),
        *("end of session",),
    ]
    assert len(report.captured) == 5


def test_a_step_that_fails_in_such_a_capture_disables_its_mode() -> None:
    class Broken(Step):
        def whole(self, tokens: Tensor) -> Tensors:
            raise ValueError("the model can't run this batch")

    step, dispatcher = Broken([]), Dispatcher(SETTINGS)
    graphs = GraphSet(backend=NotingBackend(runs_what_it_captures=True), programs=step.programs())
    report = graphs.capture(dispatcher, inputs_for=step.inputs_for)
    assert [str(failure.error) for failure in report.failures] == ["the model can't run this batch"]
    assert dispatcher.disabled == {FULL: Reason.NOT_CAPTURED}


@contextmanager
def _collections() -> Iterator[list[int]]:
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield generations
    finally:
        gc.callbacks.remove(note)


def test_garbage_is_collected_once_before_all_captures_and_never_between() -> None:
    class Wasteful(Step):
        def whole(self, tokens: Tensor) -> Tensors:
            self.notes.append(f"collections {collections}")
            kept = [[index] for index in range(5000)]  # more new objects than start a collection
            assert len(kept) == 5000
            return super().whole(tokens)

    notes: list[str] = []
    step = Wasteful(notes)
    graphs = GraphSet(backend=NotingBackend(notes), programs=step.programs())
    with _collections() as collections:
        graphs.capture(Dispatcher(SETTINGS), inputs_for=step.inputs_for)
    assert {note for note in notes if note.startswith("collections")} == {"collections [2]"}
    assert gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was_found(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        step = Step([])
        graphs = GraphSet(backend=NotingBackend(), programs=step.programs())
        with pytest.raises(ZeroDivisionError):
            graphs.capture(Dispatcher(SETTINGS), inputs_for=lambda key: (torch.zeros(1 // (key.num_tokens - 4)),))
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_graphs_are_captured_once() -> None:
    graphs, step, *_ = _captured()
    with pytest.raises(RuntimeError, match="captured once"):
        graphs.capture(Dispatcher(SETTINGS), inputs_for=step.inputs_for)


def test_progress_is_told_of_every_key_in_order() -> None:
    told: list[GraphKey] = []
    *_, dispatcher, _ = _captured(progress=told.append)
    assert tuple(told) == dispatcher.keys


def test_progress_reaches_its_end_also_where_a_mode_fails() -> None:
    told: list[GraphKey] = []
    *_, dispatcher, _ = _captured({0: RuntimeError("no")}, progress=told.append)
    assert tuple(told) == dispatcher.keys


def test_a_run_replays_and_is_counted() -> None:
    graphs, step, backend, dispatcher, _ = _captured()
    for key, tokens in zip(dispatcher.keys, count(3), strict=False):
        step.buffer.fill_(tokens)
        (doubled,) = graphs.run(key, (step.buffer[: key.num_tokens],))
        torch.testing.assert_close(doubled, torch.full((key.num_tokens,), 2.0 * tokens))
    assert set(graphs.hits.values()) == {1}
    assert [note for note in backend.notes if note.startswith("replay")] == [f"replay {number}" for number in range(8)]


def test_after_the_start_ten_thousand_steps_capture_nothing() -> None:
    graphs, step, backend, dispatcher, _ = _captured()
    backend.notes.clear()
    for number in range(10_000):
        shape = StepShape(1 + number % 3, 1 + number % 3, 1 if number % 2 else None, bool(number % 2))
        key = dispatcher.choose(shape).key
        assert key is not None
        graphs.run(key, (step.buffer[: key.num_tokens],))
    assert {note.split()[0] for note in backend.notes} == {"replay", "half", "whole"}
    assert sum(graphs.hits.values()) == 10_000


@pytest.mark.parametrize(
    ("failing", "lost", "freed"),
    [
        (0, PIECEWISE, []),
        (1, PIECEWISE, ["close 0"]),
        (4, PIECEWISE, ["close 2", "close 3", "close 0", "close 1"]),
        (6, FULL, []),
        (7, FULL, ["close 6"]),
    ],
)
def test_a_key_that_cannot_be_captured_disables_its_mode_and_says_so(
    failing: int, lost: RuntimeMode, freed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    error = RuntimeError("operation not permitted when stream is capturing")
    graphs, step, backend, dispatcher, report = _captured({failing: error})
    (failure,) = report.failures
    assert failure.key.mode is lost
    assert failure.error is error
    assert [note for note in backend.notes if note.startswith("close")] == freed
    assert dispatcher.disabled == {lost: Reason.NOT_CAPTURED}
    assert report.captured == tuple(key for key in dispatcher.keys if key.mode is not lost)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == f"mode {lost.name} is disabled, for it can't be captured: {failure}"
    assert record.exc_info is not None
    for key in dispatcher.keys:
        if key.mode is lost:
            with pytest.raises(UnknownKeyError):
                graphs.run(key, step.inputs_for(key))
        else:
            graphs.run(key, step.inputs_for(key))
    decode, prompt = dispatcher.choose(StepShape(2, 2, 1, True)), dispatcher.choose(StepShape(2, 1, None, False))
    if lost is FULL:
        assert (decode.mode, decode.reason) == (PIECEWISE, Reason.NOT_CAPTURED)
        assert (prompt.mode, prompt.reason) == (PIECEWISE, Reason.NOT_DECODE)
    else:
        assert (decode.mode, decode.reason) == (FULL, Reason.NONE)
        assert (prompt.mode, prompt.reason) == (RuntimeMode.NONE, Reason.NOT_CAPTURED)


def test_where_both_modes_fail_every_step_says_so() -> None:
    *_, dispatcher, report = _captured({0: RuntimeError("one"), 1: RuntimeError("two")})
    assert [str(failure) for failure in report.failures] == [
        "PIECEWISE 4 tokens: RuntimeError: one",
        "FULL 2 tokens 2 sequences of 1: RuntimeError: two",
    ]
    assert report.captured == ()
    for shape in (StepShape(2, 2, 1, True), StepShape(2, 1, None, False)):
        assert dispatcher.choose(shape) == (None, Reason.NOT_CAPTURED)


LACKS_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes. Error code 12"),
    MemoryError(),
]


@pytest.mark.parametrize("error", LACKS_OF_MEMORY, ids=str)
def test_g15_a_capture_for_which_the_memory_is_too_small_says_which_graph_it_is(error: Exception) -> None:
    with pytest.raises(GraphMemoryError, match=r"^there is no memory for the graph of PIECEWISE 4 tokens$") as caught:
        _captured({1: error}, GraphSettings(max_sequences=2, max_tokens_per_step=4, mode=GraphMode.PIECEWISE))
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", LACKS_OF_MEMORY, ids=str)
def test_g15_a_warm_up_run_for_which_the_memory_is_too_small_says_so_too(error: Exception) -> None:
    class Large(Step):
        def whole(self, tokens: Tensor) -> Tensors:
            raise error

    step = Large([])
    graphs = GraphSet(backend=NotingBackend(), programs=step.programs())
    with pytest.raises(GraphMemoryError, match=r"^there is no memory for the graph of FULL 2 tokens 2 sequences of 1$") as caught:
        graphs.capture(Dispatcher(SETTINGS), inputs_for=step.inputs_for)
    assert caught.value.__cause__ is error


def test_a_failure_keeps_no_tensor_alive() -> None:
    freed: list[int] = []

    class Large:
        def __del__(self) -> None:
            freed.append(1)

    calls = count()

    class Refusing(Step):
        def whole(self, tokens: Tensor) -> Tensors:
            large = Large()
            if next(calls):
                raise RuntimeError(f"{type(large).__name__} can't be captured")
            return super().whole(tokens)

    step = Refusing([])
    graphs = GraphSet(backend=NotingBackend(), programs=step.programs())
    report = graphs.capture(Dispatcher(SETTINGS), inputs_for=step.inputs_for)
    assert str(report.failures[0].error) == "Large can't be captured"
    assert freed == [1, 1]


def test_a_warm_up_run_that_fails_stops_the_start() -> None:
    class Broken(Step):
        def whole(self, tokens: Tensor) -> Tensors:
            raise ValueError("the model can't run this batch")

    step, dispatcher = Broken([]), Dispatcher(SETTINGS)
    graphs = GraphSet(backend=NotingBackend(), programs=step.programs())
    with pytest.raises(ValueError, match="the model can't run this batch"):
        graphs.capture(dispatcher, inputs_for=step.inputs_for)
    assert dispatcher.disabled == {}


def test_a_mode_without_a_program_is_refused_before_anything_is_captured() -> None:
    backend = NotingBackend()
    step = Step(backend.notes)
    graphs = GraphSet(backend=backend, programs={FULL: step.programs()[FULL]})
    with pytest.raises(ValueError, match="nothing can be captured for mode PIECEWISE"):
        graphs.capture(Dispatcher(SETTINGS), inputs_for=step.inputs_for)
    assert backend.notes == []


def test_mode_none_captures_nothing_and_knows_no_key() -> None:
    settings = GraphSettings(max_sequences=2, max_tokens_per_step=4, mode=GraphMode.NONE)
    graphs, step, _, _, report = _captured(settings=settings)
    assert report.captured == ()
    key = Dispatcher(SETTINGS).keys[0]
    with pytest.raises(UnknownKeyError):
        graphs.run(key, step.inputs_for(key))


def test_close_frees_every_graph_then_the_backend_and_can_be_called_again() -> None:
    graphs, step, backend, dispatcher, _ = _captured()
    backend.notes.clear()
    graphs.close()
    assert sorted(backend.notes[:-1]) == [f"close {number}" for number in range(8)]
    assert backend.notes[-1] == "close backend"
    with pytest.raises(UnknownKeyError):
        graphs.run(dispatcher.keys[0], step.inputs_for(dispatcher.keys[0]))
    graphs.close()
    assert sum(note.startswith("close ") for note in backend.notes) == 10
