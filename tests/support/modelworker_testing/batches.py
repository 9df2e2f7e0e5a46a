"""Checked steps, made directly."""

import time
from collections.abc import Sequence

import numpy as np

from modelworker.worker.batch import StepBatch


def make_batch(rows: Sequence[tuple[int, int, Sequence[int]]], *, vocab_size: int = 101, seed: int = 0) -> StepBatch:
    """Makes a greedy step of rows (query length, context length, block table) with random tokens; every row samples."""
    query_lens = np.array([query_len for query_len, _, _ in rows], np.int32)
    return StepBatch(
        step_id=0,
        worker_epoch=0,
        router_id=0,
        client_tag=0,
        arrival_ns=time.monotonic_ns(),
        deadline_ns=None,
        digest=b"",
        traceparent="",
        query_lens=query_lens,
        context_lens=np.array([context_len for _, context_len, _ in rows], np.int32),
        token_ids=np.random.default_rng(seed).integers(1, vocab_size, int(query_lens.sum())).astype(np.int32),
        block_counts=np.array([len(table) for _, _, table in rows], np.int32),
        block_ids=np.array([block for _, _, table in rows for block in table], np.int32),
        sample=np.ones(len(rows), np.bool_),
        sampling=None,
    )
