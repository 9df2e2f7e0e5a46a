"""Every op's schema, fake and mutation, checked by torch and by a compiler that would drop what is not declared."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from modelworker.ops.library import register_op

OPS = torch.ops.modelworker


def samples() -> dict[str, tuple[Any, ...]]:
    x, weight = torch.randn(3, 8), torch.rand(8)
    query, key, table = torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.randn(50, 8)
    cache = torch.zeros(5, 2, 4, 8)
    int32 = torch.int32
    return {
        "rms_norm": (x, weight, 1e-5),
        "fused_add_rms_norm": (x, x.clone(), weight, 1e-5),
        "silu_and_mul": (x,),
        "rotary_embedding": (query, key, torch.tensor([0, 4, 9], dtype=int32), table, False),
        "store_kv": (key, key.clone(), cache, cache.clone(), torch.tensor([4, -1, 9])),
        "paged_attention": (
            query,
            cache,
            cache.clone(),
            torch.empty(3, 4, 8),
            torch.tensor([0, 1, 3], dtype=int32),
            torch.tensor([3, 7], dtype=int32),
            torch.tensor([[1, 2], [3, 4]], dtype=int32),
            torch.empty(0),
            0.3,
            0,
            0.0,
        ),
    }


@pytest.mark.parametrize("name", samples())
def test_schema_fake_and_mutation_agree_with_the_implementation(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, samples()[name])


@pytest.mark.parametrize(
    ("name", "mutated"),
    [
        ("fused_add_rms_norm", {0, 1}),
        ("rotary_embedding", {0, 1}),
        ("store_kv", {2, 3}),
        ("paged_attention", {3}),
        ("rms_norm", set()),
    ],
)
def test_an_op_writes_exactly_what_its_schema_declares(name: str, mutated: set[int]) -> None:
    arguments = samples()[name]
    before = [argument.clone() if isinstance(argument, Tensor) else argument for argument in arguments]
    getattr(OPS, name)(*arguments)
    schema = getattr(OPS, name).default._schema
    for index, (argument, old) in enumerate(zip(arguments, before, strict=True)):
        info = schema.arguments[index].alias_info
        assert (info is not None and info.is_write) == (index in mutated)
        if isinstance(argument, Tensor):
            assert torch.equal(argument, old) == (index not in mutated)


def test_a_compiled_function_that_ignores_the_result_of_store_kv_still_writes_the_cache_twice() -> None:
    def write_twice(key: Tensor, cache: Tensor, values: Tensor, first: Tensor, second: Tensor) -> Tensor:
        OPS.store_kv(key, key, cache, values, first)
        OPS.store_kv(key + 1, key + 1, cache, values, second)
        return key * 2

    key, cache, values = torch.randn(2, 2, 8), torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8)
    compiled: Callable[..., Tensor] = torch.compile(write_twice, backend="aot_eager", fullgraph=True)
    compiled(key, cache, values, torch.tensor([4, 5]), torch.tensor([5, 6]))
    assert torch.equal(cache[1, :, 0], key[0])
    assert torch.equal(cache[1, :, 1], key[0] + 1)
    assert torch.equal(values[1, :, 2], key[1] + 1)


def test_an_op_dies_with_the_library_that_a_plugin_registers_it_in() -> None:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    library = torch.library.Library("modelworker_test_plugin", "FRAGMENT")
    register_op(doubled, fake=torch.empty_like, library=library)
    assert torch.ops.modelworker_test_plugin.doubled(torch.ones(1)).item() == 2
    library._destroy()
