"""Checks of what a step says about token feedback."""

import numpy as np

from modelworker.worker.batch import FEEDBACK_TOKEN, BoolArray
from modelworker.worker.description import WorkerDescription
from modelworker.worker.ragged import starts_of
from modelworker.worker.wire.checks import StepFields, place_of
from modelworker.worker.wire.violations import Violations, check_optional_length


def check_sequence_ids(fields: StepFields, description: WorkerDescription, violations: Violations) -> None:
    """`sequence_ids` is empty or has one entry per row, none of them twice."""
    ids = fields.sequence_ids
    if not check_optional_length("sequence_ids", ids, fields.num_sequences, violations):
        return
    if len(np.unique(ids)) == len(ids):
        return
    _, inverse, counts = np.unique(ids, return_inverse=True, return_counts=True)
    seen: dict[int, int] = {}
    for row in np.flatnonzero(counts[inverse] > 1).tolist():
        first = seen.setdefault(int(ids[row]), row)
        if first != row:
            violations.add(f"sequence_ids[{row}]", f"found {ids[row]}, which is that of row {first} as well, expected once")
        if violations.is_full:
            return


def check_feedback_tokens(fields: StepFields, description: WorkerDescription, violations: Violations) -> None:
    """-1 stands where it can stand for a token: what is kept of the sequence is looked at when the step is executed."""
    tokens = fields.token_ids
    if not np.count_nonzero(tokens == FEEDBACK_TOKEN) or "query_lens" in violations or "token_ids" in violations:
        return
    indices = np.flatnonzero(tokens == FEEDBACK_TOKEN)
    starts = starts_of(fields.query_lens)
    rows = np.searchsorted(starts, indices, side="right") - 1
    has_identity = len(fields.sequence_ids) > 0
    draft_lens = fields.draft_lens if len(fields.draft_lens) == fields.num_sequences else np.zeros(fields.num_sequences, np.int32)
    is_first = indices == starts[rows]
    is_decode = fields.query_lens[rows] == 1 + draft_lens[rows]
    is_masked = _masked_rows(fields)[rows]
    good = is_first & is_decode & ~is_masked
    if has_identity and fields.request.step_id and good.all():
        return

    def describe(index: int) -> str:
        at = int(np.searchsorted(indices, index))
        if not fields.request.step_id:
            reason = "step_id is 0: an unsequenced step has no feedback"
        elif not has_identity:
            reason = "sequence_ids is empty: nobody knows whose token it is"
        elif not is_first[at]:
            reason = "it can only be the first token of a row"
        elif not is_decode[at]:
            row = rows[at]
            reason = f"query_len is {fields.query_lens[row]}, expected 1 + draft_len = {1 + draft_lens[row]}"
        else:
            reason = "the row has a grammar mask, which can't be known before the token is"
        return f"{place_of(starts, index, 'token')}found -1 (feedback): {reason}"

    bad = indices if not (has_identity and fields.request.step_id) else indices[~good]
    violations.add_entries("token_ids", bad, describe)


def _masked_rows(fields: StepFields) -> BoolArray:
    masked = np.zeros(fields.num_sequences, np.bool_)
    if fields.request.HasField("grammar"):
        rows = np.array(fields.request.grammar.rows, np.int64)
        masked[rows[(rows >= 0) & (rows < fields.num_sequences)]] = True
    return masked
