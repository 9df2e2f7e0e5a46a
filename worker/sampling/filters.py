"""Temperature, top-k, top-p, min-p, and the draw from what they leave.

What they leave of a row is always a number of its most probable tokens. Rows with filters are therefore settled among their
largest logits: 64 rows of 49,152 on one thread take 15 ms to find 256 of each and 320 ms to sort. Where those do not show how far
the filters reach, more are looked at. How many are looked at never changes what is drawn: the sum that top-p takes its share of is
always that of the whole row, in fp64.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelworker.worker.arrays import BoolArray, Float32Array, IndexArray, Int32Array
from modelworker.worker.sampling.largest import largest
from modelworker.worker.sampling.tensors import column, rows_of, to_device

_WIDTHS = (256, 1024, 4096)
# An unfiltered row is summed up in blocks; a draw then looks into one of them.
_BLOCK = 128


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Filters:
    """Parameters of rows that draw, or whose distribution is asked for.

    Attributes:
        temperature: [n], > 0.
        top_k: [n], 0 = off.
        top_p: [n], 1 = off.
        min_p: [n], 0 = off.
    """

    temperature: Float32Array
    top_k: Int32Array
    top_p: Float32Array
    min_p: Float32Array

    def take(self, rows: IndexArray | BoolArray) -> "Filters":
        """Returns those of some rows."""
        return Filters(temperature=self.temperature[rows], top_k=self.top_k[rows], top_p=self.top_p[rows], min_p=self.min_p[rows])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draws:
    """What was drawn from each row, and the distribution it was drawn from.

    The probability of a token with logit z, of the `num_kept` most probable ones, is exp((z - highest) / temperature - log_total).

    Attributes:
        tokens: [n], int64.
        num_kept: [n], int64, how many tokens the filters left.
        log_totals: [n], fp64.
    """

    tokens: Tensor
    num_kept: Tensor
    log_totals: Tensor

    def put(self, rows: IndexArray, draws: "Draws") -> None:
        """Replaces some rows."""
        places = to_device(rows, self.tokens.device)
        self.tokens[places], self.num_kept[places], self.log_totals[places] = draws.tokens, draws.num_kept, draws.log_totals


def draw(logits: Tensor, highest: Tensor, filters: Filters, numbers: Tensor) -> Draws:
    """Hot path: draws a token from each row.

    Args:
        logits: [n, vocab_size], fp32, -inf or finite. Not changed.
        highest: [n], fp32, the largest logit of each row, finite.
        filters: of the rows.
        numbers: [n], fp64, in [0, 1).
    """
    vocab_size = logits.shape[1]
    top_k = np.where(filters.top_k < vocab_size, filters.top_k, 0)
    is_filtered = (top_k > 0) | (filters.top_p < 1) | (filters.min_p > 0)
    if not is_filtered.any():
        return _draw_unfiltered(logits, highest, filters.temperature, numbers)
    filters = Filters(temperature=filters.temperature, top_k=top_k, top_p=filters.top_p, min_p=filters.min_p)
    device = logits.device
    draws = Draws(
        tokens=torch.empty(len(logits), dtype=torch.int64, device=device),
        num_kept=torch.empty(len(logits), dtype=torch.int64, device=device),
        log_totals=torch.empty(len(logits), dtype=torch.float64, device=device),
    )
    if not is_filtered.all():
        rows = np.flatnonzero(~is_filtered)
        places = to_device(rows, device)
        draws.put(rows, _draw_unfiltered(logits[places], highest[places], filters.temperature[rows], numbers[places]))
    pending = np.flatnonzero(is_filtered)
    for width in (*(width for width in _WIDTHS if width < vocab_size), vocab_size):
        rows = pending[top_k[pending] <= width]
        if rows.size:
            needed = width if (top_k[rows] == 0).any() else int(top_k[rows].max())
            places = to_device(rows, device)
            found, settled = _draw_filtered(
                rows_of(logits, places), highest[places], filters.take(rows), numbers[places], width=needed
            )
            draws.put(rows, found)
            pending = np.setdiff1d(pending, rows[settled], assume_unique=True)
    return draws


def _draw_unfiltered(logits: Tensor, highest: Tensor, temperature: Float32Array, numbers: Tensor) -> Draws:
    num_rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // _BLOCK)
    weights = logits.new_zeros(num_rows, num_blocks * _BLOCK)
    used = weights[:, :vocab_size]
    torch.sub(logits, highest.unsqueeze(1), out=used)
    used.div_(column(temperature, logits.device)).exp_()
    blocks = weights.view(num_rows, num_blocks, _BLOCK)
    cumulated = blocks.sum(-1).cumsum(-1, dtype=torch.float64)
    targets = numbers * cumulated[:, -1]
    block = _first_above(cumulated, targets)
    before = torch.where(block > 0, cumulated.gather(1, (block - 1).clamp_(min=0).unsqueeze(1)).squeeze(1), 0)
    inside = blocks[torch.arange(num_rows, device=logits.device), block].cumsum(-1, dtype=torch.float64)
    return Draws(
        tokens=block * _BLOCK + _first_above(inside, targets - before),
        num_kept=torch.full_like(block, vocab_size),
        log_totals=cumulated[:, -1].log(),
    )


def _draw_filtered(logits: Tensor, highest: Tensor, filters: Filters, numbers: Tensor, *, width: int) -> tuple[Draws, BoolArray]:
    """Draws from the `width` largest logits of each row, of which top-k leaves no more.

    Returns:
        The draws, and [n]: whether the filters keep no token beyond those.
    """
    device, temperature = logits.device, column(filters.temperature, logits.device)
    has_top_k = filters.top_k > 0
    values, ids = largest(logits, width)
    weights = values.sub_(highest.unsqueeze(1)).div_(temperature).exp_()
    if has_top_k.any():
        most = column(np.where(has_top_k, filters.top_k, width), device)
        weights.masked_fill_(torch.arange(width, device=device) >= most, 0)
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    kept = weights > 0
    if (filters.top_p < 1).any():
        limits = _top_p_limits(logits, highest, cumulated, filters, temperature)
        before = cumulated - weights
        before[:, 0] = 0
        kept &= before < limits
    if (filters.min_p > 0).any():
        kept &= weights >= column(filters.min_p, device)
    by_id, order = ids.sort(dim=-1)
    cumulated = weights.masked_fill_(~kept, 0).gather(1, order).cumsum(-1, dtype=torch.float64)
    drawn = by_id.gather(1, _first_above(cumulated, numbers * cumulated[:, -1]).unsqueeze(1)).squeeze(1)
    settled = has_top_k | (width == logits.shape[1]) | ~kept[:, -1].numpy(force=True)
    return Draws(tokens=drawn, num_kept=kept.sum(-1), log_totals=cumulated[:, -1].log()), settled


def _top_p_limits(logits: Tensor, highest: Tensor, cumulated: Tensor, filters: Filters, temperature: Tensor) -> Tensor:
    """[n, 1], fp64: a token is kept while the weights before it sum up to less than this; inf where top-p is off."""
    device = logits.device
    totals = cumulated[:, -1:].clone()
    # Without top-k, p is a share of the whole row, of which only the largest weights may be here.
    whole = np.flatnonzero((filters.top_k == 0) & (filters.top_p < 1))
    if whole.size:
        places = to_device(whole, device)
        weights = (rows_of(logits, places) - highest[places].unsqueeze(1)).div_(temperature[places]).exp_()
        totals[places] = weights.sum(-1, keepdim=True, dtype=torch.float64)
    top_p = column(filters.top_p, device).double()
    return torch.where(top_p < 1, top_p * totals, float("inf"))


def _first_above(cumulated: Tensor, targets: Tensor) -> Tensor:
    """[n]: index of the first element of each rising row that exceeds the row's target; targets stay below the last element."""
    total = cumulated[:, -1]
    # u < 1, but u * total may round up to the total, which no element exceeds.
    targets = torch.minimum(targets, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, targets.unsqueeze(1), right=True).squeeze(1)
