"""Which implementation an op runs: platforms, settings, enforcement, reports, and compiling the native form by itself."""

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelworker.ops.attention import PagedAttention
from modelworker.ops.custom_op import CustomOp, recorded_forms
from modelworker.ops.norm import RMSNorm
from modelworker.ops.op_settings import OpSettings
from modelworker.ops.report import OpReport, report_ops, switchable_ops
from modelworker.ops.rotary_store_kv import RotaryStoreKv
from modelworker.ops.triton_library import load_triton
from modelworker_testing.kernels import kernel_ops

CPU_ALL = OpSettings(platform="cpu", custom_ops=("all",))


def settings(*custom_ops: str, **others: Any) -> OpSettings:
    return OpSettings(custom_ops=custom_ops, **others)


def make_add(name: str | None = "test_add", **names: Any) -> type[CustomOp]:
    """An op that adds a number which says what ran."""

    class Add(CustomOp):
        def forward_native(self, x: Tensor, *, twice: bool = False) -> Tensor:
            return x + (2 if twice else 1)

        def forward_cpu(self, x: Tensor) -> Tensor:
            return x + 10

        def forward_cuda(self, x: Tensor) -> Tensor:
            return x + 100

    return CustomOp.register(name, **names)(Add) if name else Add


def ran(op: nn.Module) -> int:
    return int(op(torch.zeros(())))


@pytest.mark.parametrize(
    ("custom_ops", "platform", "expected"),
    [
        (("all",), "cpu", 10),
        (("all",), "cuda", 100),
        (("none",), "cpu", 1),
        (("none",), "cuda", 1),
        (("none", "+test_add"), "cpu", 10),
        (("none", "+rms_norm"), "cpu", 1),
        (("all", "-test_add"), "cpu", 1),
        (("all", "-rms_norm"), "cuda", 100),
    ],
)
def test_settings_and_platform_choose_the_implementation(custom_ops: tuple[str, ...], platform: Any, expected: int) -> None:
    assert ran(make_add()(ops=settings(*custom_ops, platform=platform))) == expected


def test_the_choice_is_made_once_when_the_op_is_constructed() -> None:
    add = make_add()
    op = add(ops=CPU_ALL)
    add.forward_cpu = lambda self, x: x + 7
    assert ran(op) == 10
    assert ran(add(ops=CPU_ALL)) == 7


def test_a_copy_of_an_op_runs_on_the_copy() -> None:
    norm = RMSNorm(4, eps=0.0, dtype=torch.float32, ops=CPU_ALL)
    norm.weight.fill_(1)
    other = copy.deepcopy(norm)
    other.weight.fill_(2)
    x = torch.ones(1, 4)
    assert (norm(x)[0, 0].item(), other(x)[0, 0].item()) == (1, 2)


@pytest.mark.parametrize("custom_ops", [("none",), ("all", "-test_add"), ("none", "-test_add")])
def test_enforcement_wins_over_every_setting(custom_ops: tuple[str, ...]) -> None:
    op = make_add()(ops=settings(*custom_ops), enforce_enable=True)
    assert ran(op) == 10
    assert op.choice.reason == "enforced where the layer is made"


def test_an_enabled_op_without_an_implementation_for_the_platform_runs_native_and_says_so() -> None:
    @CustomOp.register("test_native_only")
    class NativeOnly(CustomOp):
        def forward_native(self, x: Tensor) -> Tensor:
            return x + 1

    op = NativeOnly(ops=settings("all", platform="cuda"))
    assert ran(op) == 1
    assert (op.choice.implementation, op.choice.alternatives) == ("native", ())
    assert op.choice.reason == "custom_ops is all, but there is no triton implementation"


def test_without_a_native_form_the_error_names_the_class() -> None:
    @CustomOp.register("test_nothing")
    class Nothing(CustomOp):
        pass

    with pytest.raises(NotImplementedError, match=r"Nothing has no forward_native"):
        Nothing(ops=CPU_ALL)(1)


def test_an_op_that_was_never_registered_works_follows_the_global_setting_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    add = make_add(None)
    assert [ran(add(ops=settings(*custom_ops))) for custom_ops in (("all",), ("none",), ("none", "+Add"))] == [10, 1, 1]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "Add was never registered: it follows the global setting of custom_ops" in warnings[0]
    assert add(ops=settings("none")).choice.reason == "not registered, and custom_ops is none"


def test_a_subclass_of_a_registered_op_is_not_registered_by_that(caplog: pytest.LogCaptureFixture) -> None:
    class Further(make_add()):
        pass

    assert ran(Further(ops=settings("all", "-test_add"))) == 10
    assert "Further was never registered" in caplog.text


def test_the_report_says_which_implementation_runs_why_and_what_else_there_is() -> None:
    add = make_add()
    model = nn.Sequential(
        add(ops=settings("none")), add(ops=settings("none")), RMSNorm(4, eps=0.0, dtype=torch.float32, ops=settings("all"))
    )
    first, second, *others = report_ops(model)
    assert first == OpReport(
        name="rms_norm",
        implementation="native",
        reason="custom_ops is all, but the C++ kernels are not loaded",
        alternatives=("c++", "triton"),
    )
    assert second == OpReport(name="test_add", implementation="native", reason="custom_ops is none", alternatives=("c++", "triton"))
    assert {report.name for report in others} >= {"silu_and_mul", "paged_attention"}
    assert {(report.implementation, report.reason) for report in others} == {("", "not used by this model")}


def test_an_op_whose_kernel_can_not_serve_it_runs_native_and_says_why() -> None:
    kernels = kernel_ops()
    fits, odd, grouped = (
        PagedAttention(scale=1.0, window=0, soft_cap=0.0, head_dim=size, queries_per_kv_head=group, ops=kernels)
        for size, group in ((64, 3), (33, 3), (64, 65))
    )
    assert fits.choice.implementation == "c++"
    assert odd.choice.reason == "custom_ops is all, but the C++ kernel takes an even head_dim up to 256, not 33"
    assert grouped.choice.reason == "custom_ops is all, but the C++ kernel takes up to 64 query heads per KV head, not 65"
    assert {op.choice.implementation for op in (odd, grouped)} == {"native"}


def test_an_op_whose_triton_kernel_can_not_serve_it_runs_native_and_says_why() -> None:
    triton = OpSettings(platform="cuda", triton=load_triton())
    fits, long, grouped = (
        PagedAttention(scale=1.0, window=0, soft_cap=0.0, head_dim=size, queries_per_kv_head=group, ops=triton)
        for size, group in ((80, 3), (288, 3), (64, 129))
    )
    assert fits.choice.implementation == "triton"
    assert long.choice.reason == "custom_ops is all, but the Triton kernel takes a head_dim up to 256, not 288"
    assert grouped.choice.reason == "custom_ops is all, but the Triton kernel takes up to 128 query heads per KV head, not 129"
    assert {op.choice.implementation for op in (long, grouped)} == {"native"}


def test_parts_of_a_fused_op_are_reported_only_where_its_native_form_runs() -> None:
    fused = RotaryStoreKv(head_dim=16, eps=1e-5, interleaved=False, ops=kernel_ops())
    unfused = RotaryStoreKv(
        head_dim=16, eps=1e-5, interleaved=False, ops=replace(kernel_ops(), custom_ops=("all", "-rotary_store_kv"))
    )
    used = [{report.name: report.implementation for report in report_ops(op) if report.implementation} for op in (fused, unfused)]
    assert used == [
        {"rotary_store_kv": "c++"},
        {"rotary_store_kv": "native", "rotary_embedding": "c++", "store_kv": "c++"},
    ]


def test_one_op_that_is_enforced_in_one_place_has_two_entries() -> None:
    add = make_add()
    model = nn.Sequential(add(ops=settings("none")), add(ops=settings("none"), enforce_enable=True))
    assert [(entry.implementation, entry.alternatives) for entry in report_ops(model)[:2]] == [
        ("native", ("c++", "triton")),
        ("c++", ("native", "triton")),
    ]


def test_where_steps_are_recorded_a_disabled_op_holds_both_forms_and_reports_two_entries() -> None:
    op = make_add()(ops=settings("none", records=True, compiles=True))
    model = nn.Sequential(op)
    assert ran(model) == 1
    with recorded_forms(model):
        assert ran(model) == 10
    assert ran(model) == 1
    assert [(entry.name, entry.implementation) for entry in report_ops(model)[:2]] == [
        ("test_add", "native"),
        ("test_add (recorded)", "c++"),
    ]


@pytest.mark.parametrize(
    ("custom_ops", "records", "expected"), [(("all",), True, 10), (("none",), False, 1), (("all", "-test_add"), True, 1)]
)
def test_an_op_has_one_form_where_both_are_the_same_or_it_is_switched_off_by_name(
    custom_ops: tuple[str, ...], records: bool, expected: int
) -> None:
    op = make_add()(ops=settings(*custom_ops, records=records))
    with recorded_forms(op):
        assert ran(op) == expected
    assert op.recorded_choice is None


def test_only_ops_can_be_switched_and_not_layers() -> None:
    assert {"rms_norm", "silu_and_mul", "rotary_embedding", "store_kv", "paged_attention"} <= set(switchable_ops())
    assert "attention" not in switchable_ops()


# Compiling the native form by itself


class Compiles:
    """A compiler's backend that counts what it is given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
        self.count += 1
        return graph.forward


def rows(*sizes: int) -> Tensor:
    return torch.zeros(*sizes)


@pytest.fixture(scope="module")
def counting_backend() -> Compiles:
    backend = Compiles()
    torch._dynamo.register_backend(backend, name="counting")
    return backend


@pytest.fixture
def compiles(counting_backend: Compiles) -> Compiles:
    torch._dynamo.reset()
    counting_backend.count = 0
    return counting_backend


@pytest.mark.parametrize(
    ("others", "compile_native", "compiled"),
    [
        ({"compiles": True, "backend": "counting"}, True, True),
        ({"compiles": True, "backend": "counting"}, False, False),
        ({"compiles": False, "backend": "counting"}, True, False),
        ({"compiles": True, "backend": "eager"}, True, False),
    ],
)
def test_a_disabled_op_compiles_its_native_form_only_if_asked_and_compilation_is_on(
    others: dict[str, Any], compile_native: bool, compiled: bool, compiles: Compiles
) -> None:
    op = make_add()(ops=settings("none", **others), compile_native=compile_native)
    assert ran(op) == 1
    assert compiles.count == compiled
    assert op.choice.implementation == ("native, compiled by itself" if compiled else "native")


def test_an_enabled_op_compiles_nothing(compiles: Compiles) -> None:
    assert ran(make_add()(ops=settings("all", compiles=True, backend="counting"), compile_native=True)) == 10
    assert compiles.count == 0


class Scale(CustomOp):
    def forward_native(self, x: Tensor, factor: float = 2.0, *, bias: Tensor | None = None) -> Tensor:
        return x * factor if bias is None else x * factor + bias


def make_scale(dims: dict[str, Any] | None) -> CustomOp:
    return CustomOp.register("test_scale", dynamic_arg_dims=dims)(Scale)(
        ops=settings("none", compiles=True, backend="counting"), compile_native=True
    )


@pytest.mark.parametrize("dims", [None, {"x": 0}, {"x": [0]}, {"x": -2}, {"x": (0, -1)}])
def test_named_dimensions_do_not_compile_again_when_they_change(dims: Any, compiles: Compiles) -> None:
    scale = make_scale(dims)
    for num_rows in (5, 3, 17):
        assert scale(rows(num_rows, 8)).shape == (num_rows, 8)
    assert compiles.count == 1


def test_named_dimensions_hold_for_the_sizes_0_and_1(compiles: Compiles) -> None:
    scale = make_scale({"x": 0})
    for num_rows in (1, 5, 0, 2):
        assert scale(rows(num_rows, 8)).shape == (num_rows, 8)
    assert compiles.count == 1


def test_dimensions_that_are_not_named_are_compiled_for_their_size(compiles: Compiles) -> None:
    scale = make_scale({"x": 0})
    for width in (8, 9, 8):
        scale(rows(4, width))
    assert compiles.count == 2


def test_arguments_are_found_by_position_by_keyword_and_by_default_and_none_and_numbers_are_skipped(compiles: Compiles) -> None:
    scale = make_scale({"x": 0, "bias": 0, "factor": 0})
    for num_rows in (2, 6):
        scale(rows(num_rows, 8))
        scale(x=rows(num_rows, 8), factor=2.0)
        scale(rows(num_rows, 8), bias=None)
    assert compiles.count == 1
    for num_rows in (2, 6):
        assert scale(rows(num_rows, 8), bias=rows(num_rows, 8) + 1)[0, 0].item() == 1
    assert compiles.count == 2


def test_a_dimension_of_an_argument_that_there_is_not_is_refused() -> None:
    with pytest.raises(TypeError, match=r"dynamic_arg_dims: y: expected arguments among x, factor, bias"):
        make_scale({"y": 0})


# Importing Inductor warns of torch's own use of what torch deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_is_told_not_to_partition_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    compile_it = torch.compile

    def compile_spied(function: Any, **options: Any) -> Any:
        asked.append(options)
        return compile_it(function, **options)

    monkeypatch.setattr(torch, "compile", compile_spied)
    for name, dims in (("test_a", {"x": 0}), ("test_b", None)):
        make_add(name, dynamic_arg_dims=dims)(ops=settings("none", compiles=True), compile_native=True)
    assert asked == [
        {"dynamic": False, "backend": "inductor", "options": {"graph_partition": False}},
        {"dynamic": True, "backend": "inductor", "options": {"graph_partition": False}},
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_compiles_a_hidden_native_form_once_for_all_numbers_of_rows() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    scale = CustomOp.register("test_scale", dynamic_arg_dims={"x": 0})(Scale)(
        ops=settings("none", compiles=True), compile_native=True
    )
    for num_rows in (3, 1, 0, 17):
        x = torch.randn(num_rows, 8)
        assert torch.equal(scale(x, 3.0), x * 3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_norm_of_more_elements_than_the_kernel_has_room_for_runs_native_and_says_why() -> None:
    largest, larger = (RMSNorm(size, eps=0.0, dtype=torch.float32, ops=kernel_ops()) for size in (32768, 32769))
    assert largest.choice.implementation == "c++"
    assert larger.choice.implementation == "native"
    assert larger.choice.reason == "custom_ops is all, but the kernel takes a hidden size up to 32768, not 32769"
    torch.nn.init.ones_(larger.weight)
    assert torch.equal(larger(torch.full((1, 32769), 2.0)), torch.ones(1, 32769))
