"""How far filters reach, where the last kept token hangs on the last bit."""

import math

import numpy as np
import pytest
import torch

from modelworker.worker.sampling.filters import Filters, draw


@pytest.mark.parametrize("vocab_size", [300, 700, 1100, 3001, 4999])
def test_top_p_takes_its_share_of_an_exact_sum_however_many_tokens_are_looked_at(vocab_size: int) -> None:
    # All weights are 1, so that every sum is exact, and each limit stands beside one.
    top_p = (np.arange(1, 256) / vocab_size).astype(np.float32)
    wide = np.float32(1) - top_p
    for shares in (top_p, wide):
        num_rows = len(shares)
        filters = Filters(
            temperature=np.full(num_rows, 0.7, np.float32),
            top_k=np.zeros(num_rows, np.int32),
            top_p=shares,
            min_p=np.zeros(num_rows, np.float32),
        )
        logits = torch.full((num_rows, vocab_size), 2.3)
        draws = draw(logits, logits[:, 0].clone(), filters, torch.zeros(num_rows, dtype=torch.float64))
        assert draws.num_kept.tolist() == [math.ceil(float(share) * vocab_size) for share in shares]
