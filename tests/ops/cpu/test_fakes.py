"""What a compiler is told of the C++ ops, against what they do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from modelworker.ops.catalog import CATALOG
from modelworker.ops.cpu.fakes import OWN_FAKES
from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.cpu.packing import packed_shape
from modelworker.ops.op_spec import SampleShape
from modelworker_testing.op_checks import checkable

HIDDEN, VOCABULARY = 64, 96


def tokens(*sizes: int, padded: int = 0) -> Tensor:
    return torch.randn(*sizes[:-1], sizes[-1] + padded).bfloat16()[..., : sizes[-1]]


def packed() -> Tensor:
    return torch.zeros(packed_shape(VOCABULARY, HIDDEN, torch.bfloat16), dtype=torch.bfloat16)


# Of the ops that take others than the registered op, or of which there is none.
ARGUMENTS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "linear_pack": lambda n: (tokens(VOCABULARY, HIDDEN), packed()),
    "linear_unpack": lambda n: (packed(), VOCABULARY, HIDDEN),
    "packed_embedding": lambda n: (torch.arange(n), packed(), VOCABULARY, HIDDEN),
    "linear": lambda n: (tokens(n, HIDDEN, padded=3), packed(), tokens(VOCABULARY), VOCABULARY),
    "linear_float32": lambda n: (tokens(n, HIDDEN), packed(), VOCABULARY),
    "linear_argmax": lambda n: (tokens(n, HIDDEN), packed(), VOCABULARY),
}
SAMPLED = sorted(spec.name for spec in CATALOG.values() if spec.name not in ARGUMENTS and not spec.gpu_only)
NAMES = [*ARGUMENTS, *SAMPLED]


def arguments_of(name: str, num_tokens: int, padding: int = 0) -> tuple[Any, ...]:
    """Makes an op's arguments for a number of tokens."""
    if name in ARGUMENTS:
        return ARGUMENTS[name](num_tokens)
    spec = CATALOG[name]
    shape = SampleShape(num_tokens=num_tokens, dtype=torch.bfloat16, padding=padding, variant=spec.variants[0])
    return spec.sample(shape)


def op_of(library: CpuLibrary, name: str) -> Any:
    if not hasattr(library.ops, name):
        pytest.fail(f"there is no C++ op {name}: add `DOOR({name}, ...)` to ops/cpu/doors.cpp", pytrace=False)
    return getattr(library.ops, name).default


def tensors_of(result: object) -> tuple[Tensor, ...]:
    if result is None:
        return ()
    return (result,) if isinstance(result, Tensor) else tuple(result)  # type: ignore[arg-type]


def described(op: Any) -> list[tuple[Any, ...]]:
    """An op's arguments and results: names, types, and which are written to."""
    return [
        (value.name, str(value.type), value.alias_info is not None and value.alias_info.is_write)
        for value in (*op._schema.arguments, *op._schema.returns)
    ]


def test_every_op_that_a_model_calls_is_here(cpu_library: CpuLibrary) -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{cpu_library.level.namespace}::")}
    assert names == {f"{cpu_library.level.namespace}::{name}" for name in (*NAMES, "pool_empty", "pool_alias")}
    assert OWN_FAKES.keys() == ARGUMENTS.keys(), "an op with a fake of its own in ops/cpu/fakes.py has its arguments here"


@pytest.mark.parametrize("name", SAMPLED)
def test_an_op_that_takes_the_registered_ops_fake_takes_its_arguments(cpu_library: CpuLibrary, name: str) -> None:
    assert described(op_of(cpu_library, name)) == described(getattr(torch.ops.modelworker, name).default)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 17])
@pytest.mark.parametrize("name", NAMES)
def test_a_fake_result_has_the_real_ones_sizes_strides_and_dtype(
    cpu_library: CpuLibrary, name: str, num_tokens: int, padding: int
) -> None:
    op = op_of(cpu_library, name)
    arguments = arguments_of(name, num_tokens, padding)
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(value) if isinstance(value, Tensor) else value for value in arguments))
    real = op(*arguments)
    facts = [
        [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors_of(result)] for result in (real, fake)
    ]
    assert facts[0] == facts[1]


@pytest.mark.parametrize("name", NAMES)
def test_no_fake_asks_for_the_value_of_a_size(cpu_library: CpuLibrary, name: str) -> None:
    # No other size of a sample is this one.
    num_tokens = 29
    arguments = arguments_of(name, num_tokens)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        assert mode.shape_env is not None
        unknown = mode.shape_env.create_unbacked_symint()

        def with_unknown_size(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            sizes = [unknown if size == num_tokens else size for size in value.shape]
            return torch.empty(sizes, dtype=value.dtype)

        results = tensors_of(op_of(cpu_library, name)(*map(with_unknown_size, arguments)))
    if name not in ("linear_unpack", "store_kv", "rotary_store_kv"):
        assert all(result.shape[0] is unknown or str(result.shape[0]) == str(unknown) for result in results)


@pytest.mark.parametrize("name", NAMES)
def test_torch_finds_nothing_wrong_with_an_op(cpu_library: CpuLibrary, name: str) -> None:
    torch.library.opcheck(op_of(cpu_library, name), tuple(map(checkable, arguments_of(name, 3))))
