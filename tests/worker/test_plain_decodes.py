"""The usual small step is seen to be right at a glance, and no step that is wrong is."""

import itertools
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import event, given, settings

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.wire.checks import CHECKS, StepFields
from modelworker.worker.wire.plain import MAX_BLOCKS, MAX_ROWS, is_plain_decode
from modelworker.worker.wire.violations import Violations
from modelworker_testing.descriptions import describe_worker
from modelworker_testing.steps import step_request

WORKER = describe_worker(max_model_len=11, block_size=4, num_blocks=8, vocab_size=5, max_sequences=6, max_tokens_per_step=4)
ARRAYS = ("query_lens", "context_lens", "token_ids", "block_counts", "block_ids")

Change = Callable[[pb.ExecuteStepRequest], None]


def is_plain(request: pb.ExecuteStepRequest) -> bool:
    return is_plain_decode(StepFields.of(request), WORKER)


def is_right(request: pb.ExecuteStepRequest) -> bool:
    violations, fields = Violations(), StepFields.of(request)
    for check in CHECKS:
        check(fields, WORKER, violations)
    return violations.is_empty


def writes_blocks_of_its_own(request: pb.ExecuteStepRequest) -> bool:
    """Whether each row of a right step writes to another block; different slots of one block would be right as well."""
    starts = itertools.accumulate(request.block_counts, initial=0)
    written = [
        request.block_ids[start + context_len // 4] for start, context_len in zip(starts, request.context_lens, strict=False)
    ]
    return len(set(written)) == len(written)


@st.composite
def decodes(draw: st.DrawFn) -> pb.ExecuteStepRequest:
    """Decodes of one token a row; what is near to a limit is as likely as what is over it."""
    rows = []
    for _ in range(draw(st.integers(0, 5))):
        context = draw(st.integers(0, 11))
        table = draw(st.lists(st.integers(1, 7), min_size=max(context // 4, 1), max_size=min(context // 4 + 2, 4), unique=True))
        rows.append((context, draw(st.sampled_from([1, 1, 1, 1, 2])), table))
    request = step_request(*rows)
    request.token_ids[:] = draw(st.lists(st.integers(-1, 4), min_size=len(request.token_ids), max_size=len(request.token_ids)))
    if draw(st.booleans()):
        name = draw(st.sampled_from(ARRAYS))
        values = getattr(request, name)
        change = draw(st.sampled_from(["set", "remove", "append"] if values else ["append"]))
        at = draw(st.integers(0, max(len(values) - 1, 0)))
        if change == "set":
            values[at] = draw(st.sampled_from([-(2**31), -2, -1, 0, 1, 2, 3, 4, 5, 7, 8, 11, 12, 2**31 - 1]))
        elif change == "remove":
            del values[at]
        else:
            values.append(1)
    return request


@settings(max_examples=1500)
@given(decodes())
def test_a_step_is_plain_exactly_when_it_is_a_right_decode_whose_rows_share_no_written_block(
    request: pb.ExecuteStepRequest,
) -> None:
    is_decode = len(request.query_lens) > 0 and all(query_len == 1 for query_len in request.query_lens)
    is_expected = is_right(request) and is_decode and writes_blocks_of_its_own(request)
    event(f"plain: {is_expected}")
    assert is_plain(request) == is_expected


def make_sequenced(request: pb.ExecuteStepRequest, *, epoch: int, router: int) -> None:
    request.step_id, request.worker_epoch, request.router_id = 1, epoch, router


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda request: request.sample.append(True), id="sample"),
        pytest.param(lambda request: request.draft_lens.append(0), id="drafts"),
        pytest.param(lambda request: make_sequenced(request, epoch=0, router=1), id="no epoch"),
        pytest.param(lambda request: make_sequenced(request, epoch=1, router=0), id="no router"),
        pytest.param(lambda request: request.block_ids.extend([3] * MAX_BLOCKS), id="many blocks"),
    ],
)
def test_a_step_of_another_kind_is_left_to_the_checks(change: Change) -> None:
    request = step_request((3, 1, [1]))
    make_sequenced(request, epoch=1, router=1)
    assert is_plain(request)
    change(request)
    assert not is_plain(request)


def test_a_step_of_many_rows_is_left_to_the_checks() -> None:
    worker = describe_worker(num_blocks=100, max_sequences=64, max_tokens_per_step=64)

    def fields_of(num_rows: int) -> StepFields:
        return StepFields.of(step_request(*((0, 1, [row + 1]) for row in range(num_rows))))

    assert is_plain_decode(fields_of(MAX_ROWS), worker)
    assert not is_plain_decode(fields_of(MAX_ROWS + 1), worker)
