from concurrent.futures import ThreadPoolExecutor

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from modelworker.ops.cpu.kernel_list import KernelList
from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.cpu.memory_pool import MemoryPool
from modelworker.ops.cpu.packing import WeightArena, pack_weight, packed_shape
from modelworker.ops.cpu.threads import torch_threads

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# Tails of every kind: single elements, an odd number of inputs, less than a block, more inputs than are multiplied at a time.
SHAPES = pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (70, 33), (96, 576), (49, 130), (160, 2304)])
ROWS = (0, 1, 2, 3, 17, 33, 64, 257)


def sums(library: CpuLibrary, x: Tensor, weight: Tensor) -> Tensor:
    result = library.ops.linear_float32(x, pack_weight(library, weight, WeightArena()), weight.shape[0])
    assert isinstance(result, Tensor)
    return result


def assert_close(result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Holds a product against fp64: each addition may round once, and the result once more."""
    exact = x.double() @ weight.double().T
    magnitude = x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    allowed = (x.shape[1] + 1) * 2**-24 * magnitude
    if result.dtype == torch.bfloat16:
        allowed += 2**-8 * exact.abs()
    assert ((result.double() - exact).abs() <= allowed).all()


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    out_features=st.integers(1, 100), in_features=st.integers(1, 100), dtype=st.sampled_from([torch.float32, torch.bfloat16])
)
def test_a_packed_weight_unpacks_to_itself_and_is_filled_with_zeros(
    cpu_library: CpuLibrary, out_features: int, in_features: int, dtype: torch.dtype
) -> None:
    weight = torch.randn(out_features, in_features).to(dtype)
    packed = torch.full(packed_shape(out_features, in_features, dtype), torch.nan, dtype=dtype)
    cpu_library.ops.linear_pack(weight, packed)
    assert torch.equal(cpu_library.ops.linear_unpack(packed, out_features, in_features), weight)
    assert packed.isfinite().all()
    assert packed.count_nonzero() == weight.count_nonzero()


def test_a_weight_with_padded_rows_is_packed(cpu_library: CpuLibrary) -> None:
    padded = torch.full((40, 64), torch.nan)
    padded[:, :50] = torch.randn(40, 50)
    packed = pack_weight(cpu_library, padded[:, :50], WeightArena())
    assert torch.equal(cpu_library.ops.linear_unpack(packed, 40, 50), padded[:, :50])


@DTYPES
@SHAPES
def test_products_are_those_of_fp64(cpu_library: CpuLibrary, dtype: torch.dtype, out_features: int, in_features: int) -> None:
    weight = torch.randn(out_features, in_features).to(dtype)
    bias = torch.randn(out_features).to(dtype)
    packed = pack_weight(cpu_library, weight, WeightArena())
    for rows in ROWS:
        x = torch.randn(rows, in_features).to(dtype)
        assert_close(cpu_library.ops.linear(x, packed, None, out_features), x, weight)
        assert_close(cpu_library.ops.linear(x, packed, bias, out_features), x, weight, bias)
        assert_close(cpu_library.ops.linear_float32(x, packed, out_features), x, weight)


def test_float32_results_of_bf16_products_are_not_rounded(cpu_library: CpuLibrary) -> None:
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    result = sums(cpu_library, x, weight)
    assert result.dtype == torch.float32
    assert (result != result.bfloat16().float()).any()


@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 5, 20])
@pytest.mark.parametrize("in_features", [31, 32, 75])
def test_what_stands_behind_a_row_is_not_read(cpu_library: CpuLibrary, dtype: torch.dtype, rows: int, in_features: int) -> None:
    wide = torch.full((rows, in_features + 40), torch.nan, dtype=dtype)
    wide[:, :in_features] = torch.randn(rows, in_features)
    weight = torch.randn(33, in_features).to(dtype)
    x = wide[:, :in_features]
    result = cpu_library.ops.linear(x, pack_weight(cpu_library, weight, WeightArena()), None, 33)
    assert_close(result, x, weight)


@DTYPES
@pytest.mark.parametrize("rows", [2, 3, 17, 40])
def test_a_row_of_nan_does_not_reach_its_neighbours(cpu_library: CpuLibrary, dtype: torch.dtype, rows: int) -> None:
    x, weight = torch.randn(rows, 96).to(dtype), torch.randn(64, 96).to(dtype)
    clean = sums(cpu_library, x, weight)
    x[1] = torch.nan
    result = sums(cpu_library, x, weight)
    assert result[1].isnan().all()
    others = torch.arange(rows) != 1
    assert torch.equal(result[others], clean[others])


@DTYPES
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_products_do_not_depend_on_the_number_of_threads(cpu_library: CpuLibrary, dtype: torch.dtype, rows: int) -> None:
    x, weight = torch.randn(rows, 200).to(dtype), torch.randn(330, 200).to(dtype)
    packed = pack_weight(cpu_library, weight, WeightArena())
    results = []
    for num_threads in (1, 2, 3):
        with torch_threads(num_threads):
            logits = cpu_library.ops.linear_float32(x, packed, 330)
            greedy = cpu_library.ops.linear_argmax(x, packed, 330)
        results.append((logits, *greedy))
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_threads_that_multiply_at_the_same_time_do_not_disturb_each_other(cpu_library: CpuLibrary) -> None:
    weight = torch.randn(330, 200).bfloat16()
    packed = pack_weight(cpu_library, weight, WeightArena())
    inputs = [torch.randn(rows, 200).bfloat16() for rows in (17, 40, 300, 18)]
    expected = [cpu_library.ops.linear(x, packed, None, 330) for x in inputs]

    def multiply(x: Tensor) -> list[Tensor]:
        return [cpu_library.ops.linear(x, packed, None, 330) for _ in range(50)]

    with ThreadPoolExecutor(len(inputs)) as pool:
        for results, exact in zip(pool.map(multiply, inputs), expected, strict=True):
            assert all(torch.equal(result, exact) for result in results)


@DTYPES
@pytest.mark.parametrize("out_features", [1, 33, 5000])
def test_the_greedy_token_is_that_of_the_logits(cpu_library: CpuLibrary, dtype: torch.dtype, out_features: int) -> None:
    weight = torch.randn(out_features, 64).to(dtype)
    packed = pack_weight(cpu_library, weight, WeightArena())
    for rows in (0, 1, 3, 17, 300):
        x = torch.randn(rows, 64).to(dtype)
        ids, largest, is_finite = cpu_library.ops.linear_argmax(x, packed, out_features)
        logits = cpu_library.ops.linear_float32(x, packed, out_features)
        assert ids.shape == largest.shape == is_finite.shape == (rows,)
        if rows:
            assert torch.equal(ids, logits.argmax(dim=1))
            assert torch.equal(largest, logits.amax(dim=1))
        assert is_finite.all()


@DTYPES
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("ties", [(3, 5), (7, 20), (31, 32), (40, 8000), (0, 9999)])
def test_ties_go_to_the_lowest_id(cpu_library: CpuLibrary, dtype: torch.dtype, rows: int, ties: tuple[int, int]) -> None:
    weight = torch.zeros(10_000, 32, dtype=dtype)
    weight[list(ties)] = 1
    x = torch.ones(rows, 32, dtype=dtype)
    packed = pack_weight(cpu_library, weight, WeightArena())
    ids, _, _ = cpu_library.ops.linear_argmax(x, packed, 10_000)
    assert ids.tolist() == [ties[0]] * rows


@DTYPES
@pytest.mark.parametrize("rows", [1, 4])
def test_padding_of_the_vocabulary_never_wins(cpu_library: CpuLibrary, dtype: torch.dtype, rows: int) -> None:
    weight = -torch.rand(33, 32).to(dtype) - 1
    x = torch.ones(rows, 32, dtype=dtype)
    packed = pack_weight(cpu_library, weight, WeightArena())
    ids, largest, is_finite = cpu_library.ops.linear_argmax(x, packed, 33)
    assert ((ids >= 0) & (ids < 33)).all()
    assert (largest < 0).all()
    assert is_finite.all()


@DTYPES
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_row_with_a_logit_that_is_not_finite_is_flagged(
    cpu_library: CpuLibrary, dtype: torch.dtype, bad: float, rows: int
) -> None:
    weight = torch.randn(3000, 40).abs().to(dtype)
    weight[:, 7] = 0
    weight[2900, 7] = 1
    x = torch.randn(rows, 40).to(dtype)
    packed = pack_weight(cpu_library, weight, WeightArena())
    clean_ids, _, _ = cpu_library.ops.linear_argmax(x, packed, 3000)
    x[0, 7] = bad
    ids, _, is_finite = cpu_library.ops.linear_argmax(x, packed, 3000)
    assert is_finite.tolist() == [False] + [True] * (rows - 1)
    assert torch.equal(ids[1:], clean_ids[1:])
    assert 0 <= int(ids[0]) < 3000


@DTYPES
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@SHAPES
def test_embeddings_are_rows_of_the_packed_weight(
    cpu_library: CpuLibrary, dtype: torch.dtype, id_dtype: torch.dtype, out_features: int, in_features: int
) -> None:
    weight = torch.randn(out_features, in_features).to(dtype)
    packed = pack_weight(cpu_library, weight, WeightArena())
    for count in (0, 1, 17):
        ids = torch.randint(0, out_features, (count,)).to(id_dtype)
        assert torch.equal(cpu_library.ops.packed_embedding(ids, packed, out_features, in_features), weight[ids.long()])


@DTYPES
def test_the_embedding_of_an_unknown_id_is_nan(cpu_library: CpuLibrary, dtype: torch.dtype) -> None:
    weight = torch.randn(33, 40).to(dtype)
    packed = pack_weight(cpu_library, weight, WeightArena())
    rows = cpu_library.ops.packed_embedding(torch.tensor([-1, 32, 33, 2**40]), packed, 33, 40)
    assert rows.isnan().all(dim=1).tolist() == [True, False, True, True]
    assert torch.equal(rows[1], weight[32])


def test_what_would_be_read_outside_of_its_tensor_is_refused(cpu_library: CpuLibrary) -> None:
    x, weight = torch.randn(40, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    packed = pack_weight(cpu_library, weight, WeightArena())
    ops = cpu_library.ops
    with pytest.raises(RuntimeError, match=r"expected a weight \[65, 64\] packed by linear_pack"):
        ops.linear(x, packed, None, 65)
    with pytest.raises(RuntimeError, match="packed by linear_pack"):
        ops.linear(torch.randn(40, 128).bfloat16(), packed, None, 64)
    with pytest.raises(RuntimeError, match="expected a weight of x's dtype"):
        ops.linear(x.float(), packed, None, 64)
    with pytest.raises(RuntimeError, match=r"expected a bias \[64\] of x's dtype"):
        ops.linear(x, packed, torch.zeros(63).bfloat16(), 64)


@DTYPES
@pytest.mark.parametrize("rows", [1, 20])
def test_a_recorded_product_reads_new_values(
    cpu_library: CpuLibrary, memory_pool: MemoryPool, dtype: torch.dtype, rows: int
) -> None:
    x, weight = torch.randn(rows, 70).to(dtype), torch.randn(50, 70).to(dtype)
    packed = pack_weight(cpu_library, weight, WeightArena())
    kernels = KernelList(memory_pool)
    with kernels.recording():
        out = cpu_library.ops.linear(x, packed, None, 50)
        greedy = cpu_library.ops.linear_argmax(x, packed, 50)
    x.copy_(torch.randn(rows, 70))
    kernels.replay()
    kernels.close()
    assert_close(out, x, weight)
    assert torch.equal(greedy[0], sums(cpu_library, x, weight).argmax(dim=1))
