"""What a step says about token feedback and about blocks to zero and copy: what is refused, and how that is said."""

from typing import Any

import pytest

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.batch import StepBatch
from modelworker.worker.errors import InvalidStepError
from modelworker.worker.wire import parse_step
from modelworker_testing.descriptions import NUM_BLOCKS, describe_worker
from modelworker_testing.steps import step_request

WORKER = describe_worker()
SEQUENCED = {"worker_epoch": 1, "router_id": 2, "step_id": 3}
LAST_BLOCK = NUM_BLOCKS - 1


def parse(request: pb.ExecuteStepRequest) -> StepBatch:
    return parse_step(request, WORKER, arrival_ns=0, deadline_ns=None)


def violations_of(request: pb.ExecuteStepRequest) -> dict[str, str]:
    with pytest.raises(InvalidStepError) as caught:
        parse(request)
    return {violation.field: violation.description for violation in caught.value.violations}


def feedback_step(*query_lens: int, minus_ones: list[int], **fields: Any) -> pb.ExecuteStepRequest:
    """A sequenced step of rows at position 3, with -1 at some indices."""
    rows = [(3, query_len, [2 * row + 1, 2 * row + 2]) for row, query_len in enumerate(query_lens)]
    request = step_request(*rows, **(SEQUENCED | {"sequence_ids": range(10, 10 + len(rows))} | fields))
    for index in minus_ones:
        request.token_ids[index] = -1
    return request


def copies(*pairs: tuple[int, int]) -> pb.BlockCopies:
    return pb.BlockCopies(source_ids=[pair[0] for pair in pairs], destination_ids=[pair[1] for pair in pairs])


# -- feedback --


def test_identities_finished_sequences_and_minus_one_reach_the_batch() -> None:
    batch = parse(feedback_step(1, 2, 1, minus_ones=[0, 3], finished_sequence_ids=[2**64 - 1, 5, 5]))
    assert batch.sequence_ids.tolist() == [10, 11, 12]
    assert batch.finished_sequence_ids.tolist() == [2**64 - 1, 5, 5]
    assert batch.token_ids.tolist() == [-1, 2, 3, -1]
    assert batch.draft_lens.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"step_id": 0}, "step_id is 0: an unsequenced step has no feedback"),
        ({"sequence_ids": []}, "sequence_ids is empty: nobody knows whose token it is"),
    ],
)
def test_minus_one_needs_a_sequenced_step_with_identities(changes: dict[str, Any], reason: str) -> None:
    violations = violations_of(feedback_step(1, 1, minus_ones=[0, 1], **changes))
    assert violations == {f"token_ids[{row}]": f"row {row}, token 0 of the row: found -1 (feedback): {reason}" for row in range(2)}


def test_minus_one_can_only_be_the_first_token_of_its_row() -> None:
    violations = violations_of(feedback_step(1, 3, minus_ones=[0, 2]))
    assert violations == {"token_ids[2]": "row 1, token 1 of the row: found -1 (feedback): it can only be the first token of a row"}


def test_minus_one_is_refused_in_a_row_that_is_no_decode() -> None:
    violations = violations_of(feedback_step(1, 3, minus_ones=[0, 1]))
    assert violations == {
        "token_ids[1]": "row 1, token 0 of the row: found -1 (feedback): query_len is 3, expected 1 + draft_len = 1"
    }


def test_minus_one_is_refused_beside_a_grammar_mask() -> None:
    request = feedback_step(1, 1, minus_ones=[0, 1])
    request.grammar.rows.extend([1, 7, -3])
    violations = violations_of(request)
    assert violations["token_ids[1]"].endswith("the row has a grammar mask, which can't be known before the token is")
    assert "token_ids[0]" not in violations


def test_every_minus_one_that_can_not_be_is_named_up_to_the_limit() -> None:
    assert len(violations_of(feedback_step(10, 10, minus_ones=list(range(20))))) == 16


def test_an_identity_that_comes_twice_is_refused_naming_both_rows() -> None:
    request = feedback_step(1, 1, 1, 1, minus_ones=[], sequence_ids=[5, 2**64 - 1, 5, 2**64 - 1])
    assert violations_of(request) == {
        "sequence_ids[2]": "found 5, which is that of row 0 as well, expected once",
        "sequence_ids[3]": f"found {2**64 - 1}, which is that of row 1 as well, expected once",
    }


def test_there_are_as_many_identities_as_rows_or_none() -> None:
    message = "found 1 entries, expected 2, one per entry of query_lens, or none"
    assert violations_of(feedback_step(1, 1, minus_ones=[], sequence_ids=[5])) == {"sequence_ids": message}


def test_a_step_finishes_at_most_as_many_sequences_as_are_kept() -> None:
    most = WORKER.limits.max_feedback_sequences
    assert len(parse(feedback_step(1, minus_ones=[], finished_sequence_ids=[1] * most)).finished_sequence_ids) == most
    violations = violations_of(feedback_step(1, minus_ones=[], finished_sequence_ids=[1] * (most + 1)))
    assert violations == {"finished_sequence_ids": "found 14 sequences, expected at most 13: all whose tokens are kept"}


# -- blocks to zero and copy --


def test_blocks_to_zero_and_copies_reach_the_batch() -> None:
    batch = parse(step_request((0, 1, [1]), zero_block_ids=[4, LAST_BLOCK, 4], block_copies=copies((3, 4), (3, 5), (6, 6))))
    assert batch.zero_block_ids.tolist() == [4, LAST_BLOCK, 4]
    assert batch.copy_source_ids.tolist() == [3, 3, 6]
    assert batch.copy_destination_ids.tolist() == [4, 5, 6]


@pytest.mark.parametrize("block", [0, -1, NUM_BLOCKS, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("field", ["zero_block_ids", "block_copies.source_ids", "block_copies.destination_ids"])
def test_a_block_that_is_not_there_or_the_null_block_is_refused_by_its_place(field: str, block: int) -> None:
    request = step_request((0, 1, [1]), zero_block_ids=[2, 3], block_copies=copies((4, 5), (6, 7)))
    values = request.zero_block_ids if field == "zero_block_ids" else getattr(request.block_copies, field.partition(".")[2])
    values[1] = block
    null = " (block 0 is the null block)" if block == 0 else ""
    assert violations_of(request) == {f"{field}[1]": f"found {block}, expected 1 .. {LAST_BLOCK}{null}"}


def test_every_copy_has_a_source_and_a_destination() -> None:
    request = step_request((0, 1, [1]), block_copies=pb.BlockCopies(source_ids=[2, 3], destination_ids=[4]))
    assert violations_of(request) == {
        "block_copies.destination_ids": "found 1 entries, expected 2, one per entry of block_copies.source_ids"
    }


def test_a_destination_that_comes_twice_is_refused_naming_both_copies() -> None:
    request = step_request((0, 1, [1]), block_copies=copies((2, 9), (3, 8), (4, 9), (2, 9), (2, 8)))
    assert violations_of(request) == {
        "block_copies.destination_ids[2]": "found block 9, the destination of copy 0 as well, expected once",
        "block_copies.destination_ids[3]": "found block 9, the destination of copy 0 as well, expected once",
        "block_copies.destination_ids[4]": "found block 8, the destination of copy 1 as well, expected once",
    }


def test_a_block_that_is_context_of_a_row_can_not_be_zeroed() -> None:
    request = step_request((0, 2, [9]), (5, 2, [3, 4, 8]), zero_block_ids=[7, 4, 3])
    assert violations_of(request) == {
        f"zero_block_ids[{index}]": f"found block {block}, which is context of row 1 (block_ids[{entry}]), expected no context, "
        f"or a copy into it"
        for index, block, entry in ((2, 3, 1), (1, 4, 2))
    }


@pytest.mark.parametrize(
    ("context_len", "block"), [(0, 3), (4, 4), (3, 4), (8, 8)], ids=["prompt", "new block", "unused block", "third block"]
)
def test_blocks_that_a_row_only_writes_or_does_not_use_can_be_zeroed(context_len: int, block: int) -> None:
    parse(step_request((context_len, 1, [3, 4, 8]), zero_block_ids=[block]))


def test_a_zeroed_block_may_be_context_when_something_is_copied_into_it() -> None:
    parse(step_request((5, 1, [3, 4]), zero_block_ids=[4], block_copies=copies((9, 4))))
    assert "zero_block_ids[0]" in violations_of(step_request((5, 1, [3, 4]), zero_block_ids=[4], block_copies=copies((4, 9))))


def test_a_copy_may_go_to_any_block_of_a_row() -> None:
    for destination in (3, 4, 8):
        parse(step_request((5, 1, [3, 4, 8]), block_copies=copies((9, destination))))


def test_at_most_all_blocks_are_zeroed_or_copied() -> None:
    request = step_request((0, 1, [1]), zero_block_ids=[2] * NUM_BLOCKS, block_copies=copies(*[(2, 3)] * NUM_BLOCKS))
    message = f"found {NUM_BLOCKS} blocks, expected at most num_blocks - 1 = {LAST_BLOCK}"
    assert violations_of(request) == {
        "zero_block_ids": message,
        "block_copies.source_ids": message,
        "block_copies.destination_ids": message,
    }
