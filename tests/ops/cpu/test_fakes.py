"""What a compiler is told of the C++ ops, against what they do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.cpu.packing import packed_shape

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCABULARY = 4, 2, 16, 64, 96


def tokens(*sizes: int, padded: int = 0) -> Tensor:
    return torch.randn(*sizes[:-1], sizes[-1] + padded).bfloat16()[..., : sizes[-1]]


def caches() -> tuple[Tensor, Tensor]:
    return torch.zeros(5, KV_HEADS, 8, HEAD_DIM).bfloat16(), torch.zeros(5, KV_HEADS, 8, HEAD_DIM).bfloat16()


def packed() -> Tensor:
    return torch.zeros(packed_shape(VOCABULARY, HIDDEN, torch.bfloat16), dtype=torch.bfloat16)


def heads(count: int, num_tokens: int) -> Tensor:
    return tokens(num_tokens, count, HEAD_DIM)


def slots(num_tokens: int) -> Tensor:
    return torch.arange(num_tokens)


# Arguments for a number of tokens. The first dimension of those in `SIZED` is that number, which a compiler doesn't know.
ARGUMENTS: dict[str, Callable[[int], tuple[Any, ...]]] = {
    "linear_pack": lambda n: (tokens(VOCABULARY, HIDDEN), packed()),
    "linear_unpack": lambda n: (packed(), VOCABULARY, HIDDEN),
    "packed_embedding": lambda n: (slots(n), packed(), VOCABULARY, HIDDEN),
    "linear": lambda n: (tokens(n, HIDDEN, padded=3), packed(), tokens(VOCABULARY), VOCABULARY),
    "linear_float32": lambda n: (tokens(n, HIDDEN), packed(), VOCABULARY),
    "linear_argmax": lambda n: (tokens(n, HIDDEN), packed(), VOCABULARY),
    "rms_norm": lambda n: (tokens(n, HIDDEN, padded=3), tokens(HIDDEN), 1e-5),
    "fused_add_rms_norm": lambda n: (tokens(n, HIDDEN), tokens(n, HIDDEN), tokens(HIDDEN), 1e-5),
    "silu_and_mul": lambda n: (tokens(n, HIDDEN, padded=3),),
    "embedding": lambda n: (tokens(VOCABULARY, HIDDEN, padded=3), slots(n)),
    "rotary_embedding": lambda n: (heads(HEADS, n), heads(KV_HEADS, n), slots(n), torch.randn(99, HEAD_DIM), False),
    "store_kv": lambda n: (heads(KV_HEADS, n), heads(KV_HEADS, n), *caches(), slots(n)),
    "rotary_store_kv": lambda n: (
        *(heads(HEADS, n), heads(KV_HEADS, n), heads(KV_HEADS, n), None, None, 1e-5),
        *(slots(n), torch.randn(99, HEAD_DIM), False, *caches(), slots(n)),
    ),
    "paged_attention": lambda n: (
        *(heads(HEADS, n), *caches(), heads(HEADS, n), torch.tensor([0, n], dtype=torch.int32)),
        *(torch.tensor([n], dtype=torch.int32), torch.ones(1, 4, dtype=torch.int32), torch.empty(0), 0.25, 0, 0.0),
    ),
}


def tensors_of(result: object) -> tuple[Tensor, ...]:
    if result is None:
        return ()
    return (result,) if isinstance(result, Tensor) else tuple(result)  # type: ignore[arg-type]


def test_every_op_that_a_model_calls_is_here(cpu_library: CpuLibrary) -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(f"{cpu_library.level.namespace}::")}
    assert names == {f"{cpu_library.level.namespace}::{name}" for name in (*ARGUMENTS, "pool_empty", "pool_alias")}


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 17])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_fake_result_has_the_real_ones_sizes_strides_and_dtype(cpu_library: CpuLibrary, name: str, num_tokens: int) -> None:
    op = getattr(cpu_library.ops, name)
    arguments = ARGUMENTS[name](num_tokens)
    with FakeTensorMode() as mode:
        fake = op(*(mode.from_tensor(value) if isinstance(value, Tensor) else value for value in arguments))
    real = op(*arguments)
    described = [
        [(tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors_of(result)] for result in (real, fake)
    ]
    assert described[0] == described[1]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_no_fake_asks_for_the_value_of_a_size(cpu_library: CpuLibrary, name: str) -> None:
    num_tokens = 29
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        assert mode.shape_env is not None
        unknown = mode.shape_env.create_unbacked_symint()

        def with_unknown_size(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            sizes = [unknown if size == num_tokens else size for size in value.shape]
            return torch.empty(sizes, dtype=value.dtype)

        results = tensors_of(getattr(cpu_library.ops, name)(*map(with_unknown_size, ARGUMENTS[name](num_tokens))))
    if name not in ("linear_unpack", "store_kv", "rotary_store_kv"):
        assert all(result.shape[0] is unknown or str(result.shape[0]) == str(unknown) for result in results)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_torch_finds_nothing_wrong_with_an_op(cpu_library: CpuLibrary, name: str) -> None:
    torch.library.opcheck(getattr(cpu_library.ops, name).default, ARGUMENTS[name](3))
