"""What holds of every op of the catalog, in whatever form it runs."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.op_spec import RETURNED, OpSpec, SampleShape, returned_at

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Run = Callable[..., Any]


def op_of(spec: OpSpec) -> Any:
    """Returns the registered op."""
    if not hasattr(torch.ops.modelworker, spec.name):
        line = f"register_op({spec.native.__name__}, ...)"
        pytest.fail(f"there is no torch.ops.modelworker.{spec.name}: add `{line}` to {spec.native.__module__}", pytrace=False)
    return getattr(torch.ops.modelworker, spec.name).default


def cpp_form(spec: OpSpec, library: CpuLibrary) -> Run:
    """Returns the C++ form."""
    if spec.cpp is None:
        pytest.fail(f"{spec.name} has no C++ form: add `cpp=_kernel({spec.name!r})` to its spec", pytrace=False)
    if not hasattr(library.ops, spec.name):
        namespace = library.level.namespace
        pytest.fail(
            f"there is no torch.ops.{namespace}.{spec.name}: add `DOOR({spec.name}, ...)` to ops/cpu/doors.cpp", pytrace=False
        )
    return spec.cpp(library)


def named_sample(spec: OpSpec, shape: SampleShape) -> dict[str, Any]:
    """Makes a sample's arguments, by their names."""
    return dict(zip((argument.name for argument in op_of(spec)._schema.arguments), spec.sample(shape), strict=True))


def mutated(spec: OpSpec) -> set[str]:
    """Returns the arguments that the registered op says it writes to."""
    infos = {argument.name: argument.alias_info for argument in op_of(spec)._schema.arguments}
    return {name for name, info in infos.items() if info is not None and info.is_write}


def results(result: Any) -> dict[str, Tensor]:
    """What an op returned, by the names that references use."""
    if isinstance(result, Tensor):
        return {RETURNED: result}
    return {returned_at(index): tensor for index, tensor in enumerate(result or ())}


def memory(tensor: Tensor) -> Tensor:
    """Everything that a tensor is a view of, flat, as integers: there, NaN equals itself."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return whole if tensor.dtype == torch.bool else whole.view(_BITS[tensor.itemsize])


def memories(values: Mapping[str, Any]) -> dict[int, Tensor]:
    """The memory of each tensor that has elements, by its address."""
    return {
        value.untyped_storage().data_ptr(): memory(value)
        for value in values.values()
        if isinstance(value, Tensor) and value.numel()
    }


def run_and_check(spec: OpSpec, run: Run, shape: SampleShape) -> None:
    """Runs one sample: results are the reference's, and nothing is written but what the reference changes."""
    arguments = named_sample(spec, shape)
    expected = spec.reference(*arguments.values())
    assert {name for name in expected if not name.startswith(RETURNED)} == mutated(spec)
    before = {address: bits.clone() for address, bits in memories(arguments).items()}
    allowed = {address: torch.zeros_like(bits, dtype=torch.bool) for address, bits in before.items()}
    for name in mutated(spec):
        argument = arguments[name]
        if argument.numel():
            mask = allowed[argument.untyped_storage().data_ptr()]
            mask.as_strided(argument.shape, argument.stride(), argument.storage_offset()).logical_or_(
                _changes(argument.double(), expected[name])
            )
    result = run(*arguments.values())
    actual = {**arguments, **results(result)}
    for name, wanted in expected.items():
        assert_close(spec, shape, actual[name], wanted, name)
    assert set(results(result)) == {name for name in expected if name.startswith(RETURNED)}
    for address, bits in memories(arguments).items():
        assert not ((bits != before[address]) & ~allowed[address]).any(), "something else was written"


def assert_close(spec: OpSpec, shape: SampleShape, actual: Tensor, wanted: Tensor, name: str) -> None:
    """Compares a result, or a written argument, with the reference's."""
    assert actual.dtype == _dtype_of(spec, shape, name)
    tolerance = spec.tolerances[shape.dtype]
    torch.testing.assert_close(
        actual.double(), wanted, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )


def checkable(argument: Any) -> Any:
    """What torch's own check of an op can copy and compare: it refuses views without elements, and holds NaN for a change."""
    if not isinstance(argument, Tensor):
        return argument
    argument = argument if argument.numel() else argument.new_empty(argument.shape)
    return argument.nan_to_num_(0.5, torch.inf, -torch.inf) if argument.is_floating_point() else argument


def _changes(before: Tensor, after: Tensor) -> Tensor:
    return (before != after) & ~(before.isnan() & after.isnan())


def _dtype_of(spec: OpSpec, shape: SampleShape, name: str) -> torch.dtype:
    names = [RETURNED] if len(spec.result_dtypes) == 1 else [returned_at(index) for index in range(len(spec.result_dtypes))]
    return dict(zip(names, spec.result_dtypes, strict=True)).get(name, shape.dtype)
