"""What a compiler does with a registered op, and how long an op lives."""

from collections.abc import Callable

import torch
from torch import Tensor

from modelworker.ops.library import register_op

OPS = torch.ops.modelworker


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
