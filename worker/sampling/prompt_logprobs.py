"""Logprobs of tokens that the router sent: of a row's own tokens from the second one on, and of the one that follows them."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelworker.worker.arrays import BoolArray, IndexArray, Int32Array
from modelworker.worker.batch import StepBatch
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.ragged import ranges
from modelworker.worker.result import PromptLogprobs
from modelworker.worker.sampling.largest import best_of_rows
from modelworker.worker.sampling.logprobs import Distributions, Listing, list_logprobs
from modelworker.worker.sampling.tensors import to_device


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptScores:
    """Logprobs of tokens that the router sent.

    Attributes:
        rows: [n], of each such token.
        listing: [n], one entry each.
        finite: [num_sequences], False where the model's logits for a row hold NaN or infinity.
    """

    rows: IndexArray
    listing: Listing
    finite: BoolArray

    def of_rows(self, succeeded: BoolArray) -> PromptLogprobs:
        """Returns what is told of the rows that have succeeded, [num_sequences]."""
        told = succeeded[self.rows]
        return PromptLogprobs(
            counts=np.bincount(self.rows[told], minlength=len(succeeded)).astype(np.int32),
            token_ids=self.listing.token_ids[told, 0],
            values=self.listing.values[told, 0],
            ranks=self.listing.ranks[told, 0],
        )


def score_prompts(batch: StepBatch, hidden: Tensor, model: CausalLM, *, part: int) -> PromptScores | None:
    """Computes the logprobs of the tokens that rows want to know them of; None where none does.

    Args:
        batch: the step.
        hidden: [num_tokens, hidden_size].
        model: for its head.
        part: how many rows of logits are computed at once.
    """
    wanted = batch.prompt_logprobs
    if wanted is None:
        return None
    rows, tokens, targets = _targets(batch, wanted.wanted, wanted.next_ids)
    listing, finite = Listing.empty(len(rows), 1), np.ones(batch.num_sequences, np.bool_)
    for start in range(0, len(rows), part):
        places = np.arange(start, min(start + part, len(rows)))
        logits = model.compute_logits(hidden[to_device(tokens[places], hidden.device)])
        best, highest, is_finite = best_of_rows(logits)
        listing.put(
            places,
            list_logprobs(
                Distributions.of_logits(logits, best, highest),
                to_device(targets[places], logits.device).to(torch.int64),
                np.zeros(len(places), np.int32),
            ),
        )
        finite[rows[places[~is_finite.numpy(force=True)]]] = False
    return PromptScores(rows=rows, listing=listing, finite=finite)


def _targets(batch: StepBatch, wanted: BoolArray, next_ids: Int32Array) -> tuple[IndexArray, IndexArray, Int32Array]:
    """Enumerates the tokens whose logprobs are wanted: their row, the index of the token before them, their id."""
    asking = np.flatnonzero(wanted)
    lengths = batch.query_lens[asking] - (next_ids[asking] < 0)
    owners, tokens = ranges(batch.query_starts[:-1][asking], lengths)
    rows = asking[owners]
    is_last = tokens + 1 == batch.query_starts[1:][rows]
    following = batch.token_ids[np.minimum(tokens + 1, batch.num_tokens - 1)]
    return rows, tokens, np.where(is_last, next_ids[rows], following).astype(np.int32)
