"""The derived properties of a step, against loops over rows and tokens."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.batch import StepBatch
from modelworker.worker.wire import parse_step
from modelworker_testing.descriptions import BLOCK_SIZE, describe_worker
from modelworker_testing.step_rules import tables_of, token_places
from modelworker_testing.steps import step_request, valid_requests


def parse(request: pb.ExecuteStepRequest, block_size: int = BLOCK_SIZE) -> StepBatch:
    return parse_step(request, describe_worker(block_size=block_size), arrival_ns=0, deadline_ns=None)


@given(valid_requests())
def test_rows_positions_and_slots_are_those_of_a_loop_over_tokens(request: pb.ExecuteStepRequest) -> None:
    batch = parse(request)
    places = token_places(request)
    assert batch.rows.tolist() == [row for row, _, _ in places]
    assert batch.positions.tolist() == [position for _, position, _ in places]
    assert batch.slots(BLOCK_SIZE).tolist() == [slot for _, _, slot in places]


@given(valid_requests())
def test_lengths_and_starts_are_those_of_a_loop_over_rows(request: pb.ExecuteStepRequest) -> None:
    batch = parse(request)
    starts = [0]
    for query in request.query_lens:
        starts.append(starts[-1] + query)
    assert batch.query_starts.tolist() == starts
    assert batch.num_sequences == len(request.query_lens)
    assert batch.num_tokens == starts[-1]
    assert batch.seq_lens.tolist() == [c + q for c, q in zip(request.context_lens, request.query_lens, strict=True)]


@given(valid_requests())
def test_block_tables_are_the_rows_tables_followed_by_null_blocks(request: pb.ExecuteStepRequest) -> None:
    batch = parse(request)
    tables = tables_of(request)
    width = max((len(table) for table in tables), default=1)
    assert batch.block_tables.shape == (len(tables), width)
    assert batch.block_tables.tolist() == [table + [0] * (width - len(table)) for table in tables]


@given(valid_requests())
def test_derived_arrays_have_the_types_that_the_engine_stages(request: pb.ExecuteStepRequest) -> None:
    batch = parse(request)
    for array in (batch.seq_lens, batch.query_starts, batch.rows, batch.positions, batch.block_tables):
        assert array.dtype == np.int32
    assert batch.slots(BLOCK_SIZE).dtype == np.int64
    for array in (batch.query_lens, batch.context_lens, batch.token_ids, batch.block_counts, batch.block_ids):
        assert array.dtype == np.int32
        assert array.flags.owndata


@pytest.mark.parametrize("seq_len", range(1, 17))
@given(order=st.permutations(range(1, 32)), data=st.data())
def test_slots_are_right_at_every_length_around_the_block_size(seq_len: int, order: list[int], data: st.DataObject) -> None:
    table = order[:4]
    context = data.draw(st.integers(0, seq_len - 1))
    batch = parse(step_request((context, seq_len - context, table)))
    assert batch.slots(4).tolist() == [table[position // 4] * 4 + position % 4 for position in range(context, seq_len)]


@pytest.mark.parametrize("block_size", [1, 2, 3, 5, 16, 32])
def test_slots_follow_the_block_size(block_size: int) -> None:
    needed = -(-9 // block_size)
    request = step_request((3, 6, list(range(20, 20 + needed))))
    slots = parse(request, block_size).slots(block_size)
    assert slots.tolist() == [(20 + position // block_size) * block_size + position % block_size for position in range(3, 9)]


def test_slots_of_a_cache_with_more_than_two_to_the_31_slots_do_not_overflow() -> None:
    worker = describe_worker(block_size=1024, num_blocks=2**31 - 1)
    batch = parse_step(step_request((0, 1, [2**31 - 2])), worker, arrival_ns=0, deadline_ns=None)
    assert batch.slots(1024).tolist() == [(2**31 - 2) * 1024]


def test_a_step_without_rows_has_empty_arrays_and_a_table_of_width_one() -> None:
    batch = parse(step_request())
    assert batch.num_sequences == batch.num_tokens == 0
    assert batch.query_starts.tolist() == [0]
    assert batch.block_tables.shape == (0, 1)
    for array in (batch.rows, batch.positions, batch.seq_lens, batch.slots(BLOCK_SIZE), batch.sample):
        assert array.shape == (0,)
