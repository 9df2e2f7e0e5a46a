"""Static buffers: what a graph finds there after a step was staged, whatever was there before."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelworker.worker.batch import StepBatch
from modelworker.worker.step_buffers import StepBuffers, StepInputs
from modelworker_testing.batches import make_batch

BLOCK_SIZE = 4
MAX_TOKENS, MAX_SEQUENCES, MAX_BLOCKS = 24, 6, 5
GARBAGE = 10**9

ROWS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, MAX_BLOCKS * BLOCK_SIZE - 4), st.integers(0, 2)), min_size=1, max_size=6
)
# One token in each row, with tables that are equally long more often than by chance.
DECODES = st.lists(st.tuples(st.just(1), st.sampled_from([0, 4, 5, 6, 7, 19]), st.integers(0, 1)), min_size=1, max_size=6)


def make_buffers() -> StepBuffers:
    return StepBuffers(max_tokens=MAX_TOKENS, max_sequences=MAX_SEQUENCES, max_blocks=MAX_BLOCKS, device=torch.device("cpu"))


def batch_of(rows: list[tuple[int, int, int]]) -> StepBatch:
    """Rows of (new tokens, context length, further blocks), every block id of its own."""
    tables, block = [], 1
    for query_len, context_len, further in rows:
        width = min(-(-(query_len + context_len) // BLOCK_SIZE) + further, MAX_BLOCKS)
        tables.append(list(range(block, block + width)))
        block += width
    return make_batch([(query_len, context_len, table) for (query_len, context_len, _), table in zip(rows, tables, strict=True)])


def expected_inputs(batch: StepBatch, num_tokens: int, num_sequences: int) -> StepInputs:
    """Written out row by row: what is not a token or a sequence of the step is harmless."""
    token_ids, positions, slots = [0] * num_tokens, [0] * num_tokens, [-1] * num_tokens
    starts, lens = [batch.num_tokens] * (num_sequences + 1), [0] * num_sequences
    tables = [[0] * MAX_BLOCKS for _ in range(num_sequences)]
    token = block = 0
    for row, (query_len, context_len, count) in enumerate(
        zip(batch.query_lens.tolist(), batch.context_lens.tolist(), batch.block_counts.tolist(), strict=True)
    ):
        starts[row], lens[row] = token, context_len + query_len
        table = batch.block_ids[block : block + count].tolist()
        tables[row][:count] = table
        block += count
        for position in range(context_len, context_len + query_len):
            token_ids[token], positions[token] = int(batch.token_ids[token]), position
            slots[token] = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            token += 1
    int32 = [torch.tensor(values, dtype=torch.int32) for values in (token_ids, positions, starts, lens)]
    return StepInputs(
        int32[0], int32[1], torch.tensor(slots), int32[2], int32[3], torch.tensor(tables, dtype=torch.int32).view(-1, MAX_BLOCKS)
    )


def assert_equal(actual: StepInputs, expected: StepInputs) -> None:
    for name, tensor in actual._asdict().items():
        assert torch.equal(tensor, getattr(expected, name)), name
        assert tensor.dtype == getattr(expected, name).dtype, name


@settings(max_examples=60)
@given(st.lists(st.tuples(ROWS | DECODES, st.integers(0, MAX_TOKENS), st.integers(0, MAX_SEQUENCES)), min_size=1, max_size=4))
def test_after_any_steps_the_buffers_hold_the_last_one_and_harmless_padding(
    steps: list[tuple[list[tuple[int, int, int]], int, int]],
) -> None:
    buffers = make_buffers()
    for rows, more_tokens, more_sequences in steps:
        batch = batch_of(rows)
        num_tokens = min(batch.num_tokens + more_tokens, MAX_TOKENS)
        num_sequences = min(batch.num_sequences + more_sequences, MAX_SEQUENCES)
        buffers.stage(batch, BLOCK_SIZE, num_tokens=num_tokens, num_sequences=num_sequences)
        assert_equal(buffers.inputs(num_tokens, num_sequences), expected_inputs(batch, num_tokens, num_sequences))


def test_buffers_full_of_garbage_are_harmless_once_a_step_is_staged() -> None:
    buffers = make_buffers()
    widest = batch_of([(1, 19, 0)])
    buffers.stage(widest, BLOCK_SIZE, num_tokens=1, num_sequences=1)
    for tensor in buffers.inputs(MAX_TOKENS, MAX_SEQUENCES):
        tensor.fill_(GARBAGE)
    batch = batch_of([(2, 3, 0), (1, 0, 0)])
    buffers.stage(batch, BLOCK_SIZE, num_tokens=8, num_sequences=4)
    assert_equal(buffers.inputs(8, 4), expected_inputs(batch, 8, 4))


def test_the_buffers_never_move() -> None:
    buffers = make_buffers()
    addresses = [tensor.data_ptr() for tensor in buffers.inputs(4, 2)]
    buffers.stage(batch_of([(3, 2, 1), (1, 7, 0)]), BLOCK_SIZE, num_tokens=8, num_sequences=4)
    buffers.stage_blank(num_tokens=8, num_sequences=4)
    assert [tensor.data_ptr() for tensor in buffers.inputs(MAX_TOKENS, MAX_SEQUENCES)] == addresses


@pytest.mark.parametrize(("num_tokens", "num_sequences"), [(1, 1), (6, 6), (12, 4), (16, 0), (24, 6)])
def test_a_blank_step_writes_to_no_slot_and_reads_only_the_null_block(num_tokens: int, num_sequences: int) -> None:
    buffers = make_buffers()
    for tensor in buffers.inputs(MAX_TOKENS, MAX_SEQUENCES):
        tensor.fill_(GARBAGE)
    buffers.stage_blank(num_tokens=num_tokens, num_sequences=num_sequences)
    inputs = buffers.inputs(num_tokens, num_sequences)
    assert inputs.slots.eq(-1).all()
    assert not any(tensor.any() for tensor in (inputs.token_ids, inputs.positions, inputs.block_tables))
    share = num_tokens // num_sequences if num_sequences else 0
    assert inputs.query_starts.tolist() == [row * share for row in range(num_sequences + 1)]
    assert inputs.seq_lens.tolist() == [share] * num_sequences
    assert np.array_equal(inputs.attention.slots.numpy(), inputs.slots.numpy())
