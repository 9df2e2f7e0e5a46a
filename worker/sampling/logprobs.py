"""Logprobs of chosen tokens and of the most probable ones."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelworker.worker.arrays import BoolArray, Float32Array, IndexArray, Int32Array
from modelworker.worker.sampling.largest import largest, rank_of
from modelworker.worker.sampling.tensors import rows_of, to_device


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Listing:
    """What is told of each position: its token first, then the most probable tokens.

    Attributes:
        counts: [n], how many of the columns are told; 0: nothing was asked for.
        token_ids: [n, width].
        values: [n, width], logprobs.
        ranks: [n, width], 1 = most probable.
    """

    counts: Int32Array
    token_ids: Int32Array
    values: Float32Array
    ranks: Int32Array

    @classmethod
    def empty(cls, num_positions: int, width: int) -> "Listing":
        """Makes one that tells nothing yet."""
        shape = (num_positions, width)
        return cls(
            counts=np.zeros(num_positions, np.int32),
            token_ids=np.zeros(shape, np.int32),
            values=np.zeros(shape, np.float32),
            ranks=np.zeros(shape, np.int32),
        )

    def put(self, positions: IndexArray, listing: "Listing") -> None:
        """Replaces some positions, by a listing that is at most as wide."""
        width = listing.token_ids.shape[1]
        self.counts[positions] = listing.counts
        self.token_ids[positions, :width] = listing.token_ids
        self.values[positions, :width] = listing.values
        self.ranks[positions, :width] = listing.ranks

    def take(self, positions: IndexArray | BoolArray) -> "Listing":
        """Returns some positions."""
        return Listing(
            counts=self.counts[positions],
            token_ids=self.token_ids[positions],
            values=self.values[positions],
            ranks=self.ranks[positions],
        )

    @classmethod
    def joined(cls, parts: "list[Listing]") -> "Listing":
        """Puts equally wide listings together."""
        return cls(
            counts=np.concatenate([part.counts for part in parts]),
            token_ids=np.concatenate([part.token_ids for part in parts]),
            values=np.concatenate([part.values for part in parts]),
            ranks=np.concatenate([part.ranks for part in parts]),
        )

    @property
    def told(self) -> BoolArray:
        """[n, width]: which entries are told."""
        return np.arange(self.token_ids.shape[1]) < self.counts[:, None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Distributions:
    """Logits, and what makes logprobs of them: (z - highest) / temperature - log_total for the `num_kept` largest.

    Attributes:
        logits: [n, vocab_size], fp32.
        best: [n], int64, the token with the largest logit, the lowest id of equal ones.
        highest: [n], fp32, the largest logit.
        temperature: [n], fp32.
        log_totals: [n], fp64.
        num_kept: [n], int64.
    """

    logits: Tensor
    best: Tensor
    highest: Tensor
    temperature: Tensor
    log_totals: Tensor
    num_kept: Tensor

    @classmethod
    def of_logits(cls, logits: Tensor, best: Tensor, highest: Tensor) -> "Distributions":
        """Makes log softmax of finite logits."""
        num_rows, vocab_size = logits.shape
        return cls(
            logits=logits,
            best=best,
            highest=highest,
            temperature=highest.new_ones(num_rows),
            # Logarithms of sums of the logits themselves are as coarse in fp32 as those are large.
            log_totals=(logits - highest.unsqueeze(1)).exp_().sum(-1).double().log(),
            num_kept=torch.full((num_rows,), vocab_size, device=logits.device),
        )

    def take(self, rows: Tensor) -> "Distributions":
        """Returns some of them; without a copy if they are all."""
        if len(rows) == len(self.best):
            return self
        return Distributions(
            logits=self.logits[rows],
            best=self.best[rows],
            highest=self.highest[rows],
            temperature=self.temperature[rows],
            log_totals=self.log_totals[rows],
            num_kept=self.num_kept[rows],
        )

    def logprobs(self, values: Tensor) -> Tensor:
        """Returns the logprobs, fp32, of logits [n, any]."""
        scaled = (values - self.highest.unsqueeze(1)) / self.temperature.unsqueeze(1)
        # The largest logprob of a row whose other tokens have no weight left may round to above 0.
        return (scaled - self.log_totals.unsqueeze(1)).to(torch.float32).clamp_(max=0)


def list_logprobs(distributions: Distributions, tokens: Tensor, num_top: Int32Array) -> Listing:
    """Hot path: lists the logprobs of a token of each row and of the row's most probable ones.

    Args:
        distributions: n of them.
        tokens: [n], int64, each with a probability.
        num_top: [n], 0 .. 20, how many of the most probable ones; tokens without a probability are left out.
    """
    logits = distributions.logits
    device, width = logits.device, min(int(num_top.max(initial=0)), logits.shape[1])
    chosen = logits.gather(1, tokens.unsqueeze(1))
    columns_of_values, columns_of_ids = [chosen], [tokens.unsqueeze(1)]
    counts = torch.ones(len(num_top), dtype=torch.int64, device=device)
    if width:
        top, ids = largest(logits, width)
        columns_of_values.append(top)
        columns_of_ids.append(ids)
        most = torch.minimum(to_device(num_top, device).to(torch.int64), distributions.num_kept)
        has_probability = torch.isfinite(distributions.logprobs(top)).sum(-1)
        counts += torch.minimum(most, has_probability)
    ranks = torch.arange(width + 1, device=device).repeat(len(num_top), 1)
    ranks[:, 0] = _ranks(distributions, tokens)
    return Listing(
        counts=counts.to(torch.int32).numpy(force=True),
        token_ids=torch.cat(columns_of_ids, 1).to(torch.int32).numpy(force=True),
        values=distributions.logprobs(torch.cat(columns_of_values, 1)).numpy(force=True),
        ranks=ranks.to(torch.int32).numpy(force=True),
    )


def _ranks(distributions: Distributions, tokens: Tensor) -> Tensor:
    """[n], int64: the tokens' ranks, counted only where one is not the largest."""
    ranks = torch.ones_like(tokens)
    counted = (tokens != distributions.best).nonzero().squeeze(1)
    if counted.numel():
        ranks[counted] = rank_of(rows_of(distributions.logits, counted), tokens[counted])
    return ranks
