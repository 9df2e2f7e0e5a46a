"""store_kv and paged_attention against a dense loop over tokens, in fp64, without a cache."""

import itertools
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import modelworker.ops  # noqa: F401  (registers the ops)

OPS = torch.ops.modelworker
NAN = float("nan")


class Case:
    """A random mixed batch whose sequences own random blocks of a cache; every other slot holds `filler`."""

    def __init__(
        self, query_lens: list[int], context_lens: list[int], *, block_size: int = 4, num_heads: int = 4, num_kv_heads: int = 2,
        head_dim: int = 16, dtype: torch.dtype = torch.float32, filler: float = NAN, block_seed: int = 0, extra_columns: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        self.query_lens, self.seq_lens = query_lens, [q + c for q, c in zip(query_lens, context_lens, strict=True)]
        self.num_tokens = sum(query_lens)
        self.query = torch.randn(self.num_tokens, num_heads, head_dim, generator=generator).to(dtype)
        self.keys = [torch.randn(n, num_kv_heads, head_dim, generator=generator).to(dtype) for n in self.seq_lens]
        self.values = [torch.randn(n, num_kv_heads, head_dim, generator=generator).to(dtype) for n in self.seq_lens]
        needed = [-(-n // block_size) for n in self.seq_lens]
        num_blocks = sum(needed) + 4
        order = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(block_seed)) + 1).tolist()
        self.tables = [[order.pop() for _ in range(n)] for n in needed]
        width = max([*needed, 1]) + extra_columns
        self.block_tables = torch.tensor([t + [0] * (width - len(t)) for t in self.tables], dtype=torch.int32).view(-1, width)
        self.key_cache = torch.full((num_blocks, num_kv_heads, block_size, head_dim), filler, dtype=dtype)
        self.value_cache = self.key_cache.clone()
        self.block_size = block_size
        for sequence, (context, n) in enumerate(zip(context_lens, self.seq_lens, strict=True)):
            assert context < n
            for position in range(context):
                self.key_cache[self.place(sequence, position)] = self.keys[sequence][position]
                self.value_cache[self.place(sequence, position)] = self.values[sequence][position]

    def place(self, sequence: int, position: int) -> tuple[int, slice, int]:
        return self.tables[sequence][position // self.block_size], slice(None), position % self.block_size

    def new_tokens(self) -> list[tuple[int, int]]:
        return [(s, p) for s, n in enumerate(self.seq_lens) for p in range(n - self.query_lens[s], n)]

    def run(self, *, scale: float = 0.25, window: int = 0, soft_cap: float = 0.0, padding: int = 0) -> Tensor:
        slots = [self.tables[s][p // self.block_size] * self.block_size + p % self.block_size for s, p in self.new_tokens()]
        key = torch.stack([self.keys[s][p] for s, p in self.new_tokens()])
        value = torch.stack([self.values[s][p] for s, p in self.new_tokens()])

        def padded(tensor: Tensor, filler: float) -> Tensor:
            return torch.cat((tensor, torch.full((padding, *tensor.shape[1:]), filler, dtype=tensor.dtype)))

        starts = torch.tensor([0, *itertools.accumulate(self.query_lens)], dtype=torch.int32)
        order = OPS.store_kv(
            padded(key, NAN), padded(value, NAN), self.key_cache, self.value_cache, padded(torch.tensor(slots), -1)
        )
        output = torch.full((self.num_tokens + padding, *self.query.shape[1:]), NAN, dtype=self.query.dtype)
        OPS.paged_attention(
            padded(self.query, NAN), self.key_cache, self.value_cache, output, starts,
            torch.tensor(self.seq_lens, dtype=torch.int32), self.block_tables, order, scale, window, soft_cap,
        )  # fmt: skip
        assert output[self.num_tokens :].eq(0).all()
        return output[: self.num_tokens]

    def expected(self, *, scale: float = 0.25, window: int = 0, soft_cap: float = 0.0) -> Tensor:
        rows = []
        group = self.query.shape[1] // self.keys[0].shape[1]
        for row, (sequence, position) in enumerate(self.new_tokens()):
            first = max(0, position - window + 1) if window else 0
            heads = []
            for head in range(self.query.shape[1]):
                keys = self.keys[sequence][first : position + 1, head // group].double()
                values = self.values[sequence][first : position + 1, head // group].double()
                scores = keys @ self.query[row, head].double() * scale
                if soft_cap:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                weights = (scores - scores.max()).exp()
                heads.append(weights @ values / weights.sum())
            rows.append(torch.stack(heads))
        return torch.stack(rows)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    # bf16: the output is rounded once; fp32: sums over a few dozen terms.
    tolerance = 2.0**-8 if actual.dtype == torch.bfloat16 else 3e-6
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 4, 16]),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3), (8, 1)]),
    head_dim=st.sampled_from([16, 20]),
    window=st.sampled_from([0, 1, 3, 100]),
    soft_cap=st.sampled_from([0.0, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_mix_of_rows_attends_as_dense_attention_does(
    rows: list[tuple[int, int]],
    block_size: int,
    heads: tuple[int, int],
    head_dim: int,
    window: int,
    soft_cap: float,
    dtype: torch.dtype,
) -> None:
    case = Case(
        [q for q, _ in rows], [c for _, c in rows],
        block_size=block_size, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, dtype=dtype,
    )  # fmt: skip
    assert_close(case.run(window=window, soft_cap=soft_cap), case.expected(window=window, soft_cap=soft_cap))


@pytest.mark.parametrize("seq_len", range(1, 17))
def test_lengths_around_multiples_of_the_block_size_are_exact(seq_len: int) -> None:
    prefill = Case([seq_len], [0])
    assert_close(prefill.run(), prefill.expected())
    decode = Case([1], [seq_len - 1])
    assert_close(decode.run(), decode.expected())


def test_a_prompt_longer_than_a_query_tile_attends_causally() -> None:
    case = Case([600], [70], block_size=32)
    assert_close(case.run(), case.expected())


def test_nan_in_slots_that_the_batch_does_not_own_changes_nothing() -> None:
    results = [Case([5, 1, 3], [0, 8, 2], filler=filler).run() for filler in (NAN, 0.0, 1e30)]
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("query_len", [1, 3])
def test_nan_outside_the_window_changes_nothing(query_len: int) -> None:
    case = Case([query_len], [40])
    expected = case.run(window=3)
    for block in case.tables[0][:9]:
        case.key_cache[block] = NAN
        case.value_cache[block] = NAN
    assert torch.equal(case.run(window=3), expected)


@pytest.mark.parametrize("rows", [[(5000, 1)], [(5000, 300)], [(4999, 1), (20, 1), (5, 1)]])
def test_contexts_longer_than_a_key_tile_attend_as_dense_attention_does(rows: list[tuple[int, int]]) -> None:
    case = Case([query_len for _, query_len in rows], [context for context, _ in rows], block_size=32)
    assert_close(case.run(), case.expected())


def test_a_chunk_at_a_long_context_needs_little_working_memory() -> None:
    """Scores of all pairs would take 16 heads x 256 x 32,000 x 4 bytes = 500 MiB, and the softmax as much again."""
    program = """
import resource, torch, modelworker.ops
torch.set_num_threads(1)
heads, length, query_len = 16, 32_000, 256
cache = torch.zeros(length // 32 + 1, 1, 32, 16)
query = torch.zeros(query_len, heads, 16)
arguments = (torch.tensor([0, query_len], dtype=torch.int32), torch.tensor([length], dtype=torch.int32),
             torch.arange(1, length // 32 + 1, dtype=torch.int32).view(1, -1), torch.empty(0), 0.1, 0, 0.0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
torch.ops.modelworker.paged_attention(query, cache, cache, torch.empty_like(query), *arguments)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    grown = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    assert grown < 250 * 1024


def test_results_do_not_depend_on_which_blocks_a_sequence_owns() -> None:
    results = [Case([5, 1, 3], [0, 8, 2], block_seed=seed).run() for seed in range(4)]
    assert all(torch.equal(results[0], result) for result in results[1:])


def test_padded_rows_and_wider_tables_change_nothing() -> None:
    plain = Case([2, 1], [3, 6]).run()
    assert torch.equal(plain, Case([2, 1], [3, 6], extra_columns=3).run())
    assert torch.equal(plain, Case([2, 1], [3, 6]).run(padding=5))


def test_a_sequence_without_new_tokens_is_passed_over() -> None:
    case = Case([2, 1], [3, 6])
    starts = torch.tensor([0, 2, 3, 3], dtype=torch.int32)
    tables = torch.cat((case.block_tables, torch.zeros(1, case.block_tables.shape[1], dtype=torch.int32)))
    expected = case.run()
    output = torch.full_like(expected, NAN)
    OPS.paged_attention(
        case.query, case.key_cache, case.value_cache, output, starts, torch.tensor([5, 7, 0], dtype=torch.int32), tables,
        torch.empty(0), 0.25, 0, 0.0,
    )  # fmt: skip
    assert torch.equal(output, expected)


def test_no_sequences_at_all_is_fine() -> None:
    cache = torch.zeros(3, 2, 4, 16)
    order = OPS.store_kv(torch.empty(0, 2, 16), torch.empty(0, 2, 16), cache, cache.clone(), torch.empty(0, dtype=torch.int64))
    output = torch.full((2, 4, 16), NAN)
    OPS.paged_attention(
        torch.empty(2, 4, 16), cache, cache, output, torch.zeros(1, dtype=torch.int32), torch.empty(0, dtype=torch.int32),
        torch.empty(0, 1, dtype=torch.int32), order, 0.25, 0, 0.0,
    )  # fmt: skip
    assert output.eq(0).all()


@pytest.mark.parametrize("slots", [[4, -1, 9], [-1, -1, -1], [11, 4, 0]])
def test_store_kv_writes_the_named_slots_and_nothing_else(slots: list[int]) -> None:
    cache, values = torch.full((3, 2, 4, 16), 7.5), torch.full((3, 2, 4, 16), 8.5)
    key, value = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    OPS.store_kv(key, value, cache, values, torch.tensor(slots))
    for block, offset in itertools.product(range(3), range(4)):
        slot = block * 4 + offset
        expected = key[slots.index(slot)] if slot in slots else torch.full((2, 16), 7.5)
        assert torch.equal(cache[block, :, offset], expected)
        expected = value[slots.index(slot)] if slot in slots else torch.full((2, 16), 8.5)
        assert torch.equal(values[block, :, offset], expected)


def test_the_scale_is_the_callers() -> None:
    case = Case([3], [4])
    assert_close(case.run(scale=1 / math.sqrt(16)), case.expected(scale=1 / math.sqrt(16)))
