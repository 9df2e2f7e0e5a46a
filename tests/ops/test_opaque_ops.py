"""Attention and the cache update: opaque to a compiler, or plain Python, with the same results."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from modelworker.ops.attention import PagedAttention
from modelworker.ops.catalog import CATALOG
from modelworker.ops.kv_cache import StoreKv
from modelworker.ops.op_settings import OpSettings
from modelworker.ops.op_spec import SampleShape


class Dispatched(TorchDispatchMode):
    """Collects the ops of this namespace that go through torch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "modelworker":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def run(opaque_ops: bool) -> tuple[Tensor, Tensor, list[str]]:
    ops = OpSettings(opaque_ops=opaque_ops)
    stored, attended = (
        CATALOG[name].sample(SampleShape(num_tokens=17, dtype=torch.float32, variant=CATALOG[name].variants[0]))
        for name in ("store_kv", "paged_attention")
    )
    *tensors, scale, window, soft_cap = attended
    attention = PagedAttention(scale=scale, window=window, soft_cap=soft_cap, head_dim=16, queries_per_kv_head=2, ops=ops)
    with Dispatched() as dispatched:
        order = StoreKv(ops=ops)(*stored)
        attention(*tensors[:-1], order)
    return stored[2], tensors[3], dispatched.names


@pytest.mark.parametrize(("opaque_ops", "names"), [(True, ["store_kv.default", "paged_attention.default"]), (False, [])])
def test_a_platform_that_wants_no_opaque_ops_calls_the_python_functions(opaque_ops: bool, names: list[str]) -> None:
    cache, output, dispatched = run(opaque_ops)
    assert dispatched == names
    expected_cache, expected_output, _ = run(True)
    assert torch.equal(cache.nan_to_num(), expected_cache.nan_to_num())
    assert torch.equal(output, expected_output)
