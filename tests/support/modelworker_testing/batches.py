"""Checked steps, made directly."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from modelworker.worker.batch import StepBatch
from modelworker.worker.check_batch import CheckRow, make_check_batch


def make_batch(rows: Sequence[tuple[int, int, Sequence[int]]], *, vocab_size: int = 101, seed: int = 0) -> StepBatch:
    """Makes a greedy step of rows (query length, context length, block table) with random tokens; every row samples."""
    random = np.random.default_rng(seed)
    return make_check_batch(
        [
            CheckRow(
                token_ids=random.integers(1, vocab_size, query_len).astype(np.int32),
                context_len=context_len,
                blocks=np.array(table, np.int32),
            )
            for query_len, context_len, table in rows
        ]
    )


def with_drafts(batch: StepBatch) -> StepBatch:
    """Returns the step with all tokens of rows over context drafts, but for the first of each."""
    return replace(batch, draft_lens=np.where(batch.context_lens > 0, batch.query_lens - 1, 0).astype(np.int32))
