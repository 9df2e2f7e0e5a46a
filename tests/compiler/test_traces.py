"""What can be traced, and what is said of what can't."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelworker.compiler.compile import compile_model
from modelworker.compiler.counters import CompileCounters
from modelworker.compiler.errors import CompileError
from modelworker.compiler.program import StepInput
from modelworker.compiler.settings import CompileSettings
from modelworker_testing.small_models import ROWS, small_source

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

EAGER = CompileSettings(backend="eager")
OUTSIDE = torch.ones(8)


def branches_on_a_size(x: Tensor) -> Tensor:
    if x.shape[0] > 4:  # here
        return x + 1
    return x


def branches_on_whether_there_is_one_token(x: Tensor) -> Tensor:
    return x + 1 if x.shape[0] == 1 else x * 2  # here


def branches_on_a_value(x: Tensor) -> Tensor:
    if x.sum() > 0:  # here
        return x + 1
    return x


def takes_a_value_out(x: Tensor) -> Tensor:
    return x * x.max().item() if x.max().item() > 2 else x  # here


def leaves_the_graph(x: Tensor) -> Tensor:
    print("no graph holds this")  # here
    return x + 1


def fixes_the_size(x: Tensor) -> Tensor:
    return x.view(13, 8) + 1  # here


def has_a_size_that_depends_on_values(x: Tensor) -> Tensor:
    return x[x[:, 0] > 0] + 1  # here


def reads_a_tensor_that_nobody_named(x: Tensor) -> Tensor:
    return x + OUTSIDE


def needs_few_tokens(x: Tensor) -> Tensor:
    torch._check(x.shape[0] <= 100)  # here
    return x + 1


@pytest.mark.parametrize(
    "function",
    [
        branches_on_a_size,
        branches_on_whether_there_is_one_token,
        branches_on_a_value,
        takes_a_value_out,
        leaves_the_graph,
        has_a_size_that_depends_on_values,
        needs_few_tokens,
    ],
)
def test_a_model_that_is_not_the_same_for_every_step_is_refused_with_the_line(function: Callable[..., Any]) -> None:
    lines = [number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("# here")]
    first = function.__code__.co_firstlineno
    expected = next(line for line in lines if line > first)
    with pytest.raises(CompileError, match=re.escape(f"{__file__}:{expected}")):
        compile_model(small_source(function), EAGER, counters=CompileCounters())


def test_a_model_that_fixes_a_size_is_refused() -> None:
    with pytest.raises(CompileError, match="num_tokens"):
        compile_model(small_source(fixes_the_size), EAGER, counters=CompileCounters())


def test_a_tensor_that_is_neither_input_nor_bound_is_named() -> None:
    with pytest.raises(CompileError, match=r"neither an input nor bound.*outside"):
        compile_model(small_source(reads_a_tensor_that_nobody_named), EAGER, counters=CompileCounters())
    source = small_source(reads_a_tensor_that_nobody_named, bound={"outside": OUTSIDE})
    model = compile_model(source, EAGER, counters=CompileCounters())
    assert torch.equal(model(torch.zeros(3, 8)), torch.ones(3, 8))  # type: ignore[arg-type]


def test_sizes_of_different_names_may_not_have_to_be_equal() -> None:
    inputs = {"x": StepInput(("num_tokens", 8), torch.float32), "y": StepInput(("num_rows", 8), torch.float32)}
    with pytest.raises(CompileError, match=r"num_rows|num_tokens"):
        compile_model(small_source(lambda x, y: x + y, inputs=inputs), EAGER, counters=CompileCounters())


def test_sizes_of_the_same_name_are_equal() -> None:
    inputs = {"x": StepInput(("num_tokens", 8), torch.float32), "y": StepInput(("num_tokens", 8), torch.float32)}
    model = compile_model(small_source(lambda x, y: x + y, inputs=inputs), EAGER, counters=CompileCounters())
    for num_tokens in (0, 1, 2, 5):
        rows = torch.rand(num_tokens, 8)
        assert torch.equal(model(rows, rows), rows + rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(("result", "expected"), [(lambda x: x.shape[0], "sizes"), (lambda x: None, "nothing")])
def test_a_model_returns_tensors(result: Callable[..., Any], expected: str) -> None:
    with pytest.raises(CompileError, match=expected):
        compile_model(small_source(result), EAGER, counters=CompileCounters())


def test_results_come_back_in_their_order_and_inputs_among_them_as_they_are() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first, second = x + 1, x * 2
        return second, y, first, second, y + 1

    inputs = {**ROWS, "y": StepInput((3,), torch.int64)}
    model = compile_model(small_source(function, inputs=inputs), EAGER, counters=CompileCounters())
    x, y = torch.rand(4, 8), torch.tensor([1, 2, 3])
    found = model(x, y)
    assert isinstance(found, tuple)
    assert found[1] is y
    for one, other in zip(found, function(x, y), strict=True):
        assert torch.equal(one, other)


def test_an_input_that_the_model_does_not_read_may_be_anything() -> None:
    inputs = {"unused": StepInput(("num_rows",), torch.int64), **ROWS}
    model = compile_model(small_source(lambda unused, x: x + 1, inputs=inputs), EAGER, counters=CompileCounters())
    x = torch.rand(2, 8)
    assert torch.equal(model(torch.zeros(0), x), x + 1)  # type: ignore[arg-type]


def test_what_was_traced_is_forgotten_so_that_another_model_is_traced_anew() -> None:
    for factor in (2.0, 3.0, 4.0):
        weight = torch.full((8,), factor)
        model = compile_model(
            small_source(lambda x, weight=weight: x * weight, bound={"weight": weight}), EAGER, counters=CompileCounters()
        )
        assert torch.equal(model(torch.ones(2, 8)), torch.full((2, 8), factor))  # type: ignore[arg-type]


def test_a_bound_tensor_is_read_when_the_model_runs() -> None:
    weight = torch.ones(8)
    model = compile_model(small_source(lambda x: x * weight, bound={"weight": weight}), EAGER, counters=CompileCounters())
    weight.fill_(5)
    assert torch.equal(model(torch.ones(2, 8)), torch.full((2, 8), 5.0))  # type: ignore[arg-type]
