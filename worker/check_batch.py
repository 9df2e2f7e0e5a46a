"""Steps that start-up makes for itself."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from modelworker.worker.arrays import Int32Array
from modelworker.worker.batch import SamplingBatch, StepBatch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CheckRow:
    """A row of a step.

    Attributes:
        token_ids: [query length].
        context_len: of the row.
        blocks: [width], its block table.
        draft_len: how many of its last tokens are drafts.
    """

    token_ids: Int32Array
    context_len: int
    blocks: Int32Array
    draft_len: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckSampling:
    """How every row of a step samples; the default is greedy. All are seeded, and want the logprob of the chosen token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def make_check_batch(rows: Sequence[CheckRow], sampling: CheckSampling | None = None) -> StepBatch:
    """Makes an unsequenced step whose rows all sample.

    Args:
        rows: of the step.
        sampling: of every row; None: greedy, without logprobs.
    """
    return StepBatch(
        step_id=0,
        worker_epoch=0,
        router_id=0,
        client_tag=0,
        arrival_ns=time.monotonic_ns(),
        deadline_ns=None,
        digest=b"",
        traceparent="",
        sequence_ids=np.zeros(0, np.uint64),
        query_lens=np.array([len(row.token_ids) for row in rows], np.int32),
        context_lens=np.array([row.context_len for row in rows], np.int32),
        token_ids=_joined(row.token_ids for row in rows),
        draft_lens=np.array([row.draft_len for row in rows], np.int32),
        block_counts=np.array([len(row.blocks) for row in rows], np.int32),
        block_ids=_joined(row.blocks for row in rows),
        sample=np.ones(len(rows), np.bool_),
        sampling=None if sampling is None else _sampling(sampling, len(rows)),
        finished_sequence_ids=np.zeros(0, np.uint64),
        zero_block_ids=np.zeros(0, np.int32),
        copy_source_ids=np.zeros(0, np.int32),
        copy_destination_ids=np.zeros(0, np.int32),
    )


def _joined(parts: Iterable[Int32Array]) -> Int32Array:
    """Puts arrays one behind the other; none give an empty one."""
    return np.concatenate((np.zeros(0, np.int32), *parts))


def _sampling(sampling: CheckSampling, num_rows: int) -> SamplingBatch:
    def filled(value: float, dtype: type[np.generic]) -> npt.NDArray[Any]:
        return np.full(num_rows, value, dtype)

    return SamplingBatch(
        temperature=filled(sampling.temperature, np.float32),
        top_k=filled(sampling.top_k, np.int32),
        top_p=filled(sampling.top_p, np.float32),
        min_p=filled(sampling.min_p, np.float32),
        seed=filled(0, np.uint64),
        has_seed=filled(True, np.bool_),
        presence=filled(0, np.float32),
        frequency=filled(0, np.float32),
        repetition=filled(1, np.float32),
        num_logprobs=filled(0, np.int32),
        processed_logprobs=filled(False, np.bool_),
    )
