import resource
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from modelworker.worker.errors import SettingsError
from modelworker.worker.kv_cache import KvCache, KvCacheGeometry, choose_num_blocks
from modelworker.worker.settings import KvCacheSettings

GEOMETRY = KvCacheGeometry(num_layers=2, num_kv_heads=2, head_dim=16, block_size=4, dtype=torch.bfloat16)
BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 2


def choose(free_bytes: int = 2**30, max_model_len: int = 64, **settings: object) -> int:
    return choose_num_blocks(
        KvCacheSettings(block_size=4, **settings),
        GEOMETRY,
        max_model_len=max_model_len,
        free_bytes=free_bytes,  # type: ignore[arg-type]
    )


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    assert GEOMETRY.bytes_per_block == BLOCK_BYTES
    assert KvCache(GEOMETRY, 5, torch.device("cpu")).describe().bytes_per_block == BLOCK_BYTES


def test_the_number_of_blocks_follows_from_blocks_then_memory_then_a_share_of_what_is_free() -> None:
    assert choose(num_blocks=100, kv_cache_memory=2**20) == 100
    assert choose(kv_cache_memory=50 * BLOCK_BYTES + 1) == 50
    assert choose(kv_cache_fraction=0.5, free_bytes=200 * BLOCK_BYTES) == 100


@pytest.mark.parametrize(
    ("settings", "enough"),
    [
        ({"num_blocks": 16}, "--num-blocks 17"),
        ({"kv_cache_memory": 16 * BLOCK_BYTES}, f"--kv-cache-memory {17 * BLOCK_BYTES}"),
        ({"kv_cache_fraction": 1.0, "free_bytes": 16 * BLOCK_BYTES}, f"--kv-cache-memory {17 * BLOCK_BYTES}"),
    ],
)
def test_a_cache_that_holds_less_than_one_sequence_is_refused_with_what_would_do(settings: dict[str, Any], enough: str) -> None:
    with pytest.raises(SettingsError) as error:
        choose(**settings)
    assert "needs 17" in str(error.value)
    assert f"allow at least {enough}" in str(error.value)
    assert choose(num_blocks=17) == 17


def test_a_cache_larger_than_the_free_memory_is_refused() -> None:
    with pytest.raises(SettingsError, match="only 1000000 are free"):
        choose(num_blocks=10_000, free_bytes=1_000_000)


def test_layers_are_separate_zeroed_tensors_of_the_documented_shape() -> None:
    cache = KvCache(GEOMETRY, 5, torch.device("cpu"))
    assert len(cache.layers) == 2
    for key_cache, value_cache in cache.layers:
        assert key_cache.shape == value_cache.shape == (5, 2, 4, 16)
        assert key_cache.is_contiguous()
        assert key_cache.eq(0).all()
    cache.layers[1][0].fill_(3)
    assert cache.layers[0][0].eq(0).all()
    assert cache.layers[1][1].eq(0).all()


def test_zeroing_keeps_the_addresses() -> None:
    cache = KvCache(GEOMETRY, 50, torch.device("cpu"))
    tensor, address = cache.layers[0][1], cache.layers[0][1].data_ptr()
    tensor.fill_(7)
    cache.zero()
    assert tensor.data_ptr() == address
    assert tensor.eq(0).all()
    tensor.fill_(8)
    assert tensor.eq(8).all()


def test_a_large_cache_costs_no_memory_before_it_is_written_nor_when_it_is_zeroed() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cache = KvCache(replace(GEOMETRY, num_layers=32, head_dim=128), 20_000, torch.device("cpu"))
    assert cache.num_blocks * cache.geometry.bytes_per_block > 2**30
    cache.zero()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**27


@pytest.mark.parametrize(
    "change", [{"num_layers": 3}, {"num_kv_heads": 1}, {"head_dim": 8}, {"block_size": 8}, {"dtype": torch.float32}]
)
def test_the_layout_fingerprint_differs_when_blocks_can_not_be_exchanged(change: dict[str, object]) -> None:
    assert replace(GEOMETRY, **change).layout_fingerprint != GEOMETRY.layout_fingerprint  # type: ignore[arg-type]
    assert replace(GEOMETRY).layout_fingerprint == GEOMETRY.layout_fingerprint


# -- maintenance of single blocks --

NUM_BLOCKS = 9
BLOCKS = st.integers(0, NUM_BLOCKS - 1)


def filled_cache(num_blocks: int = NUM_BLOCKS, *, dtype: torch.dtype = torch.bfloat16) -> KvCache:
    """A cache of which every value of a layer is another."""
    cache = KvCache(replace(GEOMETRY, dtype=dtype), num_blocks, torch.device("cpu"))
    for layer, caches in enumerate(cache.layers):
        for half, tensor in enumerate(caches):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2 * layer + half)))
    return cache


def tensors(cache: KvCache) -> list[Tensor]:
    return [tensor for layer in cache.layers for tensor in layer]


def numbers(values: list[int]) -> np.typing.NDArray[np.int32]:
    return np.array(values, np.int32)


@settings(max_examples=60)
@given(
    zeroed=st.lists(BLOCKS, max_size=6),
    destinations=st.lists(BLOCKS, max_size=NUM_BLOCKS, unique=True),
    sources=st.lists(BLOCKS, min_size=NUM_BLOCKS, max_size=NUM_BLOCKS),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
)
def test_zeroing_then_copying_changes_the_named_blocks_of_all_layers_and_nothing_else(
    zeroed: list[int], destinations: list[int], sources: list[int], dtype: torch.dtype
) -> None:
    cache = filled_cache(dtype=dtype)
    sources = sources[: len(destinations)]
    expected = [tensor.clone() for tensor in tensors(cache)]
    for tensor in expected:
        tensor[zeroed] = 0
        tensor[destinations] = tensor[sources].clone()
    addresses = [tensor.data_ptr() for tensor in tensors(cache)]
    with torch.inference_mode():
        cache.zero_blocks(numbers(zeroed))
        cache.copy_blocks(numbers(sources), numbers(destinations))
    assert all(map(torch.equal, tensors(cache), expected))
    assert [tensor.data_ptr() for tensor in tensors(cache)] == addresses


@pytest.mark.parametrize("order", [np.roll(np.arange(300), 1), np.arange(300)[::-1], np.zeros(300)])
def test_more_copies_than_are_made_at_once_are_made_all_the_same(order: np.typing.NDArray[np.int32]) -> None:
    cache = filled_cache(300)
    before = [tensor.clone() for tensor in tensors(cache)]
    cache.copy_blocks(order.astype(np.int32), np.arange(300, dtype=np.int32))
    assert all(torch.equal(tensor, old[order.astype(np.int64)]) for tensor, old in zip(tensors(cache), before, strict=True))


def test_nan_in_a_block_is_copied_and_zeroed_like_any_value() -> None:
    cache = filled_cache()
    for tensor in tensors(cache):
        tensor[3] = torch.nan
    cache.copy_blocks(numbers([3]), numbers([4]))
    cache.zero_blocks(numbers([3]))
    assert all(tensor[4].isnan().all() and tensor[3].eq(0).all() for tensor in tensors(cache))


def test_spoiled_slots_hold_nan_in_all_layers_and_their_neighbours_what_they_held() -> None:
    cache = filled_cache()
    expected = [tensor.clone() for tensor in tensors(cache)]
    for tensor in expected:
        tensor[2, :, 1] = tensor[8, :, 3] = torch.nan
    cache.spoil_slots(np.array([2 * 4 + 1, 8 * 4 + 3]))
    for tensor, wanted in zip(tensors(cache), expected, strict=True):
        torch.testing.assert_close(tensor, wanted, atol=0, rtol=0, equal_nan=True)


def test_the_warm_up_changes_the_first_two_blocks_only() -> None:
    cache = filled_cache()
    before = [tensor.clone() for tensor in tensors(cache)]
    cache.warm_up()
    assert all(torch.equal(tensor[2:], old[2:]) for tensor, old in zip(tensors(cache), before, strict=True))
    assert all(tensor.isfinite().all() for tensor in tensors(cache))


class MemorySizes(TorchDispatchMode):
    """Notes the bytes of each memory that a result lies in."""

    def __init__(self) -> None:
        super().__init__()
        self.of_address: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            memory = result.untyped_storage()
            self.of_address[memory.data_ptr()] = memory.nbytes()
        return result


def test_copying_takes_no_memory_that_grows_with_the_copies() -> None:
    cache = filled_cache(300)
    with MemorySizes() as sizes:
        cache.copy_blocks(np.arange(150, dtype=np.int32), np.arange(150, 300, dtype=np.int32))
    caches = {tensor.untyped_storage().data_ptr() for tensor in tensors(cache)}
    assert caches < sizes.of_address.keys()
    block_bytes = BLOCK_BYTES // len(caches)
    assert max(size for address, size in sizes.of_address.items() if address not in caches) == 64 * block_bytes
