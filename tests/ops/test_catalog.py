"""Loops over the catalog: native and registered form of each op against its reference, its schema, its fake, what it may touch."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from modelworker.ops.catalog import CATALOG, splitting_ops
from modelworker.ops.op_spec import OpSpec, SampleShape
from modelworker.ops.triton_library import load_triton
from modelworker_testing.kernels import own_kernels
from modelworker_testing.op_checks import assert_close, checkable, memory, op_of, results, run_and_check

SPECS = list(CATALOG.values())
SMALL = ((torch.float32, 0), (torch.bfloat16, 5))


def cases() -> Iterator[Any]:
    for spec in SPECS:
        for shape in spec.shapes():
            yield pytest.param(spec, shape, id=f"{spec.name}-{shape}")


def small_shapes() -> Iterator[Any]:
    for spec in SPECS:
        for shape in spec.shapes():
            if shape.num_tokens in (0, 3) and shape.variant == spec.variants[0] and (shape.dtype, shape.padding) in SMALL:
                yield pytest.param(spec, shape, id=f"{spec.name}-{shape}")


@pytest.mark.parametrize(("spec", "shape"), list(cases()))
def test_the_native_form_agrees_with_the_reference_and_writes_nothing_else(spec: OpSpec, shape: SampleShape) -> None:
    run_and_check(spec, spec.native, shape)


# It is the native form behind torch's dispatcher: a few samples show that it is reached.
@pytest.mark.parametrize(("spec", "shape"), list(small_shapes()))
def test_the_registered_op_agrees_with_the_reference_and_writes_nothing_else(spec: OpSpec, shape: SampleShape) -> None:
    run_and_check(spec, op_of(spec), shape)


@pytest.mark.parametrize(("spec", "shape"), list(small_shapes()))
def test_schema_fake_and_autograd_registration_pass_torchs_own_check(spec: OpSpec, shape: SampleShape) -> None:
    torch.library.opcheck(op_of(spec), tuple(map(checkable, spec.sample(shape))))


def properties(result: Any) -> dict[str, Any]:
    return {name: (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for name, tensor in results(result).items()}


@pytest.mark.parametrize(("spec", "shape"), list(small_shapes()))
def test_a_fake_result_has_the_shape_strides_dtype_and_device_of_the_real_one(spec: OpSpec, shape: SampleShape) -> None:
    real = op_of(spec)(*spec.sample(shape))
    arguments = spec.sample(shape)
    with FakeTensorMode() as mode:
        fake = op_of(spec)(*(mode.from_tensor(argument) if isinstance(argument, Tensor) else argument for argument in arguments))
    assert properties(fake) == properties(real)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_loop_covers_no_rows_one_row_and_padding_in_every_dtype(spec: OpSpec) -> None:
    shapes = list(spec.shapes())
    assert {shape.num_tokens for shape in shapes} >= {0, 1, 3, 17, 256}
    assert {shape.dtype for shape in shapes} == {torch.float32, torch.bfloat16}
    assert {shape.padding > 0 for shape in shapes} == {True, False}
    padded = next(shape for shape in shapes if shape.num_tokens == 17 and shape.padding)
    assert any(
        argument.isnan().any()
        if argument.untyped_storage().nbytes() == argument.nbytes
        else memory(argument).numel() > argument.numel()
        for argument in spec.sample(padded)
        if isinstance(argument, Tensor) and argument.is_floating_point()
    )
    assert spec.tolerance_reason


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_variant_has_rows_that_leave_a_tail_behind_every_vector(spec: OpSpec) -> None:
    """Vectors are up to 16 elements wide; a kernel that goes wrong in the rest of a row is right in all sizes of real models."""

    def leaves_tails(variant: Any) -> bool:
        arguments = spec.sample(SampleShape(num_tokens=3, dtype=torch.float32, variant=variant))
        rows = [value for value in (*arguments, *spec.reference(*arguments).values()) if isinstance(value, Tensor)]
        return all(row.shape[-1] % 16 for row in rows if row.is_floating_point() and row.dim() > 1)

    assert any(leaves_tails(variant) for variant in spec.variants), "add a variant with sizes such as 77"


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_another_draw_has_other_values_in_tensors_of_the_same_sizes_and_strides(spec: OpSpec) -> None:
    for variant in spec.variants:
        shape = SampleShape(num_tokens=17, dtype=torch.bfloat16, padding=5, variant=variant)
        first, second = spec.sample(shape), spec.sample(replace(shape, draw=1))
        tensors = [pair for pair in zip(first, second, strict=True) if isinstance(pair[0], Tensor)]
        assert all((one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype) for one, two in tensors)
        assert not all(torch.equal(memory(one), memory(two)) for one, two in tensors)


@contextlib.contextmanager
def must_fail() -> Iterator[None]:
    with pytest.raises(AssertionError):
        yield


def test_the_loop_finds_a_wrong_value_a_stray_write_and_a_lost_mutation() -> None:
    silu, fused = CATALOG["silu_and_mul"], CATALOG["fused_add_rms_norm"]
    shape, fused_shape = (
        SampleShape(num_tokens=3, dtype=torch.float32, padding=5, variant=spec.variants[0]) for spec in (silu, fused)
    )
    run = silu.native
    with must_fail():
        run_and_check(silu, lambda x: run(x.roll(1, -1)), shape)
    with must_fail():
        run_and_check(silu, lambda x: (run(x), x.zero_())[0], shape)
    with must_fail():
        run_and_check(silu, lambda x: (run(x), x._base[:, 0].zero_())[0], shape)
    with must_fail():
        run_and_check(fused, lambda x, residual, weight, eps: fused.native(x, residual.clone(), weight, eps), fused_shape)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.splits_graph], ids=lambda spec: spec.name)
def test_the_native_form_keeps_its_writes_in_place_when_it_is_traced(spec: OpSpec) -> None:
    torch._dynamo.reset()
    traced = torch.compile(spec.native, backend="aot_eager", fullgraph=True, dynamic=True)
    shape = SampleShape(num_tokens=17, dtype=torch.bfloat16, padding=5, variant=spec.variants[0])
    run_and_check(spec, traced, shape)
    run_and_check(spec, traced, replace(shape, num_tokens=3))


IN_PLACE = CATALOG["fused_add_rms_norm"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "spec", [spec for spec in SPECS if not spec.splits_graph and spec is not IN_PLACE], ids=lambda spec: spec.name
)
def test_the_native_form_is_right_when_inductor_compiles_it(spec: OpSpec) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(spec.native, fullgraph=True, dynamic=True)
    for dtype, padding in SMALL:
        for num_tokens in (17, 3, 256):
            shape = SampleShape(num_tokens=num_tokens, dtype=dtype, padding=padding, variant=spec.variants[0])
            run_and_check(spec, compiled, shape)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_native_form_of_add_and_norm_is_right_when_inductor_compiles_it_behind_another_op() -> None:
    # As in a model, x is not an input of the graph: with both written tensors as inputs, torch 2.13 fails (KeyError).
    run = IN_PLACE.native

    def piece(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x * 2
        run(x, residual, weight, eps)
        return x

    torch._dynamo.reset()
    compiled = torch.compile(piece, fullgraph=True, dynamic=True)
    for dtype in IN_PLACE.tolerances:
        for num_tokens in (17, 3, 256):
            shape = SampleShape(num_tokens=num_tokens, dtype=dtype, variant=IN_PLACE.variants[0])
            x, residual, weight, eps = IN_PLACE.sample(shape)
            expected = IN_PLACE.reference(x * 2, residual, weight, eps)
            assert_close(IN_PLACE, shape, compiled(x, residual, weight, eps), expected["x"], "x")
            assert_close(IN_PLACE, shape, residual, expected["residual"], "residual")


def test_attention_and_the_cache_update_split_the_graph() -> None:
    names = ("rotary_store_kv", "store_kv", "paged_attention")
    kernels = own_kernels()
    assert splitting_ops() == tuple(f"modelworker::{name}" for name in names)
    assert splitting_ops(kernels) == (*splitting_ops(), *(f"{kernels.level.namespace}::{name}" for name in names))
    assert splitting_ops(None, load_triton()) == (*splitting_ops(), *(f"modelworker_triton::{name}" for name in names))


IMPORTING = """
import torch
import modelworker.ops

def registered():
    names = (schema.name.partition("::") for schema in torch._C._jit_get_all_schemas())
    return sorted(name for namespace, _, name in names if namespace == "modelworker")

ops = registered()
from modelworker.ops.report import switchable_ops
classes = switchable_ops()
from modelworker.ops.catalog import CATALOG
assert (ops, classes) == (registered(), switchable_ops()), "importing the catalog registers more than importing modelworker.ops"
print(*ops, "|", *classes, "|", *CATALOG)
"""


def test_importing_the_package_registers_every_op_of_the_catalog_and_no_other_and_every_class() -> None:
    command = [sys.executable, "-c", IMPORTING]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ops, classes, catalog = (set(names.split()) for names in output.split("|"))
    assert ops == catalog
    # The only op that shares a class with another one.
    assert classes == catalog - {"fused_add_rms_norm"}
