"""Registration of ops and layers, and their replacement by classes from outside."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from modelworker.ops.custom_op import CustomOp, recorded_forms
from modelworker.ops.op_settings import OpSettings
from modelworker.ops.replaceable import PluggableLayer, Replaceable, warn_of_unused_replacements
from modelworker.ops.report import report_ops

ALL, NONE = OpSettings(custom_ops=("all",)), OpSettings(custom_ops=("none",))

Kind = Callable[[str], type[Replaceable]]


def make_op(name: str = "test_op") -> type[Replaceable]:
    @CustomOp.register(name)
    class Original(CustomOp):
        def __init__(self, ops: OpSettings = ALL) -> None:
            super().__init__(ops=ops)

        def forward_native(self, x: Tensor) -> Tensor:
            return x + 1

        def forward_cpu(self, x: Tensor) -> Tensor:
            return x + 10

    return Original


def make_layer(name: str = "test_layer") -> type[Replaceable]:
    @PluggableLayer.register(name)
    class Original(PluggableLayer):
        def __init__(self, ops: OpSettings = ALL) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    return Original


both_kinds = pytest.mark.parametrize("make", [make_op, make_layer])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# Registration


@both_kinds
def test_a_name_can_be_registered_once(make: Kind) -> None:
    make("test_twice")
    with pytest.raises(ValueError, match=r"the op name 'test_twice' is taken by .*Original"):
        make("test_twice")


def test_ops_and_layers_share_one_registry_of_names() -> None:
    make_op("test_shared")
    with pytest.raises(ValueError, match="the op name 'test_shared' is taken"):
        make_layer("test_shared")


@pytest.mark.parametrize("base", [CustomOp, PluggableLayer, Replaceable])
def test_a_base_class_can_not_be_instantiated_and_says_to_register(base: type[Replaceable]) -> None:
    with pytest.raises(TypeError, match=rf"{base.__name__} can't be instantiated.*@{base.__name__}\.register\(name\)"):
        base(**({"ops": ALL} if base is CustomOp else {}))


def test_a_layer_that_was_never_registered_works_and_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    class Unregistered(PluggableLayer):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    assert [int(Unregistered()(torch.zeros(()))) for _ in range(2)] == [1, 1]
    assert len(warnings(caplog)) == 1
    assert "Unregistered was never registered" in warnings(caplog)[0]


@pytest.mark.parametrize("decorated", [lambda: None, int, "text"])
def test_only_classes_of_the_kind_can_be_registered(decorated: Any) -> None:
    for base in (CustomOp, PluggableLayer):
        with pytest.raises(TypeError, match=rf"{base.__name__}\.register\('test_wrong'\) decorates classes that derive from it"):
            base.register("test_wrong")(decorated)
    make_op("test_wrong")


# Replacement


def replace_bare(original: type[Replaceable], replacement: type) -> type:
    return original.register_oot(replacement)


def replace_called(original: type[Replaceable], replacement: type) -> type:
    return original.register_oot()(replacement)


def replace_by_name(original: type[Replaceable], replacement: type) -> type:
    return original.__bases__[0].register_oot(name=original.__name__)(replacement)


@both_kinds
@pytest.mark.parametrize("replace", [replace_bare, replace_called, replace_by_name])
def test_the_replacement_is_built_in_place_of_the_class_with_its_arguments(
    make: Kind, replace: Any, caplog: pytest.LogCaptureFixture
) -> None:
    original = make("test_replaced")

    class Better(original):
        def __init__(self, ops: OpSettings = ALL) -> None:
            super().__init__(ops)
            self.was_initialized = ops is NONE

    assert replace(original, Better) is Better
    with caplog.at_level(logging.DEBUG, "modelworker.ops.replaceable"):
        layer = original(NONE)
    assert type(layer) is Better
    assert layer.was_initialized
    assert [(record.levelno, "Better is built in place of" in record.getMessage()) for record in caplog.records] == [
        (logging.DEBUG, True)
    ]


@both_kinds
def test_a_class_has_one_replacement(make: Kind) -> None:
    original = make("test_replaced")

    class First(original):
        pass

    class Second(original):
        pass

    original.register_oot(First)
    with pytest.raises(ValueError, match=r"the replacement of 'Original' is taken by .*First; .*Second can't have it"):
        original.register_oot(Second)


def test_ops_and_layers_share_one_registry_of_replacements() -> None:
    op, layer = make_op(), make_layer()
    op.register_oot(type("ForOp", (op,), {}))
    with pytest.raises(ValueError, match="the replacement of 'Original' is taken"):
        layer.register_oot(type("ForLayer", (layer,), {}))


@both_kinds
def test_decorating_anything_but_a_class_is_a_type_error(make: Kind) -> None:
    original = make("test_replaced")
    for decorate in (original.register_oot, original.register_oot(), original.register_oot(name="Original")):
        with pytest.raises(TypeError, match="register_oot decorates a class, found <function"):
            decorate(lambda: None)


@pytest.mark.parametrize("base", [CustomOp, PluggableLayer])
def test_a_base_class_does_not_say_what_is_replaced(base: type[Replaceable]) -> None:
    with pytest.raises(TypeError, match=rf"{base.__name__}\.register_oot needs the name of the class to replace"):
        base.register_oot(type("Replacement", (base,), {}))


@both_kinds
def test_a_replacement_must_derive_from_what_it_replaces(make: Kind) -> None:
    original = make("test_replaced")
    original.register_oot(type("Stranger", (original.__bases__[0],), {}))
    with pytest.raises(TypeError, match=r"Stranger replaces .*Original, so it must derive from it"):
        original()


def test_a_replacement_for_a_class_that_is_not_yet_defined_is_found_by_the_class_name() -> None:
    CustomOp.register_oot(name="Original")(type("Early", (CustomOp,), {}))
    original = make_op()
    with pytest.raises(TypeError, match=r"Early replaces .*Original, so it must derive from it"):
        original()


@both_kinds
def test_a_replacement_that_nothing_instantiates_warns_once(make: Kind, caplog: pytest.LogCaptureFixture) -> None:
    original = make("test_replaced")
    original.register_oot(type("Idle", (original,), {}))
    warn_of_unused_replacements()
    warn_of_unused_replacements()
    assert len(warnings(caplog)) == 1
    assert "Idle replaces Original, which this model does not use" in warnings(caplog)[0]


@both_kinds
def test_a_replacement_that_is_instantiated_does_not_warn(make: Kind, caplog: pytest.LogCaptureFixture) -> None:
    original = make("test_replaced")
    original.register_oot(type("Used", (original,), {}))
    original()
    warn_of_unused_replacements()
    assert warnings(caplog) == []


@both_kinds
def test_subclasses_of_a_replaced_class_are_not_replaced(make: Kind) -> None:
    original = make("test_replaced")
    original.register_oot(type("Better", (original,), {}))
    further = type("Further", (original,), {})
    assert type(further()) is further


# What a replacement of an op runs


def adds(number: int) -> Any:
    return lambda self, x: x + number


@pytest.mark.parametrize(
    ("methods", "enabled", "disabled", "implementation"),
    [
        ({}, 1, 1, "native"),
        ({"forward_oot": adds(50)}, 50, 1, "out of tree (test.Better)"),
        ({"forward_cpu": adds(60)}, 60, 1, "c++ (test.Better)"),
        ({"forward_native": adds(70)}, 70, 70, "native (test.Better)"),
        ({"forward_oot": adds(50), "forward_cpu": adds(60), "forward_native": adds(70)}, 50, 70, "out of tree (test.Better)"),
        ({"forward_cuda": adds(80)}, 1, 1, "native"),
    ],
)
def test_a_replacement_runs_what_it_overrides_and_else_the_native_form(
    methods: dict[str, Any], enabled: int, disabled: int, implementation: str
) -> None:
    original = make_op("test_replaced")
    original.register_oot(type("Better", (original,), {**methods, "__module__": "test"}))
    op = original(ALL)
    assert int(op(torch.zeros(()))) == enabled
    assert op.choice.implementation == implementation
    assert int(original(NONE)(torch.zeros(()))) == disabled


def test_a_replacement_keeps_the_registered_name_by_which_it_is_switched() -> None:
    original = make_op("test_replaced")
    better = CustomOp.register("test_own_name")(type("Better", (original,), {"forward_oot": adds(50)}))
    original.register_oot(better)
    for custom_ops, expected in ((("all",), 50), (("all", "-test_replaced"), 1), (("none", "+test_replaced"), 50)):
        op = original(OpSettings(custom_ops=custom_ops))
        assert int(op(torch.zeros(()))) == expected
        assert op.op_name == "test_replaced"
    assert report_ops(op)[0].name == "test_replaced"


def test_a_replacement_that_overrides_nothing_says_so() -> None:
    original = make_op("test_replaced")
    original.register_oot(type("Empty", (original,), {"__module__": "test"}))
    (report, *_) = report_ops(original())
    assert (report.implementation, report.alternatives) == ("native", ("c++",))
    assert report.reason.startswith("test.Empty overrides nothing; custom_ops is all")


def test_a_replaced_layer_is_reported() -> None:
    original = make_layer("test_replaced")
    (report, *_) = report_ops(original())
    assert (report.name, report.implementation) == ("test_replaced", "built in")
    original.register_oot(type("Better", (original,), {"__module__": "test"}))
    (report, *_) = report_ops(original())
    assert (report.name, report.implementation, report.alternatives) == (
        "test_replaced",
        "out of tree (test.Better)",
        ("built in",),
    )
    assert "Original" in report.reason


@pytest.mark.parametrize("custom_ops", [("all",), ("none",)])
def test_a_recorded_step_runs_what_a_replacement_computes_and_not_the_kernel_that_it_replaces(custom_ops: tuple[str, ...]) -> None:
    original = make_op()

    @original.register_oot
    class Replacement(original):
        def forward_oot(self, x: Tensor) -> Tensor:
            return x + 1000

        def forward_native(self, x: Tensor) -> Tensor:
            return x + 1000

    op = original(OpSettings(custom_ops=custom_ops, records=True))
    with recorded_forms(op):
        assert int(op(torch.zeros(()))) == 1000
    assert op.recorded_choice is None
