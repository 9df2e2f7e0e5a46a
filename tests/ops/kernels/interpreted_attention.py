"""paged_attention as a Triton kernel: shapes of models, divisions of steps, padding, and forms. Run by test_interpreted.py."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from modelworker.ops.attention_spec import attention_variant, paged_attention_reference
from modelworker.ops.kernels.geometry import ARCHITECTURES, AttentionGeometry, Tile, attention_geometry
from modelworker.ops.kernels.paged_attention import PagedAttentionLauncher, launch_attention_forms, prepare_paged_attention
from modelworker.ops.op_spec import SampleShape, Tolerance
from modelworker_testing.interpreted import interpreted_spec
from modelworker_testing.op_checks import run_and_check

NAN = float("nan")
SPEC = interpreted_spec("paged_attention")
# Weights and result are rounded to 11 bits.
SPEC = dataclasses.replace(SPEC, tolerances={**SPEC.tolerances, torch.float16: Tolerance(rtol=2.0**-10, atol=2.0**-9)})
SMALL = Tile(rows=16, tokens=16, num_warps=4, num_stages=1)


def slow(*values: Any) -> list[Any]:
    """Parameters of tests that are left out of `make test`."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow) for value in values]


@pytest.fixture(autouse=True)
def _memory_that_nobody_has_written_is_nan() -> Iterator[None]:
    """Of the room for partial results, nothing may be read but what this step has written."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


class Step(NamedTuple):
    """Arguments of attention."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    output: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    order: Tensor
    scale: float
    window: int
    soft_cap: float

    def run(self, *geometries: AttentionGeometry) -> Tensor:
        self.output.fill_(NAN)
        if geometries:
            launch_attention_forms(*self[:7], *self[8:], geometries)
        else:
            PagedAttentionLauncher().launch(*self)
        return self.output.clone()

    def expected(self) -> Tensor:
        return paged_attention_reference(*self)["output"]


def make_step(
    query_lens: Sequence[int], seq_lens: Sequence[int], *, num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 16,
    block_size: int = 4, dtype: torch.dtype = torch.float32, window: int = 0, soft_cap: float = 0.0, padded_tokens: int = 0,
    padded_sequences: int = 0, filler: float = NAN, block_seed: int = 0, extra_columns: int = 0,
) -> Step:  # fmt: skip
    """A step over random blocks. Slots that no sequence owns, and padded queries, hold the filler."""
    generator = torch.Generator().manual_seed(1)
    num_tokens = sum(query_lens)
    total = max(num_tokens, padded_tokens)
    needed = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(needed) + 3
    free = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(block_seed)) + 1).tolist()
    num_rows = max(len(seq_lens), padded_sequences)
    tables = torch.zeros(num_rows, max([*needed, 1]) + extra_columns, dtype=torch.int32)
    caches = [torch.full((num_blocks, num_kv_heads, block_size, head_dim), filler, dtype=dtype) for _ in range(2)]
    for sequence, (length, count) in enumerate(zip(seq_lens, needed, strict=True)):
        tables[sequence, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
        at = torch.arange(length)
        for cache in caches:
            values = torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype)
            cache[tables[sequence, at // block_size].long(), :, at % block_size] = values
    query = torch.full((total, num_heads + 2, head_dim), filler, dtype=dtype)
    query[:num_tokens, :num_heads] = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(dtype)
    starts = [0, *itertools.accumulate(query_lens)]
    return Step(
        query[:, :num_heads], *caches, torch.full((total, num_heads, head_dim), NAN, dtype=dtype),
        torch.tensor(starts + [num_tokens] * (num_rows - len(seq_lens)), dtype=torch.int32),
        torch.tensor([*seq_lens, *[0] * (num_rows - len(seq_lens))], dtype=torch.int32),
        tables, torch.empty(0), 0.25, window, soft_cap,
    )  # fmt: skip


def check(step: Step, *geometries: AttentionGeometry) -> None:
    tolerance = SPEC.tolerances[step.query.dtype]
    torch.testing.assert_close(step.run(*geometries).double(), step.expected(), rtol=tolerance.rtol, atol=tolerance.atol)


def form(step: Step, tile: Tile, num_splits: int) -> AttentionGeometry:
    """A form of the kernel that the shapes would not have chosen."""
    group = step.query.shape[1] // step.key_cache.shape[1]
    num_tokens, num_sequences = step.query.shape[0], step.seq_lens.shape[0]
    return AttentionGeometry.of_all(tile, group=group, num_tokens=num_tokens, num_sequences=num_sequences, num_splits=num_splits)


def model_shapes() -> list[Any]:
    """Each of the ratios, head sizes and block sizes beside some of the others; all of them with all are slow."""
    every = list(itertools.product((1, 3, 4, 8), (64, 80, 96, 128), (16, 32, 64)))
    quick = {(1, 64, 16), (3, 64, 32), (4, 128, 32), (8, 80, 64), (4, 96, 16)}
    return [pytest.param(*one, id="-".join(map(str, one)), marks=() if one in quick else pytest.mark.slow) for one in every]


@pytest.mark.parametrize(("group", "head_dim", "block_size"), model_shapes())
@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float16)])
def test_heads_of_models_attend_as_the_reference_does_in_decodes_and_mixed_steps(
    group: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    heads = {"num_heads": 2 * group, "num_kv_heads": 2, "block_size": block_size, "head_dim": head_dim}
    for rows, num_tokens, window in (("decode", 2, 0), ("mixed", 5, 50)):
        variant = attention_variant(rows, **heads, context_len=70, window=window)  # type: ignore[arg-type]
        run_and_check(
            SPEC, PagedAttentionLauncher().launch, SampleShape(num_tokens=num_tokens, dtype=dtype, padding=3, variant=variant)
        )


@pytest.mark.parametrize("query_len", [1, 2, *slow(4), *slow(5)])
def test_uniform_decodes_with_drafts_attend_in_every_padded_size(query_len: int) -> None:
    for padded in (3, 4):
        step = make_step([query_len] * 3, [query_len, 9, 30], padded_tokens=padded * query_len, padded_sequences=padded)
        check(step)
        assert step.run()[3 * query_len :].eq(0).all()


@pytest.mark.parametrize("seq_len", [1, 16, 17, *slow(3, 4, 5, 15, 63, 64, 65)])
def test_lengths_around_multiples_of_blocks_and_tiles_are_exact(seq_len: int) -> None:
    check(make_step([1, seq_len], [seq_len, seq_len], block_size=16))


@pytest.mark.parametrize("block_size", [8, 24, *slow(1, 2, 16, 32, 48)])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_tile_is_found_in_one_block_in_a_few_in_many_and_in_parts_of_blocks(block_size: int, num_splits: int) -> None:
    for window in (0, 20):
        step = make_step([1, 3], [17, 130], block_size=block_size, window=window, padded_tokens=5, padded_sequences=3)
        check(step, form(step, SMALL, num_splits))


def test_one_launcher_serves_steps_of_any_shapes_and_windows_in_any_order() -> None:
    launcher = PagedAttentionLauncher()
    wide, windowed, prompt = make_step([1, 1], [40, 9]), make_step([1, 1], [40, 9], window=7), make_step([9], [30])
    for step in (wide, windowed, wide, prompt, wide, windowed):
        step.output.fill_(NAN)
        launcher.launch(*step)
        torch.testing.assert_close(step.output.double(), step.expected(), rtol=1e-4, atol=1e-5)


def test_a_few_programs_do_the_work_of_many() -> None:
    step = make_step([1, 3, 1, 6], [1, 50, 130, 17], padded_tokens=13, padded_sequences=6)
    for num_splits in (1, 3):
        check(step, dataclasses.replace(form(step, SMALL, num_splits), num_programs=2))


@pytest.mark.parametrize(("prompt_splits", "decode_splits"), [(1, 3), *slow((2, 1), (2, 3), (1, 1))])
def test_prompts_and_decodes_of_a_step_are_served_by_launches_of_their_own(prompt_splits: int, decode_splits: int) -> None:
    """Sequences of 5 tokens and more by one, the others by another, whichever of them divides contexts."""
    step = make_step([1, 20, 0, 4, 1, 5], [90, 20, 0, 130, 1, 40], padded_tokens=37, padded_sequences=8)
    prompts, decodes = (form(step, SMALL, num_splits) for num_splits in (prompt_splits, decode_splits))
    short = {"longest": 4, "slots_per_sequence": 4, "num_slots": 4 * 9}
    check(step, dataclasses.replace(prompts, shortest=5), dataclasses.replace(decodes, **short))


def test_a_mixed_step_is_exact_in_the_launches_that_its_shapes_choose() -> None:
    step = make_step([1, 21, 1], [140, 21, 9], num_heads=8, block_size=16, dtype=torch.float16, window=60)
    check(step)


def test_a_sequence_is_attended_from_alike_beside_any_others_and_with_any_table() -> None:
    """Of what is not its own, only the shapes of the step count."""
    results = []
    for others, columns in (([1, 1, 1], 0), ([150, 9, 90], 0), ([7, 200, 1], 500)):
        step = make_step([1] * 4, [90, *others], block_size=16, dtype=torch.float16, extra_columns=columns)
        first = make_step([1], [90], block_size=16, dtype=torch.float16)
        for cache, own in zip((step.key_cache, step.value_cache), (first.key_cache, first.value_cache), strict=True):
            cache[step.block_tables[0, :6].long()] = own[first.block_tables[0, :6].long()]
        step.query[:1] = first.query
        results.append(step.run()[0])
    assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize(("num_splits", "window"), [(1, 5), (3, 0), *slow(*itertools.product((2, 3, 17, 64), (0, 5, 40)))])
def test_contexts_divided_among_programs_are_joined(num_splits: int, window: int) -> None:
    step = make_step([1, 3, 1, 1], [1, 50, 130, 17], window=window, padded_tokens=9, padded_sequences=6)
    check(step, form(step, SMALL, num_splits))


@pytest.mark.parametrize(("rows", "tokens"), [(16, 64), (128, 16), *slow(*itertools.product((16, 32, 64, 128), (16, 64)))])
def test_every_tile_computes_the_same_steps(rows: int, tokens: int) -> None:
    step = make_step([1, 40, 0, 7, 1], [90, 40, 0, 30, 1], num_heads=6, padded_tokens=56, padded_sequences=7)
    for num_splits in (1, 2):
        check(step, form(step, Tile(rows=rows, tokens=tokens, num_warps=4, num_stages=1), num_splits))


def test_a_prompt_longer_than_the_largest_tile_attends_causally() -> None:
    check(make_step([300], [370], num_heads=2, num_kv_heads=1, block_size=32, dtype=torch.float16))


@pytest.mark.slow
def test_more_sequences_than_are_searched_at_once_find_their_own() -> None:
    lengths = [1 + index % 3 for index in range(300)]
    step = make_step([1] * 300, lengths, num_heads=1, num_kv_heads=1, padded_tokens=304, padded_sequences=304)
    check(step, form(step, SMALL, 1))


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_sequence_without_tokens_in_the_cache_has_rows_of_zeros(num_splits: int) -> None:
    step = make_step([1, 1], [9, 4])
    step.seq_lens[1] = 0
    found = step.run(form(step, SMALL, num_splits))
    assert found.isfinite().all()
    assert found[1].eq(0).all()


def test_a_step_without_sequences_is_all_zeros() -> None:
    assert make_step([], [], padded_tokens=5).run().eq(0).all()


@pytest.mark.parametrize("num_splits", [1, 3])
def test_slots_that_the_step_does_not_own_change_nothing(num_splits: int) -> None:
    steps = [make_step([5, 1, 3], [5, 9, 5], filler=filler, padded_tokens=12) for filler in (NAN, 0.0, 1e30)]
    results = [step.run(form(step, SMALL, num_splits)) for step in steps]
    assert results[0].isfinite().all()
    assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize("cache", ["key_cache", "value_cache"])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_nan_in_a_slot_that_a_row_sees_makes_that_row_nan_in_every_form(num_splits: int, cache: str) -> None:
    """A fault of the cache must reach the check of the logits; a division of the context may not leave it out."""
    step = make_step([1, 1], [50, 40])
    expected = step.run(form(step, SMALL, num_splits))
    # The first of the tokens, which another program has than the last.
    getattr(step, cache)[step.block_tables[0, 0], :, 0] = NAN
    found = step.run(form(step, SMALL, num_splits))
    assert found[0].isnan().all()
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("query_len", [1, 3])
def test_slots_outside_the_window_change_nothing(query_len: int) -> None:
    step = make_step([query_len], [40 + query_len], window=3)
    expected = step.run()
    for block in step.block_tables[0, :9].tolist():
        step.key_cache[block] = NAN
        step.value_cache[block] = NAN
    assert torch.equal(step.run(), expected)


def test_results_do_not_depend_on_which_blocks_a_sequence_owns_or_on_wider_tables() -> None:
    steps = [make_step([5, 1, 3], [5, 9, 45], block_seed=seed, extra_columns=seed) for seed in range(3)]
    form_of_first = form(steps[0], SMALL, 2)
    results = [step.run(form_of_first) for step in steps]
    assert all(torch.equal(results[0], result) for result in results[1:])


def test_the_scores_are_capped() -> None:
    check(make_step([2, 1], [20, 33], soft_cap=2.0, dtype=torch.float16))


def test_preparing_all_forms_leaves_the_cache_as_it_is() -> None:
    step = make_step([1], [9])
    before = step.key_cache.clone()
    prepare_paged_attention(step.key_cache, step.value_cache, num_heads=4, scale=0.25, window=0, soft_cap=0.0)
    torch.testing.assert_close(step.key_cache, before, equal_nan=True, rtol=0, atol=0)


def test_the_chosen_geometry_has_blocks_for_every_division_of_the_tokens() -> None:
    """The bound on the number of blocks is exact in the worst case; here it is tried where it is tight."""
    for query_lens in ([1, 1, 1, 1, 12], [4, 4, 4, 4], [3, 5, 3, 5], [16], [0, 16, 0]):
        step = make_step(query_lens, [query + 2 if query else 0 for query in query_lens], num_heads=2, num_kv_heads=1)
        geometries = attention_geometry(
            ARCHITECTURES[90], num_tokens=16, num_sequences=len(query_lens), num_heads=2, num_kv_heads=1, head_dim=16,
            max_context=64, window=0, dtype=torch.float32,
        )  # fmt: skip
        check(step, *geometries)


def test_a_window_is_joined_in_the_form_that_its_shapes_choose() -> None:
    check(make_step([1], [300], num_heads=2, num_kv_heads=1, window=100, block_size=16, dtype=torch.float16))
