"""The attention kernels of every ISA level against dense attention in fp64."""

import itertools

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

import modelworker.ops  # noqa: F401  (registers the native ops)
from modelworker.ops.cpu.kernel_list import KernelList
from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.cpu.memory_pool import MemoryPool

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
NAN = float("nan")


class Batch:
    """Sequences in random blocks of a cache. NaN lies in slots of no token, in front of and behind queries, and in padded rows."""

    def __init__(
        self, query_lens: list[int], context_lens: list[int], *, heads: tuple[int, int] = (6, 2), head_dim: int = 32,
        block_size: int = 16, dtype: torch.dtype = torch.bfloat16, padding: int = 0, seed: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        self.query_lens, self.seq_lens = query_lens, [q + c for q, c in zip(query_lens, context_lens, strict=True)]
        self.num_tokens = sum(query_lens)
        wide = torch.full((self.num_tokens + padding, heads[0] + 2, head_dim), NAN, dtype=dtype)
        self.query = wide[:, 1:-1]
        self.query[: self.num_tokens] = torch.randn(self.num_tokens, heads[0], head_dim, generator=generator)
        needed = [-(-n // block_size) for n in self.seq_lens]
        order = (torch.randperm(sum(needed) + 3, generator=generator) + 1).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in needed]
        self.block_tables = torch.zeros(len(needed), max([1, *needed]) + 2, dtype=torch.int32)
        self.key_cache, self.value_cache = (
            torch.full((sum(needed) + 4, heads[1], block_size, head_dim), NAN, dtype=dtype) for _ in range(2)
        )
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for sequence, length in enumerate(self.seq_lens):
            self.block_tables[sequence, : needed[sequence]] = torch.tensor(self.tables[sequence], dtype=torch.int32)
            at = torch.arange(length)
            blocks, offsets = self.block_tables[sequence, at // block_size].long(), at % block_size
            for rows, cache in ((self.keys, self.key_cache), (self.values, self.value_cache)):
                rows.append(torch.randn(length, heads[1], head_dim, generator=generator).to(dtype))
                cache[blocks, :, offsets] = rows[-1]
        self.query_starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
        self.lengths = torch.tensor(self.seq_lens, dtype=torch.int32)
        self.output = torch.full(self.query.shape, NAN, dtype=dtype)

    def run(self, library: CpuLibrary, *, scale: float = 0.25, window: int = 0, soft_cap: float = 0.0) -> Tensor:
        library.ops.paged_attention(
            self.query, self.key_cache, self.value_cache, self.output, self.query_starts, self.lengths, self.block_tables,
            torch.empty(0), scale, window, soft_cap,
        )  # fmt: skip
        assert self.output[self.num_tokens :].eq(0).all()
        return self.output[: self.num_tokens].clone()

    def check(self, result: Tensor, *, scale: float = 0.25, window: int = 0, soft_cap: float = 0.0) -> None:
        """Holds a result against fp64.

        bf16: tiles multiply weights that are rounded to bf16, each by up to 2^-8 of itself, and divide by their sum; the result is
        rounded once more. fp32: scores of a few units are exact to a few 1e-7 and weights with them.
        """
        rounding = 2**-8 if result.dtype == torch.bfloat16 else 0.0
        group = self.query.shape[1] // self.key_cache.shape[1]
        for sequence, (start, query_len) in enumerate(zip(self.query_starts.tolist(), self.query_lens, strict=False)):
            keys, values = (
                rows[sequence].double().repeat_interleave(group, dim=1).transpose(0, 1) for rows in (self.keys, self.values)
            )
            at = torch.arange(self.seq_lens[sequence] - query_len, self.seq_lens[sequence]).unsqueeze(1)
            tokens = torch.arange(self.seq_lens[sequence]).unsqueeze(0)
            hidden = (tokens > at) | ((tokens <= at - window) if window else False)
            rows = slice(start, start + query_len)
            scores = self.query[rows].double().transpose(0, 1) @ keys.transpose(1, 2) * scale
            scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            exact, magnitude = ((weights @ v).transpose(0, 1) for v in (values, values.abs()))
            allowed = 1.01 * rounding * (2 * exact.abs() + magnitude) + 1e-5 * magnitude
            error = (result[rows].double() - exact).abs()
            assert (error <= allowed).all(), f"sequence {sequence}: {(error / allowed).max()} x what is allowed"


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 300)), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 5, 16, 32, 48]),
    heads=st.sampled_from([(1, 1), (4, 4), (9, 3), (8, 1), (16, 1), (14, 2)]),
    head_dim=st.sampled_from([2, 16, 18, 32, 64, 80, 96, 128, 254, 256]),
    window=st.sampled_from([0, 0, 1, 3, 100]),
    soft_cap=st.sampled_from([0.0, 0.0, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_mix_of_rows_attends_as_dense_attention_does(
    cpu_library: CpuLibrary,
    rows: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    head_dim: int,
    window: int,
    soft_cap: float,
    dtype: torch.dtype,
) -> None:
    batch = Batch(
        [q for q, _ in rows], [c for _, c in rows],
        heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype, padding=3,
    )  # fmt: skip
    scale = head_dim**-0.5
    result = batch.run(cpu_library, scale=scale, window=window, soft_cap=soft_cap)
    batch.check(result, scale=scale, window=window, soft_cap=soft_cap)


@DTYPES
@pytest.mark.parametrize("query_len", [1, 2, 5, 16, 17])
def test_contexts_that_are_divided_attend_as_a_whole(cpu_library: CpuLibrary, dtype: torch.dtype, query_len: int) -> None:
    batch = Batch([query_len] * 3, [63, 1000, 3000], head_dim=64, block_size=32, dtype=dtype)
    batch.check(batch.run(cpu_library))
    batch.check(batch.run(cpu_library, window=700), window=700)


@DTYPES
@pytest.mark.parametrize("count", [0, 1, 3, 17])
def test_decode_batches_of_every_size_leave_padded_rows_0(cpu_library: CpuLibrary, dtype: torch.dtype, count: int) -> None:
    batch = Batch([1] * count, [11 * i % 90 for i in range(count)], dtype=dtype, padding=5)
    batch.check(batch.run(cpu_library))


@DTYPES
def test_a_prompt_of_several_tiles_attends_causally(cpu_library: CpuLibrary, dtype: torch.dtype) -> None:
    batch = Batch([300], [70], head_dim=64, block_size=32, dtype=dtype)
    batch.check(batch.run(cpu_library))
    batch.check(batch.run(cpu_library, window=50), window=50)


@DTYPES
def test_a_negative_scale_is_one(cpu_library: CpuLibrary, dtype: torch.dtype) -> None:
    batch = Batch([1, 20], [200, 30], dtype=dtype)
    batch.check(batch.run(cpu_library, scale=-0.3), scale=-0.3)


@DTYPES
def test_scores_of_hundreds_neither_overflow_nor_vanish(cpu_library: CpuLibrary, dtype: torch.dtype) -> None:
    batch = Batch([1, 20], [600, 30], dtype=dtype)
    batch.query[: batch.num_tokens] = batch.query[: batch.num_tokens].sign() * 16
    result = batch.run(cpu_library, scale=8.0)
    assert result.isfinite().all()
    # The highest score is far above all others: the result is that token's value.
    position = (batch.keys[0][:, 0].double() @ batch.query[0, 0].double()).argmax()
    torch.testing.assert_close(result[0, 0], batch.values[0][position, 0])


@DTYPES
@pytest.mark.parametrize("query_len", [1, 3, 40])
@pytest.mark.parametrize("block_size", [4, 16])
def test_nan_in_blocks_before_the_window_changes_nothing(
    cpu_library: CpuLibrary, dtype: torch.dtype, query_len: int, block_size: int
) -> None:
    batch = Batch([query_len], [200], block_size=block_size, dtype=dtype)
    expected = batch.run(cpu_library, window=30)
    # Not a single token in front of the window: the block that the window begins in is poisoned up to it.
    at = torch.arange(200 - 30 + 1)
    blocks = batch.block_tables[0, at // block_size].long()
    batch.key_cache[blocks, :, at % block_size] = NAN
    batch.value_cache[blocks, :, at % block_size] = NAN
    assert torch.equal(batch.run(cpu_library, window=30), expected)
    assert expected.isfinite().all()


@DTYPES
def test_a_fault_stays_in_its_row_and_sequence(cpu_library: CpuLibrary, dtype: torch.dtype) -> None:
    batch = Batch([1, 20, 1], [500, 30, 40], dtype=dtype)
    clean = batch.run(cpu_library)
    batch.query[5, 2] = NAN
    batch.key_cache[batch.tables[2][0], 0, 3] = NAN
    result = batch.run(cpu_library)
    assert result[5, 2].isnan().all()
    assert result[21, :3].isnan().all()
    clean[5, 2] = result[5, 2] = clean[21, :3] = result[21, :3] = 0
    assert torch.equal(result, clean)


@DTYPES
def test_a_row_depends_neither_on_threads_nor_on_the_batch_nor_on_its_blocks(cpu_library: CpuLibrary, dtype: torch.dtype) -> None:
    query_lens, context_lens = [1, 70, 1, 4], [1500, 30, 9, 300]
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(Batch(query_lens, context_lens, dtype=dtype).run(cpu_library))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    batch = Batch(query_lens, context_lens, dtype=dtype)
    for sequence in range(4):
        alone = Batch([query_lens[sequence]], [context_lens[sequence]], dtype=dtype, seed=7)
        start = sum(query_lens[:sequence])
        rows = slice(start, start + query_lens[sequence])
        alone.query[:] = batch.query[rows]
        at = torch.arange(batch.seq_lens[sequence])
        to = alone.block_tables[0, at // 16].long(), slice(None), at % 16
        alone.key_cache[to], alone.value_cache[to] = batch.keys[sequence], batch.values[sequence]
        assert torch.equal(alone.run(cpu_library), results[0][rows])


@DTYPES
def test_a_recorded_list_reads_lengths_tables_and_values_when_it_is_replayed(
    cpu_library: CpuLibrary, memory_pool: MemoryPool, dtype: torch.dtype
) -> None:
    recorded = Batch([1, 1, 1, 1], [9, 700, 2, 40], dtype=dtype, padding=2)
    kernels = KernelList(memory_pool)
    static = (recorded.query, recorded.key_cache, recorded.value_cache, recorded.output)
    lists = (recorded.query_starts, recorded.lengths, recorded.block_tables)
    with kernels.recording():
        cpu_library.ops.paged_attention(*static, *lists, torch.empty(0), 0.25, 0, 0.0)
    assert len(kernels) == 2
    shapes = (([1, 1, 1, 1], [600, 3, 16, 0]), ([1, 1], [31, 32]), ([2, 2, 2], [500, 7, 90]), ([6], [500]), ([], []))
    for query_lens, context_lens in shapes:
        batch = Batch(query_lens, context_lens, dtype=dtype, padding=6 - sum(query_lens), seed=1)
        recorded.output.fill_(NAN)
        recorded.query.copy_(batch.query)
        num_blocks = batch.key_cache.shape[0]
        for to, source in zip(static[1:3], (batch.key_cache, batch.value_cache), strict=True):
            to.fill_(NAN)
            to[:num_blocks] = source
        recorded.query_starts.fill_(batch.num_tokens)
        recorded.query_starts[: len(query_lens) + 1] = batch.query_starts
        recorded.lengths.zero_()
        recorded.lengths[: len(query_lens)] = batch.lengths
        recorded.block_tables.zero_()
        recorded.block_tables[: len(query_lens), : batch.block_tables.shape[1]] = batch.block_tables
        kernels.replay()
        batch.check(recorded.output[: batch.num_tokens])
        assert recorded.output[batch.num_tokens :].eq(0).all()
        assert torch.equal(recorded.output[: batch.num_tokens], batch.run(cpu_library))
    kernels.close()


def test_a_token_of_a_sequence_of_length_0_becomes_0(cpu_library: CpuLibrary) -> None:
    batch = Batch([1, 1, 3], [20, 20, 20])
    batch.lengths[1] = 0
    batch.lengths[2] = 1
    result = batch.run(cpu_library)
    assert result[[1, 2, 3]].eq(0).all()
    assert result.isfinite().all()
    assert result[4].ne(0).any()


@DTYPES
def test_the_native_op_computes_the_same(cpu_library: CpuLibrary, dtype: torch.dtype) -> None:
    batch = Batch([1, 30, 3], [300, 50, 0], dtype=dtype)
    batch.check(batch.run(cpu_library, window=40, soft_cap=5.0), window=40, soft_cap=5.0)
    torch.ops.modelworker.paged_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.output, batch.query_starts, batch.lengths, batch.block_tables,
        torch.empty(0), 0.25, 40, 5.0,
    )  # fmt: skip
    batch.check(batch.output, window=40, soft_cap=5.0)


def test_nothing_but_the_output_is_written(cpu_library: CpuLibrary) -> None:
    batch = Batch([1, 30], [300, 50])
    tensors = (batch.query, batch.key_cache, batch.value_cache, batch.query_starts, batch.lengths, batch.block_tables)
    before = [tensor.clone() for tensor in tensors]
    batch.run(cpu_library)
    assert all(torch.equal(a.nan_to_num(9), b.nan_to_num(9)) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, "expected dense int32 sequence lengths"),
        ({"query": torch.zeros(2, 5, 32).bfloat16()}, "expected an output of the query's sizes"),
        ({"output": torch.zeros(2, 6, 32)}, "expected caches and output of the query's dtype"),
        ({"value_cache": torch.zeros(9, 2, 16, 64).bfloat16()}, "expected a value cache of the key cache's sizes"),
        ({"query_starts": torch.zeros(2, dtype=torch.int32)}, "of as many sequences"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_tensors_that_do_not_fit_are_refused(cpu_library: CpuLibrary, change: dict[str, Tensor], message: str) -> None:
    batch = Batch([1, 1], [30, 20])
    arguments = {
        "query": batch.query, "key_cache": batch.key_cache, "value_cache": batch.value_cache, "output": batch.output,
        "query_starts": batch.query_starts, "lengths": batch.lengths, "block_tables": batch.block_tables,
        "order": torch.empty(0), "scale": 1.0, "window": 0, "soft_cap": 0.0,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=message):
        cpu_library.ops.paged_attention(*{**arguments, **change}.values())
