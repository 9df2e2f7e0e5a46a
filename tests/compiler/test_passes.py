"""Graph passes: what they change, that they change no result, and where another one goes."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from modelworker.compiler.compile import compile_model
from modelworker.compiler.counters import CompileCounters
from modelworker.compiler.errors import CompileError
from modelworker.compiler.graph_pass import GraphPass
from modelworker.compiler.program import StepInput
from modelworker.compiler.settings import CompileSettings
from modelworker.ops.library import register_op
from modelworker_testing.small_models import small_source

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

aten = torch.ops.aten
WEIGHT = torch.rand(8, 8)
OPS = torch.ops.modelworker_test_quantization


def activation(x: Tensor) -> Tensor:
    """Stands for a kernel of ours that a piece calls, such as an activation or a norm."""
    return torch.nn.functional.silu(x)


def quantize(x: Tensor, scale: float) -> Tensor:
    """Rounds to int8."""
    return (x / scale).round().clamp(-128, 127).to(torch.int8)


def activation_quantize(x: Tensor, scale: float) -> Tensor:
    """Both in one kernel."""
    return quantize(activation(x), scale)


@pytest.fixture(autouse=True, scope="module")
def _ops() -> Iterator[None]:
    library = torch.library.Library("modelworker_test_quantization", "FRAGMENT")
    with torch.compiler.config.patch(cache_key_tag=torch.compiler.config.cache_key_tag):
        register_op(activation, fake=torch.empty_like, library=library)
        for op in (quantize, activation_quantize):
            register_op(op, fake=lambda x, scale: torch.empty_like(x, dtype=torch.int8), library=library)
    yield
    library._destroy()


def fuse_activation_and_quantize(graph: fx.Graph) -> int:
    """A pass as a quantization scheme would bring it: two of its ops become one that has a kernel."""
    matches = 0
    for node in graph.find_nodes(op="call_function", target=OPS.quantize.default):
        source = node.args[0]
        if isinstance(source, fx.Node) and source.target is OPS.activation.default and len(source.users) == 1:
            with graph.inserting_before(node):
                fused = graph.call_function(OPS.activation_quantize.default, (source.args[0], node.args[1]))
            fused.meta.update(node.meta)
            node.replace_all_uses_with(fused)
            graph.erase_node(node)
            matches += 1
    return matches


class Compiled:
    """A function that was compiled, with the ops that Inductor was given."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        dtype: torch.dtype,
        passes: tuple[GraphPass, ...] = (),
        disabled: str = "",
        max_sizes: Mapping[str, int] | None = None,
    ) -> None:
        self.ops: list[str] = []
        counters = CompileCounters()
        source = small_source(function, inputs={"x": StepInput(("num_tokens", 8), dtype)}, bound={"weight": WEIGHT})
        source = dataclasses.replace(source, max_sizes=max_sizes or {})
        settings = CompileSettings(disabled_passes=tuple(filter(None, [disabled])), inductor_options=NO_HEADERS)
        self.model = compile_model(source, settings, counters=counters, passes=(*passes, GraphPass("seen", self._see)))
        self.matches = {
            name.partition(":")[2]: value for name, value in counters.snapshot().items() if name.startswith("pass_matches")
        }

    def _see(self, graph: fx.Graph) -> int:
        self.ops = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        return 0


# One small kernel is compiled faster than the headers that many would share.
NO_HEADERS = (("cpp_cache_precompile_headers", False),)


def does_nothing_often(x: Tensor) -> Tensor:
    return x.view(-1, 8)[:, 0:8].expand(x.shape[0], 8).float().reshape(x.shape[0], 8) @ WEIGHT


def test_views_slices_and_conversions_that_do_nothing_are_removed() -> None:
    compiled = Compiled(does_nothing_often, dtype=torch.float32)
    assert compiled.ops == ["aten.mm.default"]
    assert compiled.matches["no_op_elimination"] > 0
    untouched = Compiled(does_nothing_often, dtype=torch.float32, disabled="no_op_elimination")
    assert len(untouched.ops) > 1
    assert "no_op_elimination" not in untouched.matches
    for num_tokens in (0, 1, 5):
        x = torch.rand(num_tokens, 8)
        for one in (compiled, untouched):
            assert torch.equal(one.model(x), x @ WEIGHT)  # type: ignore[arg-type]


def test_views_that_do_something_stay() -> None:
    def function(x: Tensor) -> Tensor:
        return x.view(-1, 4)[:, 1:].expand(-1, 3).t() @ x.view(-1, 4)[:, :3]

    compiled = Compiled(function, dtype=torch.float32)
    for num_tokens in (1, 5):
        x = torch.rand(num_tokens, 8)
        torch.testing.assert_close(compiled.model(x), function(x))


def rotated_half(x: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first - second, second + first], dim=-1).to(x.dtype) @ WEIGHT.to(x.dtype)


def test_what_is_concatenated_is_rounded_before_rather_than_after() -> None:
    compiled = Compiled(rotated_half, dtype=torch.bfloat16)
    assert compiled.matches["convert_before_cat"] == 1
    cat = compiled.ops.index("aten.cat.default")
    assert "prims.convert_element_type.default" in compiled.ops[cat - 2 : cat]
    for num_tokens in (0, 1, 5):
        x = torch.rand(num_tokens, 8).bfloat16()
        assert torch.equal(compiled.model(x), rotated_half(x))  # type: ignore[arg-type]


def parts_in_place(x: Tensor, lengths: list[int], changed: list[int]) -> tuple[Tensor, ...]:
    """Changes some parts of a tensor in place, as a rotation of queries and keys does, and reads all of them."""
    parts = (x @ WEIGHT).split(lengths, dim=1)
    for index in changed:
        parts[index].copy_(parts[index] @ parts[index].t() @ parts[index])
    return parts


@pytest.mark.parametrize(
    "changed",
    [[0, 1], *(pytest.param(changed, marks=pytest.mark.slow) for changed in ([0], [1], [1, 0], [2, 0], [0, 1, 2], [0, 0]))],
    ids=str,
)
def test_parts_that_are_changed_in_place_are_read_without_putting_them_together(changed: list[int]) -> None:
    compiled = Compiled(lambda x: parts_in_place(x, [4, 2, 2], changed), dtype=torch.float32)
    assert "aten.slice_scatter.default" not in compiled.ops
    assert compiled.matches["read_past_scatter"] > 0
    for num_tokens in (0, 1, 5):
        x = torch.rand(num_tokens, 8)
        found, expected = compiled.model(x), parts_in_place(x, [4, 2, 2], changed)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
            assert one.stride() == other.stride()


@pytest.mark.slow
def test_code_that_would_be_good_for_some_sizes_only_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Without the pass Inductor's code for bounded sizes assumes that there is not one token."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        return parts_in_place(x, [4, 2, 2], [0, 1])

    with caplog.at_level(logging.INFO, "modelworker"):
        compiled = Compiled(function, dtype=torch.float32, disabled="read_past_scatter", max_sizes={"num_tokens": 64})
    assert "compiled again for sizes of which nothing is known" in caplog.text
    for num_tokens in (0, 1, 2, 64):
        x = torch.rand(num_tokens, 8)
        for one, other in zip(compiled.model(x), function(x), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_a_part_that_overlaps_what_was_changed_is_read_from_the_whole() -> None:
    def function(x: Tensor) -> Tensor:
        y = x @ WEIGHT
        y[:, 2:5] = y[:, 2:5] @ WEIGHT[:3, :3]
        return y[:, 1:4] @ WEIGHT[:3]

    compiled = Compiled(function, dtype=torch.float32)
    assert "aten.slice_scatter.default" in compiled.ops
    assert compiled.matches["read_past_scatter"] == 0
    x = torch.rand(5, 8)
    torch.testing.assert_close(compiled.model(x), function(x))


def test_a_pass_of_a_quantization_scheme_joins_two_ops_that_have_one_kernel() -> None:
    def function(x: Tensor) -> Tensor:
        return OPS.quantize(OPS.activation(x @ WEIGHT), 0.02)

    fusion = GraphPass("activation_quantize", fuse_activation_and_quantize)
    compiled = Compiled(function, dtype=torch.float32, passes=(fusion,))
    assert compiled.ops == ["aten.mm.default", "modelworker_test_quantization.activation_quantize.default"]
    assert compiled.matches["activation_quantize"] == 1
    x = torch.rand(5, 8) - 0.5
    assert torch.equal(compiled.model(x), function(x))  # type: ignore[arg-type]


def test_it_does_not_join_them_where_the_activation_is_used_elsewhere() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = OPS.activation(x @ WEIGHT)
        return OPS.quantize(y, 0.02), y @ WEIGHT

    fusion = GraphPass("activation_quantize", fuse_activation_and_quantize)
    assert Compiled(function, dtype=torch.float32, passes=(fusion,)).matches["activation_quantize"] == 0


def test_a_pass_that_does_not_exist_cannot_be_disabled() -> None:
    with pytest.raises(CompileError, match="there is no graph pass nonsense; there are no_op_elimination"):
        Compiled(does_nothing_often, dtype=torch.float32, disabled="nonsense")
