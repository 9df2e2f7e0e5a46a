"""A split model: what passes between its stages, with graphs and without."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from modelworker.graphs.backend import StaleInputError, Tensors, UnknownKeyError
from modelworker.graphs.cpu_backend import CpuGraphBackend
from modelworker.graphs.piecewise import PiecewiseGraphs, Stage
from modelworker.graphs.settings import RuntimeMode
from modelworker.graphs.shapes import make_key
from modelworker_testing.aten_recorder import AtenRecorder
from modelworker_testing.noting_backend import NotingBackend

KEY = make_key(RuntimeMode.PIECEWISE, 4, max_sequences=4)


def _taking_a_list(run: Callable[..., Tensors]) -> Callable[[list[Tensor]], Tensors]:
    """Empties the list, as a stage may."""

    def run_and_empty(tensors: list[Tensor]) -> Tensors:
        taken = tuple(tensors)
        tensors.clear()
        return run(*taken)

    return run_and_empty


def _piece(run: Callable[..., Tensors], arguments: tuple[int, ...], *results: int) -> Stage:
    return Stage(name=f"piece {results}", run=_taking_a_list(run), arguments=arguments, results=results, is_piece=True)


def _splitting(run: Callable[..., Tensors], arguments: tuple[int, ...], *results: int) -> Stage:
    return Stage(name="attention", run=_taking_a_list(run), arguments=arguments, results=results, is_piece=False)


def _backend() -> CpuGraphBackend:
    return CpuGraphBackend(AtenRecorder())


@pytest.mark.parametrize(
    ("arguments", "outputs", "message"),
    [
        ((0, 3), (3,), r"piece \(3,\) reads slot 3, which nothing fills"),
        ((0,), (3, 2), "the model returns slot 2, which nothing fills"),
    ],
)
def test_a_slot_that_nothing_fills_is_refused(arguments: tuple[int, ...], outputs: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        PiecewiseGraphs([_piece(lambda *_: (), arguments, 3)], num_inputs=2, outputs=outputs)


def test_a_number_of_inputs_other_than_the_models_is_refused() -> None:
    graphs = PiecewiseGraphs([_piece(lambda x: (x + 1,), (0,), 2)], num_inputs=2, outputs=(2,))
    x = torch.ones(4)
    graphs.capture(KEY, (x, x), _backend())
    for inputs in ((x,), (x, x, x)):
        with pytest.raises(ValueError, match=f"the model takes 2 inputs, not {len(inputs)}"):
            graphs(*inputs)
        with pytest.raises(StaleInputError, match=f"captured with 2 inputs, and given {len(inputs)}"):
            graphs.replay(KEY, inputs)


def test_bound_tensors_follow_the_inputs_and_are_read_by_every_stage() -> None:
    weight, cache = torch.tensor(3.0), torch.zeros(4)
    graphs = PiecewiseGraphs(
        [
            _piece(lambda x, weight: (x * weight,), (0, 1), 3),
            _splitting(lambda x, cache: (cache.add_(x),)[1:], (3, 2)),
            _piece(lambda x, cache: (x + cache,), (3, 2), 3),
        ],
        num_inputs=1,
        bound=(weight, cache),
        outputs=(3,),
    )
    x = torch.zeros(4)
    graphs.capture(KEY, (x,), _backend())
    total = 0.0
    for number in (1.0, 5.0, 2.0):
        x.fill_(number)
        total += 3 * number
        assert graphs.replay(KEY, (x,))[0].tolist() == [3 * number + total] * 4
        total += 3 * number
        assert graphs(x)[0].tolist() == [3 * number + total] * 4


def test_a_slot_may_be_filled_again_and_each_stage_reads_what_it_held_then() -> None:
    """As where a compiled piece returns the new value of a residual which it was given."""
    seen: list[list[float]] = []

    def attention(x: Tensor, residual: Tensor) -> Tensors:
        seen.append([float(x[0]), float(residual[0])])
        return (x + residual,)

    def piece(x: Tensor, residual: Tensor) -> Tensors:
        return x * 2, residual + x

    stages = [
        _piece(lambda x: (x + 1, x.clone()), (0,), 1, 2),
        _splitting(attention, (1, 2), 1),
        _piece(piece, (1, 2), 1, 2),
        _splitting(attention, (1, 2), 1),
        _piece(piece, (1, 2), 0, 2),
    ]
    graphs = PiecewiseGraphs(stages, num_inputs=1, outputs=(0, 2))
    x = torch.zeros(4)
    recorder = AtenRecorder()
    graphs.capture(KEY, (x,), CpuGraphBackend(recorder))
    for number in (1.0, 4.0):
        x.fill_(number)
        seen.clear()
        expected = [tensor.clone() for tensor in graphs(x)]
        assert seen[0] == [number + 1, number]
        recorder.arena.poison()
        torch.testing.assert_close(list(graphs.replay(KEY, (x,))), expected)
        assert seen[2:] == seen[:2]


def test_without_a_key_the_plain_stages_run_at_any_size() -> None:
    graphs = PiecewiseGraphs(
        [_piece(lambda x: (x + 1, x * 2), (0,), 2, 3), _splitting(lambda a, b, m: (a @ b * m,), (2, 3, 1), 4)],
        num_inputs=2,
        outputs=(4, 3),
    )
    for size in (0, 1, 5):
        x = torch.randn(size)
        found = graphs(x, torch.tensor(3.0))
        torch.testing.assert_close(found, ((x + 1) @ (x * 2) * 3, x * 2))


def test_without_a_key_a_value_is_freed_after_its_last_reader() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def make(x: Tensor) -> Tensors:
        result = x + 1
        alive.append(weakref.ref(result))
        return (result,)

    def look(x: Tensor) -> Tensors:
        seen.append([reference() is not None for reference in alive])
        return make(x)

    seen: list[list[bool]] = []
    stages = [_piece(make, (0,), 1), *(_piece(look, (slot,), slot + 1) for slot in range(1, 5))]
    PiecewiseGraphs(stages, num_inputs=1, outputs=(5,))(torch.ones(2))
    assert seen == [[True], [False, True], [False, False, True], [False, False, False, True]]


def test_g12_what_a_splitting_op_returns_reaches_the_captured_piece_wherever_it_lies() -> None:
    junk: list[Tensor] = []

    def attention(x: Tensor, factor: Tensor) -> Tensors:
        junk.append(torch.full((4,), float("nan")))  # so that no two results lie at one address
        return (x * factor,)

    graphs = PiecewiseGraphs(
        [_piece(lambda x: (x + 1,), (0,), 2), _splitting(attention, (2, 1), 3), _piece(lambda x: (x * 10,), (3,), 4)],
        num_inputs=2,
        outputs=(4,),
    )
    x = torch.zeros(4)
    graphs.capture(KEY, (x, torch.tensor(1.0)), _backend())
    for number in range(5):
        x.fill_(number)
        (found,) = graphs.replay(KEY, (x, torch.tensor(float(number))))
        assert found.tolist() == [(number + 1) * number * 10.0] * 4


def test_what_a_splitting_op_returns_to_another_one_may_change_its_size() -> None:
    graphs = PiecewiseGraphs(
        [
            _piece(lambda x: (x + 1, torch.empty_like(x)), (0,), 2, 3),
            _splitting(lambda lens: (lens * 2,), (1,), 4),
            _splitting(lambda x, out, lens: (out.copy_(x * lens.sum()),)[1:], (2, 3, 4)),
            _piece(lambda out: (out + 1,), (3,), 5),
        ],
        num_inputs=2,
        outputs=(5,),
    )
    x = torch.zeros(4)
    graphs.capture(KEY, (x, torch.ones(1)), _backend())
    for rows in (1, 3, 2):
        (found,) = graphs.replay(KEY, (x, torch.ones(rows)))
        assert found.tolist() == [2.0 * rows + 1] * 4


@pytest.mark.parametrize("changed", [torch.ones(3), torch.ones(4, dtype=torch.float64), torch.ones(2, 2)])
def test_a_splitting_op_that_returns_something_else_to_a_piece_than_at_the_capture_is_an_error(changed: Tensor) -> None:
    results = iter([torch.ones(4), changed])
    graphs = PiecewiseGraphs(
        [_splitting(lambda _: (next(results),), (0,), 1), _piece(lambda x: (x + 1,), (1,), 2)], num_inputs=1, outputs=(2,)
    )
    graphs.capture(KEY, (torch.ones(1),), _backend())
    with pytest.raises(ValueError, match=r"attention returned torch.float.*, unlike at the capture"):
        graphs.replay(KEY, (torch.ones(1),))


def test_a_splitting_op_that_returns_the_same_memory_in_another_layout_is_an_error() -> None:
    square = torch.arange(4.0).view(2, 2)
    results = iter([square, square.T])
    graphs = PiecewiseGraphs(
        [_splitting(lambda _: (next(results),), (0,), 1), _piece(lambda x: (x + 1,), (1,), 2)], num_inputs=1, outputs=(2,)
    )
    graphs.capture(KEY, (torch.ones(1),), _backend())
    with pytest.raises(ValueError, match=r"attention returned strides \[1, 2\] where the capture had \[2, 1\]"):
        graphs.replay(KEY, (torch.ones(1),))


def test_only_inputs_that_pieces_read_have_to_stay_where_they_were() -> None:
    graphs = PiecewiseGraphs(
        [_piece(lambda x: (x + 1,), (1,), 2), _splitting(lambda x, m: (x * m.sum(),), (2, 0), 3)], num_inputs=2, outputs=(3, 0)
    )
    x = torch.zeros(4)
    graphs.capture(KEY, (torch.ones(2), x), _backend())
    metadata = torch.ones(3)
    found, same = graphs.replay(KEY, (metadata, x))
    assert found.tolist() == [3.0] * 4
    assert same is metadata
    with pytest.raises(StaleInputError, match="PIECEWISE 4 tokens: input 1 is"):
        graphs.replay(KEY, (metadata, x.clone()))


def test_an_input_in_the_same_memory_with_other_strides_is_refused() -> None:
    graphs = PiecewiseGraphs([_piece(lambda x: (x + 1,), (0,), 1)], num_inputs=1, outputs=(1,))
    square = torch.arange(4.0).view(2, 2)
    graphs.capture(KEY, (square,), _backend())
    with pytest.raises(StaleInputError, match=r"is torch.float32 \[2, 2\] with strides \[1, 2\]"):
        graphs.replay(KEY, (square.T,))
    graphs.replay(KEY, (square.view(4).view(2, 2),))


def test_inputs_that_pieces_read_are_kept_alive() -> None:
    graphs = PiecewiseGraphs([_piece(lambda x: (x + 1,), (0,), 1)], num_inputs=1, outputs=(1,))
    inputs = torch.zeros(4)
    reference = weakref.ref(inputs)
    graphs.capture(KEY, (inputs,), _backend())
    del inputs
    assert reference() is not None
    graphs.close()
    assert reference() is None


def _chain(num_layers: int) -> PiecewiseGraphs:
    """Each layer: a piece that makes a wide value and a residual, and an op that changes the wide value in place."""
    stages = [_piece(lambda x: (x + 1, torch.cat([x, x])), (0,), 1, 2)]
    for layer in range(num_layers):
        x, wide = 1 + 2 * layer, 2 + 2 * layer
        stages.append(_splitting(lambda wide: (wide.mul_(0.5),)[1:], (wide,)))
        stages.append(_piece(lambda x, wide: (x + wide[: len(x)], torch.cat([x, x])), (x, wide), x + 2, wide + 2))
    return PiecewiseGraphs(stages, num_inputs=1, outputs=(1 + 2 * num_layers,))


def test_thirty_layers_take_no_more_memory_than_three_and_smaller_keys_no_more_than_the_largest() -> None:
    sizes = {}
    for num_layers in (3, 30):
        graphs, recorder = _chain(num_layers), AtenRecorder()
        backend = CpuGraphBackend(recorder)
        buffer = torch.zeros(64)
        for num_tokens in (64, 32, 16):
            key = make_key(RuntimeMode.PIECEWISE, num_tokens, max_sequences=4)
            graphs.capture(key, (buffer[:num_tokens],), backend)
            sizes[num_layers, num_tokens] = backend.num_bytes
        for num_tokens in (16, 64, 32):
            buffer.copy_(torch.randn(64))
            recorder.arena.poison()
            key = make_key(RuntimeMode.PIECEWISE, num_tokens, max_sequences=4)
            torch.testing.assert_close(graphs.replay(key, (buffer[:num_tokens],)), graphs(buffer[:num_tokens]))
    assert sizes[30, 64] == sizes[3, 64]
    assert sizes[30, 16] == sizes[3, 16] < 2 * sizes[3, 64]


def test_a_key_that_was_not_captured_is_an_error() -> None:
    graphs = _chain(1)
    with pytest.raises(UnknownKeyError, match="no graph was captured for PIECEWISE 4 tokens"):
        graphs.replay(KEY, (torch.ones(4),))


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_capture_that_fails_midway_frees_the_pieces_before_it(failing: int) -> None:
    backend = NotingBackend(failing={failing: RuntimeError("refused")})
    graphs = _chain(2)
    with pytest.raises(RuntimeError, match="refused"):
        graphs.capture(KEY, (torch.ones(4),), backend)
    assert [note for note in backend.notes if note.startswith("close")] == [f"close {number}" for number in range(failing)]
    with pytest.raises(UnknownKeyError):
        graphs.replay(KEY, (torch.ones(4),))


def test_a_splitting_op_that_fails_during_capture_frees_the_pieces_too() -> None:
    def fail(_: Tensor) -> Tensors:
        raise ValueError("no such block")

    backend = NotingBackend()
    graphs = PiecewiseGraphs([_piece(lambda x: (x,), (0,), 1), _splitting(fail, (1,))], num_inputs=1, outputs=(1,))
    with pytest.raises(ValueError, match="no such block"):
        graphs.capture(KEY, (torch.ones(4),), backend)
    assert backend.notes == ["capture 0", "close 0"]


def test_pieces_are_replayed_in_order_with_the_ops_between() -> None:
    backend = NotingBackend()

    def attention(x: Tensor) -> Tensors:
        backend.notes.append("attention")
        return (x,)

    piece: Callable[[Tensor], Tensors] = lambda x: (x + 1,)  # noqa: E731
    graphs = PiecewiseGraphs(
        [_piece(piece, (0,), 1), _splitting(attention, (1,), 2), _piece(piece, (2,), 3), _splitting(attention, (3,), 4)],
        num_inputs=1,
        outputs=(4,),
    )
    x = torch.zeros(4)
    graphs.capture(KEY, (x,), backend)
    backend.notes.clear()
    graphs.replay(KEY, (x,))
    assert backend.notes == ["replay 0", "attention", "replay 1", "attention"]
