"""The classes that layers run, on the samples of the ops that they stand for."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from modelworker.ops.catalog import CATALOG
from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.custom_op import CustomOp
from modelworker.ops.op_settings import OpSettings
from modelworker.ops.op_spec import OpSpec, SampleShape
from modelworker.ops.registry import OPS
from modelworker.ops.report import switchable_ops
from modelworker_testing.layer_runs import UNUSED, run_layer
from modelworker_testing.op_checks import assert_close, mutated, named_sample, results


def cases() -> Iterator[Any]:
    for spec in CATALOG.values():
        for shape in spec.shapes():
            if shape.num_tokens in (0, 3, 17) and (shape.dtype, shape.padding) in ((torch.float32, 0), (torch.bfloat16, 5)):
                for form in ("native",) if spec.gpu_only else ("native", "c++"):
                    yield pytest.param(spec, shape, form, id=f"{spec.name}-{shape}-{form}")


@pytest.mark.parametrize(("spec", "shape", "form"), list(cases()))
def test_a_layer_computes_what_the_reference_of_its_op_does_in_each_form(
    cpu_library: CpuLibrary, spec: OpSpec, shape: SampleShape, form: str
) -> None:
    arguments = named_sample(spec, shape)
    expected = spec.reference(*arguments.values())
    ops = OpSettings(kernels=cpu_library, custom_ops=("all",) if form == "c++" else ("none",))
    layer, result = run_layer(spec, ops, arguments)
    assert layer.choice.implementation == form
    actual = {**{name: arguments[name] for name in mutated(spec)}, **results(result)}
    assert set(actual) == set(expected)
    for name in set(expected) - UNUSED.get(spec.name, set()):
        assert_close(spec, shape, actual[name], expected[name], name)


def test_every_class_that_can_be_switched_runs_an_op_of_the_catalog() -> None:
    names = set()
    for spec in CATALOG.values():
        arguments = named_sample(spec, SampleShape(num_tokens=3, dtype=torch.float32, variant=spec.variants[0]))
        layer, _ = run_layer(spec, OpSettings(), arguments)
        assert type(layer) is OPS.entries[layer.op_name]
        names.add(layer.op_name)
    assert names == set(switchable_ops())


@pytest.mark.parametrize("name", switchable_ops())
def test_the_dimensions_that_change_are_those_of_arguments_of_the_native_form(name: str) -> None:
    op = OPS.entries[name]
    assert issubclass(op, CustomOp)
    assert set(op.dynamic_arg_dims or ()) <= set(inspect.signature(op.forward_native).parameters)
