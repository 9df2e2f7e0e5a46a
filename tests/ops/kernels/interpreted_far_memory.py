"""Rows and slots beyond 2^31 elements: ids are widened before they multiply a stride. Run by test_interpreted.py.

The memory is only reserved: what nobody writes to takes none.
"""

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from modelworker.ops.kernels.embedding import launch_embedding
from modelworker.ops.kernels.paged_attention import PagedAttentionLauncher
from modelworker.ops.kernels.rotary_store_kv import launch_rotary_store_kv
from modelworker.ops.kernels.store_kv import launch_store_kv

HEADS, BLOCK_SIZE, HEAD_DIM = 8, 64, 64
NUM_BLOCKS = 2**31 // (HEADS * BLOCK_SIZE * HEAD_DIM) + 2
LAST = NUM_BLOCKS - 1


@pytest.fixture(autouse=True)
def _arguments_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter copies arguments back to the device, which here would fill the memory with itself."""
    monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)


def far_caches() -> tuple[Tensor, Tensor]:
    caches = [torch.empty(NUM_BLOCKS, HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.float16) for _ in range(2)]
    assert caches[0][LAST].storage_offset() > 2**31
    return caches[0], caches[1]


def near(caches: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two blocks, the second of them the last of the large cache."""
    return tuple(torch.stack((torch.zeros_like(cache[LAST]), cache[LAST])) for cache in caches)  # type: ignore[return-value]


def test_keys_and_values_are_stored_in_the_last_block() -> None:
    caches = far_caches()
    key, value = torch.randn(2, 3, HEADS, HEAD_DIM).half()
    slots = torch.tensor([LAST * BLOCK_SIZE + 5, -1, LAST * BLOCK_SIZE])
    launch_store_kv(key, value, *caches, slots)
    for cache, rows in zip(caches, (key, value), strict=True):
        assert torch.equal(cache[LAST, :, 5], rows[0])
        assert torch.equal(cache[LAST, :, 0], rows[2])


def test_rotated_keys_are_stored_in_the_last_block() -> None:
    caches = far_caches()
    query, key, value = torch.randn(3, 2, HEADS, HEAD_DIM).half()
    angles = torch.zeros(4, HEAD_DIM)
    angles[:, : HEAD_DIM // 2] = 1
    slots = torch.tensor([LAST * BLOCK_SIZE + 5, LAST * BLOCK_SIZE])
    positions = torch.tensor([1, 2], dtype=torch.int32)
    launch_rotary_store_kv(query, key, value, None, None, 0.0, positions, angles, False, *caches, slots)
    for cache, rows in zip(caches, (key, value), strict=True):
        assert torch.equal(cache[LAST, :, 5], rows[0])
        assert torch.equal(cache[LAST, :, 0], rows[1])


def test_attention_over_the_last_block_is_that_over_a_block_near_by() -> None:
    caches = far_caches()
    for cache in caches:
        cache[LAST] = torch.randn_like(cache[LAST])
    query = torch.randn(1, 2 * HEADS, HEAD_DIM).half()

    def attend(caches: tuple[Tensor, Tensor], block: int) -> Tensor:
        output = torch.empty_like(query)
        one = torch.tensor([0, 1], dtype=torch.int32)
        lengths, tables = torch.tensor([40], dtype=torch.int32), torch.tensor([[block]], dtype=torch.int32)
        PagedAttentionLauncher().launch(query, *caches, output, one, lengths, tables, torch.empty(0), 0.1, 0, 0.0)
        return output

    assert torch.equal(attend(caches, LAST), attend(near(caches), 1))


def test_the_last_rows_of_a_table_are_found() -> None:
    size = 4096
    table = torch.empty(2**31 // size + 2, size, dtype=torch.float16)
    last = table.shape[0] - 1
    table[last] = torch.randn(size).half()
    assert table[last].storage_offset() > 2**31
    assert torch.equal(launch_embedding(table, torch.tensor([last], dtype=torch.int32))[0], table[last])
