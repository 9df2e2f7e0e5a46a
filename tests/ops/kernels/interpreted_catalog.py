"""Loops over the catalog: the Triton form of each op. Run by test_interpreted.py."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from modelworker.ops.kernels.forms import FORMS
from modelworker.ops.op_settings import OpSettings
from modelworker.ops.op_spec import OpSpec, SampleShape
from modelworker.ops.triton_library import load_triton
from modelworker_testing.interpreted import interpreted_spec
from modelworker_testing.layer_runs import UNUSED, run_layer
from modelworker_testing.op_checks import assert_close, checkable, mutated, named_sample, results, run_and_check

SPECS = [interpreted_spec(name) for name in FORMS]
QUICK = {(0, torch.bfloat16, 0), (3, torch.float32, 0), (17, torch.bfloat16, 5)}
TRITON = load_triton()


def shapes() -> Iterator[Any]:
    for spec in SPECS:
        for shape in spec.shapes():
            # Many rows take the interpreter long.
            if shape.num_tokens == 256 and not shape.padding:
                continue
            is_quick = (shape.num_tokens, shape.dtype, shape.padding) in QUICK
            yield pytest.param(spec, shape, id=f"{spec.name}-{shape}", marks=() if is_quick else pytest.mark.slow)


def quick_shapes() -> Iterator[Any]:
    for spec in SPECS:
        for shape in spec.shapes():
            is_small = shape.num_tokens == 3 and (shape.dtype, shape.padding) in {(torch.float32, 0), (torch.bfloat16, 5)}
            if is_small and shape.variant == spec.variants[0]:
                yield pytest.param(spec, shape, id=f"{spec.name}-{shape}")


@pytest.mark.parametrize(("spec", "shape"), list(shapes()))
def test_a_kernel_agrees_with_the_reference_and_writes_nothing_else(spec: OpSpec, shape: SampleShape) -> None:
    run_and_check(spec, FORMS[spec.name], shape)


@pytest.mark.parametrize(("spec", "shape"), list(quick_shapes()))
def test_schema_fake_and_mutations_of_a_form_pass_torchs_own_check(spec: OpSpec, shape: SampleShape) -> None:
    torch.library.opcheck(getattr(TRITON.ops, spec.name).default, tuple(map(checkable, spec.sample(shape))))


@pytest.mark.parametrize(("spec", "shape"), list(quick_shapes()))
def test_a_layer_on_cuda_runs_the_kernel(spec: OpSpec, shape: SampleShape) -> None:
    arguments = named_sample(spec, shape)
    expected = spec.reference(*arguments.values())
    layer, result = run_layer(spec, OpSettings(platform="cuda", triton=TRITON), arguments)
    assert layer.choice.implementation == "triton"
    actual: Mapping[str, Any] = {**{name: arguments[name] for name in mutated(spec)}, **results(result)}
    for name in set(expected) - UNUSED.get(spec.name, set()):
        assert_close(spec, shape, actual[name], expected[name], name)
