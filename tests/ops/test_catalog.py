"""One loop over the catalog: each implementation of each op against its reference, its schema, its fake, and what it may touch."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from modelworker.ops.catalog import CATALOG, splitting_ops
from modelworker.ops.op_spec import RETURNED, Implementation, OpSpec, SampleShape, returned_at
from modelworker_testing.kernels import own_kernels

SPECS = list(CATALOG.values())
KERNELS = own_kernels()
SMALL = ((torch.float32, 0), (torch.bfloat16, 5))
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Run = Callable[..., Any]


def op_of(spec: OpSpec) -> Any:
    return getattr(torch.ops.modelworker, spec.name).default


def cases() -> Iterator[Any]:
    for spec in SPECS:
        for implementation in (*spec.implementations(KERNELS), Implementation(name="registered", run=op_of(spec))):
            for shape in spec.shapes():
                # What is registered is an implementation behind torch's dispatcher: a few samples show that it is reached.
                if implementation.name != "registered" or shape.num_tokens in (0, 3):
                    yield pytest.param(spec, implementation.run, shape, id=f"{spec.name}-{implementation.name}-{shape}")


def small_shapes() -> Iterator[Any]:
    for spec in SPECS:
        for shape in spec.shapes():
            if shape.num_tokens in (0, 3) and shape.variant == spec.variants[0] and (shape.dtype, shape.padding) in SMALL:
                yield pytest.param(spec, shape, id=f"{spec.name}-{shape}")


def names_of(spec: OpSpec) -> list[str]:
    return [argument.name for argument in op_of(spec)._schema.arguments]


def mutated(spec: OpSpec) -> set[str]:
    infos = {argument.name: argument.alias_info for argument in op_of(spec)._schema.arguments}
    return {name for name, info in infos.items() if info is not None and info.is_write}


def memory(tensor: Tensor) -> Tensor:
    """Everything that a tensor is a view of, flat, as integers: there, NaN equals itself."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return whole if tensor.dtype == torch.bool else whole.view(BITS[tensor.itemsize])


def changes(before: Tensor, after: Tensor) -> Tensor:
    return (before != after) & ~(before.isnan() & after.isnan())


def memories(arguments: Mapping[str, Any]) -> dict[int, Tensor]:
    return {
        argument.untyped_storage().data_ptr(): memory(argument)
        for argument in arguments.values()
        if isinstance(argument, Tensor) and argument.numel()
    }


def run_and_check(spec: OpSpec, run: Run, shape: SampleShape) -> None:
    """Runs one sample: results are the reference's, and nothing is written but what the reference changes."""
    arguments = dict(zip(names_of(spec), spec.sample(shape), strict=True))
    expected = spec.reference(*arguments.values())
    assert {name for name in expected if not name.startswith(RETURNED)} == mutated(spec)
    before = {address: bits.clone() for address, bits in memories(arguments).items()}
    allowed = {address: torch.zeros_like(bits, dtype=torch.bool) for address, bits in before.items()}
    for name in mutated(spec):
        argument = arguments[name]
        if argument.numel():
            mask = allowed[argument.untyped_storage().data_ptr()]
            mask.as_strided(argument.shape, argument.stride(), argument.storage_offset()).logical_or_(
                changes(argument.double(), expected[name])
            )
    result = run(*arguments.values())
    actual = {**arguments, **results(result)}
    for name, wanted in expected.items():
        assert_close(spec, shape, actual[name], wanted, name)
    assert set(results(result)) == {name for name in expected if name.startswith(RETURNED)}
    for address, bits in memories(arguments).items():
        assert not ((bits != before[address]) & ~allowed[address]).any(), "something else was written"


def results(result: Any) -> dict[str, Tensor]:
    """What an op returned, by the names that references use."""
    if isinstance(result, Tensor):
        return {RETURNED: result}
    return {returned_at(index): tensor for index, tensor in enumerate(result or ())}


def dtype_of(spec: OpSpec, shape: SampleShape, name: str) -> torch.dtype:
    names = [RETURNED] if len(spec.result_dtypes) == 1 else [returned_at(index) for index in range(len(spec.result_dtypes))]
    return dict(zip(names, spec.result_dtypes, strict=True)).get(name, shape.dtype)


def assert_close(spec: OpSpec, shape: SampleShape, actual: Tensor, wanted: Tensor, name: str) -> None:
    assert actual.dtype == dtype_of(spec, shape, name)
    tolerance = spec.tolerances[shape.dtype]
    torch.testing.assert_close(
        actual.double(), wanted, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )


@pytest.mark.parametrize(("spec", "run", "shape"), list(cases()))
def test_an_implementation_agrees_with_the_reference_and_writes_nothing_else(spec: OpSpec, run: Run, shape: SampleShape) -> None:
    run_and_check(spec, run, shape)


@pytest.mark.parametrize(("spec", "shape"), list(small_shapes()))
def test_schema_fake_and_autograd_registration_pass_torchs_own_check(spec: OpSpec, shape: SampleShape) -> None:
    arguments = [checkable(argument) if isinstance(argument, Tensor) else argument for argument in spec.sample(shape)]
    torch.library.opcheck(op_of(spec), tuple(arguments))


def checkable(argument: Tensor) -> Tensor:
    """What torch's check can copy and compare: it refuses views without elements, and holds NaN for a change."""
    argument = argument if argument.numel() else argument.new_empty(argument.shape)
    return argument.nan_to_num_(0.5) if argument.is_floating_point() else argument


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
    assert [implementation.name for implementation in spec.implementations(KERNELS)] == ["native", "c++"]


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
    assert splitting_ops() == tuple(f"modelworker::{name}" for name in names)
    assert splitting_ops(KERNELS) == (*splitting_ops(), *(f"{KERNELS.level.namespace}::{name}" for name in names))


def test_every_registered_op_is_in_the_catalog() -> None:
    registered = {
        schema.name.removeprefix("modelworker::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("modelworker::")
    }
    assert registered == set(CATALOG)
