"""Splitting: where pieces begin and end, which are equal, and what may not cross them."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelworker.compiler.compile import compile_model
from modelworker.compiler.counters import CompileCounters
from modelworker.compiler.errors import CompileError
from modelworker.compiler.model import CompiledModel, Piece
from modelworker.compiler.model_source import ModelSource
from modelworker.compiler.program import StepInput
from modelworker.compiler.settings import CompileSettings
from modelworker_testing.small_models import NAMESPACE, mixing_ops, small_source

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

OPS = getattr(torch.ops, NAMESPACE)


@pytest.fixture(autouse=True, scope="module")
def _ops() -> Iterator[None]:
    with mixing_ops():
        yield


def compiled(function: Callable[..., Any], **source: Any) -> CompiledModel:
    """Splits a function, and checks that it computes what the function computes."""
    model = compile_model(small_source(function, **source), CompileSettings(backend="eager"), counters=CompileCounters())
    for num_tokens in (3, 1, 0):
        inputs = [torch.rand(num_tokens, 8) for _ in model.program.inputs]
        copies = [value.clone() for value in inputs]
        with torch.no_grad():
            expected, found = function(*copies), model(*inputs)
        for one, other in (
            zip([expected], [found], strict=True) if isinstance(expected, Tensor) else zip(expected, found, strict=True)
        ):
            assert torch.equal(one, other)
        assert all(torch.equal(one, other) for one, other in zip(copies, inputs, strict=True))
    return model


def cut_model(source: ModelSource) -> CompiledModel:
    return compile_model(source, CompileSettings(backend="eager"), counters=CompileCounters())


def stages(model: CompiledModel) -> list[str]:
    return [f"piece {stage.unique}" if isinstance(stage, Piece) else stage.name.split(".")[1] for stage in model.stages]


def mixed(x: Tensor, weight: float) -> Tensor:
    out = torch.empty_like(x)
    OPS.mix(x, out, weight)
    return out


def test_a_piece_ends_where_an_op_splits_whether_its_overload_is_named_or_not() -> None:
    def function(x: Tensor) -> Tensor:
        first = mixed(x * 2, 3.0)
        out = torch.empty_like(first)
        OPS.mix.default(first + 1, out, 4.0)
        return out - 1

    assert stages(compiled(function)) == ["piece 0", "mix", "piece 1", "mix", "piece 2"]


def test_a_constant_of_a_splitting_op_makes_no_piece_differ() -> None:
    def function(x: Tensor) -> Tensor:
        for layer in range(6):
            x = mixed(torch.relu(x) + 1, 0.5 + layer)
        return x * 2

    assert stages(compiled(function)) == ["piece 0", "mix"] + ["piece 0", "mix"] * 5 + ["piece 1"]


@pytest.mark.parametrize("difference", [lambda x: torch.sigmoid(x) + 1, lambda x: torch.relu(x) + 2, lambda x: torch.relu(x + 1)])
def test_pieces_that_compute_something_else_are_not_equal(difference: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor) -> Tensor:
        return mixed(difference(mixed(torch.relu(x) + 1, 1.0)), 1.0)

    assert stages(compiled(function)) == ["piece 0", "mix", "piece 1", "mix"]


def test_pieces_over_weights_of_another_shape_dtype_or_layout_are_not_equal() -> None:
    weights = {
        "plain": torch.rand(8, 8),
        "equal": torch.rand(8, 8),
        "transposed": torch.rand(8, 8).t(),
        "narrow": torch.rand(8, 8).double(),
        "unaligned": torch.rand(65)[1:].view(8, 8),
    }

    def function(x: Tensor) -> Tensor:
        for weight in weights.values():
            x = mixed((x.to(weight.dtype) @ weight).float(), 1.0)
        return x

    assert [piece.unique for piece in compiled(function, bound=weights).pieces] == [0, 0, 1, 2, 3]


def test_a_size_is_read_off_a_tensor_in_each_piece() -> None:
    def function(x: Tensor) -> Tensor:
        num_tokens = x.shape[0]
        x = mixed(x + 1, 1.0)
        rows = torch.arange(2 * num_tokens + 1)
        x = mixed(x + rows[:num_tokens, None], 1.0)
        return x.reshape(num_tokens * 2, 4) + num_tokens

    model = compiled(function)
    assert stages(model) == ["piece 0", "mix", "piece 1", "mix", "piece 2"]
    assert len(model.program.inputs) == 1


def test_a_piece_without_a_tensor_of_that_size_gets_one() -> None:
    def function(x: Tensor) -> Tensor:
        num_tokens = x.shape[0]
        total = mixed(x.sum(0, keepdim=True), 1.0)
        return total.expand(num_tokens, 8) + 1

    compiled(function)


def test_items_of_a_tuple_stay_with_what_makes_it() -> None:
    def function(x: Tensor) -> Tensor:
        left, right = (x + 1).chunk(2, dim=1)
        first = mixed(left.contiguous(), 1.0)
        half, negative = OPS.halves(right + 1)
        return torch.cat([first, half + negative], dim=1)

    assert stages(compiled(function)) == ["piece 0", "mix", "piece 1", "halves", "piece 2"]


def test_a_result_of_a_splitting_op_that_nobody_uses_is_dropped() -> None:
    def function(x: Tensor) -> Tensor:
        return OPS.halves(x + 1)[1] * 2

    assert stages(compiled(function)) == ["piece 0", "halves", "piece 1"]


def test_views_and_allocations_between_two_ops_go_to_the_piece_before_or_after_them() -> None:
    def function(x: Tensor) -> Tensor:
        x = x + 1
        first = torch.empty_like(x)
        OPS.mix(x, first, 1.0)
        second, third = x.new_empty(x.shape), torch.empty_like(first)
        OPS.mix(x[:, :].view(x.shape[0], 8), second, 2.0)
        OPS.mix(x, third, 3.0)
        return first.view(-1, 4) + second.view(-1, 4)

    assert stages(compiled(function)) == ["piece 0", "mix", "mix", "mix", "piece 1"]


def test_a_view_that_only_the_next_op_needs_remains_a_piece() -> None:
    def function(x: Tensor) -> Tensor:
        return mixed(mixed(x + 1, 1.0).view(-1, 4), 2.0)

    assert stages(compiled(function)) == ["piece 0", "mix", "piece 1", "mix"]


def test_what_pieces_write_in_place_is_seen_by_those_that_follow() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        residual = x * 2
        y = residual + 1
        for layer in range(3):
            y = mixed(y, 1.0 + layer)
            residual.add_(y)
            y.copy_(residual * 0.5)
        return residual, y

    model = compiled(function)
    assert stages(model) == ["piece 0", "mix", "piece 1", "mix", "piece 1", "mix", "piece 2"]


def test_what_is_written_to_a_bound_tensor_or_an_input_stays_there() -> None:
    state = torch.zeros(8)

    def function(x: Tensor) -> Tensor:
        x.mul_(2)
        y = mixed(x + 1, 1.0)
        state.add_(y.sum(0))
        return y + state

    model = compile_model(
        small_source(function, bound={"state": state}), CompileSettings(backend="eager"), counters=CompileCounters()
    )
    x = torch.ones(2, 8)
    result = model(x)
    assert torch.equal(x, torch.full((2, 8), 2.0))
    assert torch.equal(state, torch.full((8,), 9.0))
    assert torch.equal(result, torch.tensor([[12.0], [15.0]]).expand(2, 8))  # type: ignore[arg-type]


def test_a_splitting_op_may_write_to_one_of_several_disjoint_parts_of_a_tensor() -> None:
    def function(x: Tensor) -> Tensor:
        left, right = (x + 1).split([4, 4], dim=1)
        OPS.shift(left)
        return left + right

    assert stages(compiled(function)) == ["piece 0", "shift", "piece 1"]


@pytest.mark.parametrize(
    "other",
    [lambda x: x.view(-1, 4), lambda x: x[:, 2:], lambda x: x[1:], lambda x: x.t()],
    ids=["view", "columns", "rows", "transposed"],
)
def test_a_model_that_reads_through_one_tensor_what_an_op_wrote_through_another_is_refused(
    other: Callable[[Tensor], Tensor],
) -> None:
    def function(x: Tensor) -> Tensor:
        x = x + 1
        view = other(x)
        OPS.shift(x)
        return view * 2

    with pytest.raises(CompileError, match=r"in the same memory.*test_splits.py:\d+"):
        cut_model(small_source(function, inputs={"x": StepInput(("num_tokens", 8), torch.float32)}))


def test_a_size_is_no_argument_of_a_splitting_op() -> None:
    def function(x: Tensor) -> Tensor:
        return mixed(x + 1, float(x.shape[1])) + mixed(x, x.shape[0] * 1.0)

    with pytest.raises(CompileError, match=r"test_splits.py:\d+"):
        cut_model(small_source(function))


def test_a_view_by_position_in_memory_is_refused() -> None:
    with pytest.raises(CompileError, match="as_strided"):
        cut_model(small_source(lambda x: (x + 1).as_strided((2, 2), (2, 1))))


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + 1,
    "mix": lambda x: mixed(x, 2.0),
    "in place": lambda x: x.mul_(0.5) if x._base is None else x * 0.5,
    "halves": lambda x: OPS.halves(x)[0],
    "view": lambda x: x.view(-1, 4).view(-1, 8),
    "columns": lambda x: torch.cat(x.chunk(2, dim=1)[::-1], dim=1),
    "rows": lambda x: x.reshape(x.shape[0], 8),
    "shift": lambda x: (y := x + 0, OPS.shift(y), y)[2],
}


@given(st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=8))
@settings(max_examples=40)
def test_any_sequence_of_work_views_and_splits_computes_what_it_computes_unsplit(names: list[str]) -> None:
    def function(x: Tensor) -> Tensor:
        x = x * 3
        for name in names:
            x = STEPS[name](x)
        return x + 0

    compiled(function)
