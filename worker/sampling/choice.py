"""From the logits of sampled positions to tokens."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelworker.ops.sampling import SampleTokens
from modelworker.worker.batch import BoolArray, IndexArray, Int32Array, SamplingBatch, UInt64Array
from modelworker.worker.random_numbers import uniforms
from modelworker.worker.sampling.edits import edit_logits, edited_positions
from modelworker.worker.sampling.filters import Filters, draw
from modelworker.worker.sampling.history import TokenStreams
from modelworker.worker.sampling.largest import best_of_rows
from modelworker.worker.sampling.logprobs import Distributions, Listing, list_logprobs
from modelworker.worker.sampling.positions import SampledPositions
from modelworker.worker.sampling.tensors import rows_of, to_device, to_device_together


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples:
    """A token for each sampled position.

    Attributes:
        token_ids: [n]; meaningless where not `succeeded`.
        finite: [n], False where the model's logits hold NaN or infinity.
        allowed: [n], False where masks leave no token.
        listing: logprobs; None: no row of the step asked.
    """

    token_ids: Int32Array
    finite: BoolArray
    allowed: BoolArray
    listing: Listing | None

    @property
    def succeeded(self) -> BoolArray:
        """[n]: whether there is a token."""
        return self.finite & self.allowed

    @classmethod
    def joined(cls, parts: "list[Samples]") -> "Samples":
        """Puts the samples of parts of the positions together, of all of which there is a listing or of none."""
        if len(parts) == 1:
            return parts[0]
        listings = [part.listing for part in parts if part.listing is not None]
        return cls(
            token_ids=np.concatenate([part.token_ids for part in parts]),
            finite=np.concatenate([part.finite for part in parts]),
            allowed=np.concatenate([part.allowed for part in parts]),
            listing=Listing.joined(listings) if listings else None,
        )


def greedy_samples(token_ids: Tensor, finite: Tensor) -> Samples:
    """Makes the samples of positions that are plainly greedy.

    Args:
        token_ids: [n], int64, of the largest logits.
        finite: [n], bool, whether all logits of a position are finite.
    """
    return Samples(
        token_ids=_int32(token_ids), finite=finite.numpy(force=True), allowed=np.ones(len(token_ids), np.bool_), listing=None
    )


def choose(
    logits: Tensor,
    sampling: SamplingBatch,
    positions: SampledPositions,
    seeds: UInt64Array,
    streams: TokenStreams | None,
    sample_tokens: SampleTokens | None = None,
) -> Samples:
    """Hot path: samples a token at each position.

    Args:
        logits: [n, vocab_size], fp32, of the positions. Changed where they are edited.
        sampling: of the step.
        positions: n of them.
        seeds: [num_sequences], one for every row, also for those whose seed the router left open.
        streams: tokens of rows with penalties.
        sample_tokens: draws where no more than the token is asked of the distribution drawn from. None: all are drawn by `draw`.
    """
    best, highest, is_finite = best_of_rows(logits)
    finite = is_finite.numpy(force=True)
    edited = np.flatnonzero(edited_positions(sampling, positions) & finite)
    num_logprobs, processed = sampling.num_logprobs[positions.rows], sampling.processed_logprobs[positions.rows]
    raw = np.flatnonzero((num_logprobs >= 0) & ~processed & finite)
    model = _distributions_of_model(logits, best, highest, raw, is_edited=edited.size > 0) if raw.size else None
    allowed = np.ones(len(positions), np.bool_)
    if edited.size:
        edit_logits(logits, sampling, positions, streams)
        places = to_device(edited, logits.device)
        best[places], highest[places], _ = best_of_rows(rows_of(logits, places))
        allowed[edited] = (highest[places] > -torch.inf).numpy(force=True)

    usable = finite & allowed
    is_random = sampling.temperature[positions.rows] > 0
    described = (num_logprobs >= 0) & processed & usable
    tokens, drawn = best, None
    by_op = is_random & usable & ~described & (sample_tokens is not None)
    if sample_tokens is not None and by_op.any():
        tokens = _draw_tokens(sample_tokens, logits, by_op, sampling, positions, seeds)
    # Positions that draw otherwise, and greedy ones that only want to know the distribution.
    drawing = np.flatnonzero((is_random & usable & ~by_op) | described)
    if drawing.size:
        places = to_device(drawing, logits.device)
        drawn, chosen = _draw(rows_of(logits, places), best[places], highest[places], sampling, positions, seeds, drawing)
        tokens = tokens.clone()
        tokens[to_device(drawing[is_random[drawing]], logits.device)] = chosen[to_device(is_random[drawing], logits.device)]
    listing = None
    if (sampling.num_logprobs >= 0).any():
        listing = Listing.empty(len(positions), 1 + int(sampling.num_logprobs.max()))
        if model is not None:
            _tell(listing, raw, model, tokens, num_logprobs)
        if drawn is not None and described.any():
            among = np.flatnonzero(described[drawing])
            _tell(listing, drawing[among], drawn.take(to_device(among, logits.device)), tokens, num_logprobs)
    return Samples(token_ids=_int32(tokens), finite=finite, allowed=allowed, listing=listing)


def _distributions_of_model(logits: Tensor, best: Tensor, highest: Tensor, rows: IndexArray, *, is_edited: bool) -> Distributions:
    """Makes the distributions of the model's own logits, which stay what they are when `logits` are edited."""
    places = to_device(rows, logits.device)
    chosen = rows_of(logits, places)
    if is_edited and chosen is logits:
        chosen = logits.clone()
    return Distributions.of_logits(chosen, best[places], highest[places])


def _draw_tokens(
    sample_tokens: SampleTokens,
    logits: Tensor,
    chosen: BoolArray,
    sampling: SamplingBatch,
    positions: SampledPositions,
    seeds: UInt64Array,
) -> Tensor:
    """Draws at the `chosen` ones of n positions, whose logits these are. Returns [n], int64, at other positions the best tokens."""
    rows = positions.rows
    # The op takes whole tensors: a position that does not draw is greedy, which costs less than a copy of the others' logits.
    temperature = np.where(chosen, sampling.temperature[rows], np.float32(0))
    arguments = (
        *(temperature, sampling.top_k[rows], sampling.top_p[rows], sampling.min_p[rows]),
        *(seeds[rows].view(np.int64), positions.positions.astype(np.int64)),
    )
    tokens, _ = sample_tokens(logits, *to_device_together(arguments, logits.device))
    return tokens


def _draw(
    logits: Tensor,
    best: Tensor,
    highest: Tensor,
    sampling: SamplingBatch,
    positions: SampledPositions,
    seeds: UInt64Array,
    drawing: IndexArray,
) -> tuple[Distributions, Tensor]:
    """Draws at the positions `drawing`, whose logits these are. Returns the distributions drawn from and the tokens, [n], int64."""
    rows, device = positions.rows[drawing], logits.device
    temperature = sampling.temperature[rows]
    filters = Filters(
        temperature=np.where(temperature > 0, temperature, np.float32(1)),
        top_k=sampling.top_k[rows],
        top_p=sampling.top_p[rows],
        min_p=sampling.min_p[rows],
    )
    numbers = uniforms(seeds[rows], positions.positions[drawing].astype(np.uint64))
    draws = draw(logits, highest, filters, torch.from_numpy(numbers).to(device))
    distributions = Distributions(
        logits=logits,
        best=best,
        highest=highest,
        temperature=torch.from_numpy(filters.temperature).to(device),
        log_totals=draws.log_totals,
        num_kept=draws.num_kept,
    )
    return distributions, draws.tokens


def _tell(listing: Listing, places: IndexArray, distributions: Distributions, tokens: Tensor, num_logprobs: Int32Array) -> None:
    """Fills a listing at some positions, whose distributions these are."""
    chosen = tokens[to_device(places, tokens.device)]
    listing.put(places, list_logprobs(distributions, chosen, num_logprobs[places]))


def _int32(values: Tensor) -> Int32Array:
    return values.numpy(force=True).astype(np.int32)
