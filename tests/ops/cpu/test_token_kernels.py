"""Rotary embedding, writing of the KV cache, silu_and_mul and embedding, of every ISA level."""

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from modelworker.ops.catalog import CATALOG
from modelworker.ops.cpu.library import CpuLibrary

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
ROWS = pytest.mark.parametrize("rows", [0, 1, 3, 17])
NAN = float("nan")
INFINITY = float("inf")
NUM_BLOCKS, BLOCK_SIZE = 12, 4


def allowed(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32: a few roundings of terms of a few units; bf16: one rounding more."""
    return 2e-6 + exact.abs() * (2**-8 if dtype == torch.bfloat16 else 2e-6)


def assert_close(result: Tensor, exact: Tensor) -> None:
    assert ((result.double() - exact).abs() <= allowed(exact, result.dtype)).all()


class Heads:
    """Queries, keys and values of one merged projection with NaN around them, slots of which some are -1, and caches of NaN."""

    def __init__(
        self,
        rows: int,
        heads: tuple[int, int],
        head_dim: int,
        rotary_dim: int,
        dtype: torch.dtype,
        positions: torch.dtype = torch.int32,
    ) -> None:
        num_heads, num_kv_heads = heads
        merged = torch.full((rows, num_heads + 2 * num_kv_heads + 1, head_dim), NAN, dtype=dtype)
        merged[:, :-1] = torch.randn(rows, num_heads + 2 * num_kv_heads, head_dim)
        self.merged = merged
        self.query, self.key, self.value, _ = merged.split((num_heads, num_kv_heads, num_kv_heads, 1), dim=1)
        self.positions = (torch.arange(rows) * 7 % 31).to(positions)
        angles = torch.randn(31, rotary_dim // 2) * 3
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:rows]
        self.slots[::5] = -1
        self.key_cache, self.value_cache = (
            torch.full((NUM_BLOCKS, num_kv_heads, BLOCK_SIZE, head_dim), NAN, dtype=dtype) for _ in range(2)
        )
        self.eps = 1e-5
        self.norms = [torch.rand(head_dim).to(dtype) + 0.5 for _ in range(2)]

    def rotated(self, heads: Tensor, *, interleaved: bool, norm: Tensor | None = None) -> Tensor:
        result = heads.double().clone()
        if norm is not None:
            result = result / (result.square().mean(-1, keepdim=True) + self.eps).sqrt() * norm.double()
        pairs = self.cos_sin.shape[1] // 2
        first = torch.arange(pairs) * (2 if interleaved else 1)
        second = first + (1 if interleaved else pairs)
        cos, sin = self.cos_sin.double()[self.positions.long()].unsqueeze(1).chunk(2, dim=-1)
        a, b = result[..., first], result[..., second]
        result[..., first], result[..., second] = a * cos - b * sin, b * cos + a * sin
        return result

    def check_caches(self, key: Tensor, value: Tensor) -> None:
        """The caches hold these rows in the slots of their tokens, and nothing else."""
        for cache, rows in ((self.key_cache, key), (self.value_cache, value)):
            expected = torch.full_like(cache, NAN)
            for row, slot in enumerate(self.slots.tolist()):
                if slot >= 0:
                    expected[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = rows[row]
            assert torch.equal(cache.nan_to_num(99), expected.nan_to_num(99))


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    rows=st.sampled_from([0, 1, 3, 17]),
    heads=st.sampled_from([(1, 1), (9, 3), (4, 4)]),
    head_dim=st.sampled_from([2, 16, 34, 64, 80, 128, 256]),
    rotated_part=st.sampled_from([1.0, 0.5]),
    interleaved=st.booleans(),
    with_norm=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    positions=st.sampled_from([torch.int32, torch.int64]),
)
def test_one_pass_normalises_rotates_and_stores(
    cpu_library: CpuLibrary,
    rows: int,
    heads: tuple[int, int],
    head_dim: int,
    rotated_part: float,
    interleaved: bool,
    with_norm: bool,
    dtype: torch.dtype,
    positions: torch.dtype,
) -> None:
    rotary_dim = max(2, int(head_dim * rotated_part) // 2 * 2)
    case = Heads(rows, heads, head_dim, rotary_dim, dtype, positions)
    norms = case.norms if with_norm else [None, None]
    query, key = (case.rotated(x, interleaved=interleaved, norm=n) for x, n in zip((case.query, case.key), norms, strict=True))
    value = case.value.clone()
    order = cpu_library.ops.rotary_store_kv(
        case.query, case.key, case.value, *norms, case.eps, case.positions, case.cos_sin, interleaved,
        case.key_cache, case.value_cache, case.slots,
    )  # fmt: skip
    assert order.shape == (0,)
    assert_close(case.query, query)
    assert_close(case.key, key)
    assert torch.equal(case.value, value)
    case.check_caches(case.key, value)
    assert case.merged[:, -1].isnan().all()


@DTYPES
@ROWS
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_alone_leaves_the_rest_of_a_head_bit_by_bit(
    cpu_library: CpuLibrary, dtype: torch.dtype, rows: int, interleaved: bool
) -> None:
    case = Heads(rows, (5, 1), 64, 22, dtype)
    before = case.merged.clone()
    query, key = (case.rotated(x, interleaved=interleaved) for x in (case.query, case.key))
    cpu_library.ops.rotary_embedding(case.query, case.key, case.positions, case.cos_sin, interleaved)
    assert_close(case.query, query)
    assert_close(case.key, key)
    assert torch.equal(case.merged[..., 22:].nan_to_num(9), before[..., 22:].nan_to_num(9))
    assert torch.equal(case.value, before[:, 6:7])


@DTYPES
@ROWS
def test_keys_and_values_are_stored_in_their_slots_alone(cpu_library: CpuLibrary, dtype: torch.dtype, rows: int) -> None:
    case = Heads(rows, (1, 3), 18, 18, dtype)
    case.merged[::5] = NAN
    order = cpu_library.ops.store_kv(case.key, case.value, case.key_cache, case.value_cache, case.slots)
    assert order.shape == (0,)
    case.check_caches(case.key, case.value)


@DTYPES
@ROWS
@pytest.mark.parametrize("size", [1, 30, 64, 129, 1536])
def test_silu_and_mul_is_that_of_fp64(cpu_library: CpuLibrary, dtype: torch.dtype, rows: int, size: int) -> None:
    wide = torch.full((rows, 2 * size + 3), NAN, dtype=dtype)
    wide[:, : 2 * size] = torch.randn(rows, 2 * size) * 5
    gate, up = wide[:, : 2 * size].double().chunk(2, dim=-1)
    assert_close(cpu_library.ops.silu_and_mul(wide[:, : 2 * size]), torch.nn.functional.silu(gate) * up)


@DTYPES
def test_silu_of_large_numbers_saturates_and_nan_stays(cpu_library: CpuLibrary, dtype: torch.dtype) -> None:
    # From where e^-x leaves the range of fp32 on, at both ends of a row: in whole vectors, and in what is left behind them.
    low = [-3e38, -1e37, -1e30, -200.0, -89.0, -88.7, -88.4, -88.37, -88.3, -88.0, -87.0]
    gate = torch.tensor([*low, 0.0, 87.0, 89.0, 200.0, 1e30, 1e37, 3e38, INFINITY, -INFINITY, NAN, *low]).to(dtype)
    ones = torch.ones(gate.numel(), dtype=dtype)
    result = cpu_library.ops.silu_and_mul(torch.cat((gate, ones)))
    exact = torch.where(gate.isinf() & (gate < 0), NAN, gate.double() / (1 + (-gate.double()).exp()))
    torch.testing.assert_close(result.double(), exact, rtol=2**-8 if dtype == torch.bfloat16 else 2e-6, atol=1e-35, equal_nan=True)
    # The native form is the contract, at infinity, too: a gate that has left the range is seen, not hidden.
    native = CATALOG["silu_and_mul"].native(torch.cat((gate, ones)))
    assert torch.equal(result.isnan(), native.isnan())
    assert torch.equal(result.isinf(), native.isinf())


@DTYPES
@ROWS
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_rows_of_an_embedding_are_copied(cpu_library: CpuLibrary, dtype: torch.dtype, rows: int, ids_dtype: torch.dtype) -> None:
    weight = torch.randn(40, 33).to(dtype)
    ids = torch.randint(40, (rows,), dtype=ids_dtype)
    assert torch.equal(cpu_library.ops.embedding(weight, ids), weight[ids.long()])


def test_an_id_outside_of_the_vocabulary_gives_nan(cpu_library: CpuLibrary) -> None:
    result = cpu_library.ops.embedding(torch.zeros(4, 3), torch.tensor([-1, 3, 4, 2**40]))
    assert result.isnan().all(dim=1).tolist() == [True, False, True, True]


def test_tensors_that_do_not_fit_are_refused(cpu_library: CpuLibrary) -> None:
    case = Heads(3, (4, 2), 32, 32, torch.bfloat16)
    ops = cpu_library.ops
    with pytest.raises(RuntimeError, match=r"expected slots \[3\], int64"):
        ops.store_kv(case.key, case.value, case.key_cache, case.value_cache, case.slots[:2])
    with pytest.raises(RuntimeError, match="expected keys and values of the cache's dtype"):
        ops.store_kv(case.key.float(), case.value.float(), case.key_cache, case.value_cache, case.slots)
    with pytest.raises(RuntimeError, match="expected a table"):
        ops.rotary_embedding(case.query, case.key, case.positions, torch.zeros(31, 64), False)
    with pytest.raises(RuntimeError, match=r"expected positions \[3\]"):
        ops.rotary_embedding(case.query, case.key, case.positions[:1], case.cos_sin, False)
    with pytest.raises(RuntimeError, match=r"expected rows gate \| up"):
        ops.silu_and_mul(torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match="expected rows that lie apart by one stride"):
        ops.silu_and_mul(case.query)
    with pytest.raises(RuntimeError, match="expected a norm weight"):
        ops.rotary_store_kv(
            case.query, case.key, case.value, torch.ones(3).bfloat16(), None, 0.0, case.positions, case.cos_sin, False,
            case.key_cache, case.value_cache, case.slots,
        )  # fmt: skip


X, WEIGHT = torch.zeros(2, 32), torch.zeros(32)


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (X, torch.zeros(31)),
        (X, torch.zeros(33)),
        (X, torch.zeros(1, 32)),
        (X, torch.zeros(64)[::2]),
        (X, WEIGHT.bfloat16()),
        (X.bfloat16(), WEIGHT),
        (X, WEIGHT.double()),
    ],
)
def test_a_norm_whose_weight_does_not_fit_is_refused(cpu_library: CpuLibrary, x: Tensor, weight: Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"expected a weight \[32\] of x's dtype"):
        cpu_library.ops.rms_norm(x, weight, 0.0)
    with pytest.raises(RuntimeError, match=r"expected a weight \[32\] of x's dtype"):
        cpu_library.ops.fused_add_rms_norm(x.clone(), x.clone(), weight, 0.0)


@pytest.mark.parametrize(
    "residual", [torch.zeros(1, 32), torch.zeros(3, 32), torch.zeros(2, 31), torch.zeros(64), torch.zeros(2, 32).bfloat16()]
)
def test_a_residual_that_does_not_fit_is_refused(cpu_library: CpuLibrary, residual: Tensor) -> None:
    with pytest.raises(RuntimeError, match="expected a residual of x's sizes and dtype"):
        cpu_library.ops.fused_add_rms_norm(X.clone(), residual, WEIGHT, 0.0)


@pytest.mark.parametrize("residual", [torch.zeros(2, 64)[:, ::2], torch.zeros(32, 2).t()])
def test_a_residual_of_rows_that_are_not_dense_is_refused(cpu_library: CpuLibrary, residual: Tensor) -> None:
    with pytest.raises(RuntimeError, match="expected dense rows"):
        cpu_library.ops.fused_add_rms_norm(X.clone(), residual, WEIGHT, 0.0)


def test_a_norm_takes_the_longest_row_that_it_has_room_for_and_no_longer_one(cpu_library: CpuLibrary) -> None:
    for size in (32767, 32768):
        x, weight = torch.randn(2, size), torch.rand(size)
        expected = torch.nn.functional.rms_norm(x, (size,), weight, 1e-5)
        torch.testing.assert_close(cpu_library.ops.rms_norm(x, weight, 1e-5), expected)
    x, weight = torch.zeros(2, 32769), torch.zeros(32769)
    with pytest.raises(RuntimeError, match="expected rows of at most 32768 elements"):
        cpu_library.ops.rms_norm(x, weight, 1e-5)
    with pytest.raises(RuntimeError, match="expected rows of at most 32768 elements"):
        cpu_library.ops.fused_add_rms_norm(x, x.clone(), weight, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32])
def test_elements_of_another_dtype_are_refused_by_every_kernel(cpu_library: CpuLibrary, dtype: torch.dtype) -> None:
    ops, x, heads = cpu_library.ops, torch.zeros(2, 32, dtype=dtype), torch.zeros(2, 1, 32, dtype=dtype)
    ids, slots = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    cache, cos_sin = torch.zeros(1, 1, 4, 32, dtype=dtype), torch.zeros(4, 32)
    packed = torch.zeros(1, 32, 32, 1, dtype=dtype)
    for run in (
        lambda: ops.silu_and_mul(x),
        lambda: ops.embedding(x, ids),
        lambda: ops.packed_embedding(ids, packed, 32, 32),
        lambda: ops.linear_pack(torch.zeros(32, 32, dtype=dtype), packed),
        lambda: ops.linear(x, packed, None, 32),
        lambda: ops.rms_norm(x, torch.zeros(32, dtype=dtype), 0.0),
        lambda: ops.fused_add_rms_norm(x, x.clone(), torch.zeros(32, dtype=dtype), 0.0),
        lambda: ops.rotary_embedding(heads, heads.clone(), ids, cos_sin, False),
        lambda: ops.store_kv(heads, heads.clone(), cache, cache.clone(), slots),
    ):
        with pytest.raises(RuntimeError, match="expected bfloat16 or float32"):
            run()


def test_operands_of_two_dtypes_or_of_sizes_that_do_not_fit_are_refused(cpu_library: CpuLibrary) -> None:
    case, ops = Heads(3, (4, 2), 32, 32, torch.bfloat16), cpu_library.ops
    for query, key, expected in (
        (case.query, case.key.float(), "expected queries and keys of one dtype"),
        (case.query, case.key[:2], "expected heads of 3 tokens and 32 elements"),
        (case.query, case.key[:, :, :16], "expected heads of 3 tokens and 32 elements"),
        (case.query, case.key.flatten(1), "expected heads"),
    ):
        with pytest.raises(RuntimeError, match=expected):
            ops.rotary_embedding(query, key, case.positions, case.cos_sin, False)
    for table in (case.cos_sin.double(), case.cos_sin.bfloat16(), case.cos_sin[0], case.cos_sin[:, ::2], torch.zeros(31, 31)):
        with pytest.raises(RuntimeError, match="expected a table"):
            ops.rotary_embedding(case.query, case.key, case.positions, table, False)
    weight = torch.zeros(4, 32)
    long = torch.zeros(4, dtype=torch.int64)
    for ids in (long.float(), long.short(), long[:, None], long[::2]):
        with pytest.raises(RuntimeError, match="expected ids"):
            ops.embedding(weight, ids)
    for table in (weight[0], weight[:, ::2], weight[None]):
        with pytest.raises(RuntimeError, match="expected a weight"):
            ops.embedding(table, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match=r"expected a weight \[out_features, in_features\]"):
        ops.linear_pack(torch.zeros(32, 32, 1), torch.zeros(1, 32, 32, 1))
