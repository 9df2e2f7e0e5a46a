"""Which of a row's samples stand: drafts are accepted while each equals the sample at the position before it."""

from dataclasses import dataclass

import numpy as np

from modelworker.worker.arrays import BoolArray, IndexArray, Int32Array
from modelworker.worker.batch import StepBatch
from modelworker.worker.sampling.positions import SampledPositions


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Verdict:
    """What stands of the samples of a step.

    Attributes:
        counts: [num_sequences], how many of a row's samples stand, from its first on; 0 where that has failed or none was wanted.
        positions: [sum of counts], of the sampled positions those whose samples stand.
        failed: of the sampled positions those that are the first of their row and have failed.
    """

    counts: Int32Array
    positions: IndexArray
    failed: IndexArray


def verify(batch: StepBatch, positions: SampledPositions, token_ids: Int32Array, succeeded: BoolArray) -> Verdict:
    """Hot path: accepts drafts.

    A sample stands while every draft before it equals the sample of the position before that draft: then plain decoding would have
    come to it. A position that has failed ends its row's samples; plain decoding would come to it in a later step, and so does a
    router that goes on from the samples before it. Only if it is the row's first one, the row fails.

    Args:
        batch: the step.
        positions: all n sampled ones.
        token_ids: [n], the samples.
        succeeded: [n], whether there is a sample.
    """
    stands = succeeded.copy()
    if len(positions) > np.count_nonzero(batch.sample):
        drafted = np.flatnonzero(positions.offsets > 0)
        stands[drafted] &= batch.token_ids[positions.tokens[drafted]] == token_ids[drafted - 1]
        # Nothing stands behind a position that does not.
        fallen = np.cumsum(~stands)
        first = np.arange(len(positions)) - positions.offsets
        stands = fallen - np.where(first > 0, fallen[first - 1], 0) == 0
    standing = np.flatnonzero(stands)
    counts = np.bincount(positions.rows[standing], minlength=batch.num_sequences).astype(np.int32)
    return Verdict(counts=counts, positions=standing, failed=np.flatnonzero(~succeeded & (positions.offsets == 0)))
