import pytest
import torch

from modelworker.ops.cpu.packing import WeightArena, advise_huge_pages, packed_shape


def test_tensors_of_an_arena_start_on_pages_and_do_not_overlap() -> None:
    arena = WeightArena()
    tensors = [
        arena.empty(shape, dtype) for shape in ((3, 5), (100, 1000), (1,), (7, 7)) for dtype in (torch.float32, torch.bfloat16)
    ]
    for value, tensor in enumerate(tensors):
        tensor.fill_(value)
    assert all(tensor.data_ptr() % 4096 == 0 for tensor in tensors)
    assert all((tensor == value).all() for value, tensor in enumerate(tensors))


def test_small_tensors_share_a_piece_of_memory_and_large_ones_get_their_own() -> None:
    arena = WeightArena()
    first, second = arena.empty((1000,), torch.float32), arena.empty((1000,), torch.float32)
    assert second.data_ptr() - first.data_ptr() == 4096
    large = arena.empty((50_000_000,), torch.bfloat16)
    assert large.numel() == 50_000_000
    assert large.data_ptr() % (2 << 20) == 0


def test_a_tensor_smaller_than_a_page_gets_no_huge_pages() -> None:
    assert not advise_huge_pages(torch.empty(10, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("sizes", "dtype", "shape"),
    [
        ((1, 1), torch.bfloat16, (1, 16, 32, 2)),
        ((960, 576), torch.bfloat16, (30, 288, 32, 2)),
        ((33, 33), torch.bfloat16, (2, 32, 32, 2)),
        ((33, 33), torch.float32, (2, 33, 32, 1)),
    ],
)
def test_outputs_are_padded_to_blocks_and_bf16_inputs_to_tiles(
    sizes: tuple[int, int], dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    assert packed_shape(*sizes, dtype) == shape
