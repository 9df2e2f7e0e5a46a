import resource
from dataclasses import replace

import pytest
import torch

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
    ("settings", "flag"), [({"num_blocks": 16}, "--num-blocks"), ({"kv_cache_memory": 16 * BLOCK_BYTES}, "--kv-cache-memory")]
)
def test_a_cache_that_holds_less_than_one_sequence_is_refused_with_what_would_do(settings: dict[str, int], flag: str) -> None:
    with pytest.raises(SettingsError) as error:
        choose(**settings)
    assert flag in str(error.value)
    assert "needs 17" in str(error.value)
    assert f"--kv-cache-memory {17 * BLOCK_BYTES}" in str(error.value)
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
