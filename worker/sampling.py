"""From logits to tokens.

For a row of logits z (fp32) the order is: temperature, top-k, top-p, min-p, draw. Ties go to the lowest id everywhere.

- temperature t: z / t; t = 0 is greedy: argmax z.
- top-k: keeps the k largest logits.
- top-p: of the renormalized rest, in falling order, keeps every token before which the probabilities sum up to less than p.
- min-p: keeps tokens whose probability is at least min_p times the largest one.
- draw: the first token, in order of ids, at which the cumulated probability of the kept ones exceeds u times their sum. u is a
  function of (seed, position of the sampled token), see `random_numbers`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelworker.ops.linear import best_of
from modelworker.worker.batch import BoolArray, Float32Array, IndexArray, Int32Array, SamplingBatch, UInt64Array
from modelworker.worker.random_numbers import uniforms

# 64 rows of 49,152 on one thread: a full sort takes 320 ms, the largest 1024 40 ms, and few rows need more to sum up to p.
_TOP_P_PREFIX = 1024


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Samples:
    """One sampled token per row of logits.

    Attributes:
        token_ids: [num_rows]; meaningless where not `finite`.
        finite: [num_rows], False where the logits hold NaN or infinity.
        logprobs: [num_rows], of the sampled token; 0 where not asked for. None: no row asked.
        ranks: [num_rows], of the sampled token, 1 = most probable; 0 where not asked for. None: no row asked.
    """

    token_ids: Int32Array
    finite: BoolArray
    logprobs: Float32Array | None
    ranks: Int32Array | None


def greedy_samples(token_ids: Tensor, finite: Tensor) -> Samples:
    """Makes the samples of rows that are greedy and ask for nothing else.

    Args:
        token_ids: [num_rows], int64, of the largest logits.
        finite: [num_rows], bool, whether all logits of a row are finite.
    """
    return Samples(token_ids=_int32(token_ids), finite=finite.numpy(force=True), logprobs=None, ranks=None)


def sample(logits: Tensor, parameters: SamplingBatch, seeds: UInt64Array, positions: Int32Array) -> Samples:
    """Samples one token from each row of logits.

    Args:
        logits: [num_rows, vocab_size], fp32. Not changed.
        parameters: of these rows.
        seeds: [num_rows], one for every row, also for those whose seed the router left open.
        positions: [num_rows], position of the sampled token in its sequence.
    """
    tokens, highest, finite = best_of(logits)
    finite_rows = finite.numpy(force=True)
    wants_processed = (parameters.num_logprobs >= 0) & parameters.processed_logprobs
    random_rows = np.flatnonzero((parameters.temperature > 0) & finite_rows)
    # Rows that draw, and greedy ones that only want to know the distribution.
    processed_rows = np.flatnonzero(((parameters.temperature > 0) | wants_processed) & finite_rows)
    weights = _filtered_weights(logits[processed_rows], highest[processed_rows], parameters, processed_rows)
    if random_rows.size:
        numbers = torch.from_numpy(uniforms(seeds[random_rows], positions[random_rows].astype(np.uint64))).to(logits.device)
        drawing = torch.from_numpy(np.searchsorted(processed_rows, random_rows)).to(logits.device)
        tokens[torch.from_numpy(random_rows).to(logits.device)] = _draw(weights[drawing], numbers)

    logprobs, ranks = _chosen_logprobs(logits, weights, processed_rows, tokens, parameters, finite_rows)
    return Samples(token_ids=_int32(tokens), finite=finite_rows, logprobs=logprobs, ranks=ranks)


def _int32(values: Tensor) -> Int32Array:
    return values.to(torch.int32).numpy(force=True)


def _filtered_weights(logits: Tensor, highest: Tensor, parameters: SamplingBatch, rows: IndexArray) -> Tensor:
    """Returns the probabilities of each row after temperature, 0 for what the filters drop; not renormalized. [n, vocab_size]."""
    device = logits.device
    temperature = torch.from_numpy(np.where(parameters.temperature[rows] > 0, parameters.temperature[rows], 1)).to(device)
    # The largest logit is subtracted first: a tiny temperature then only sends the others towards -inf.
    scaled = (logits - highest.unsqueeze(1)) / temperature.unsqueeze(1)
    kept = torch.ones_like(scaled, dtype=torch.bool)
    _keep_top_k(kept, scaled, parameters.top_k[rows])
    weights = scaled.masked_fill(~kept, float("-inf")).softmax(-1)
    _keep_top_p(kept, weights, parameters.top_p[rows])
    _keep_min_p(kept, weights, parameters.min_p[rows])
    return weights.masked_fill_(~kept, 0)


def _keep_top_k(kept: Tensor, scaled: Tensor, top_k: Int32Array) -> None:
    rows = np.flatnonzero((top_k > 0) & (top_k < scaled.shape[1]))
    if rows.size:
        counts = torch.from_numpy(top_k[rows].astype(np.int64)).to(scaled.device)
        ordered = scaled[rows].topk(int(top_k[rows].max()), dim=-1).values
        kept[rows] = _largest(scaled[rows], ordered, counts)


def _keep_top_p(kept: Tensor, weights: Tensor, top_p: Float32Array) -> None:
    rows = np.flatnonzero(top_p < 1)
    prefix = min(_TOP_P_PREFIX, weights.shape[1])
    while rows.size:
        candidates = weights[rows]
        limits = torch.from_numpy(top_p[rows].astype(np.float64)).to(weights.device).unsqueeze(1)
        ordered = (
            candidates.topk(prefix, dim=-1).values if prefix < weights.shape[1] else candidates.sort(-1, descending=True).values
        )
        before = ordered.cumsum(-1, dtype=torch.float64) - ordered
        before[:, 0] = 0
        counts = (before < limits).sum(-1)
        # Where all of the prefix is needed, it does not tell where p is reached.
        clear = (counts < prefix).numpy(force=True) | (prefix == weights.shape[1])
        kept[rows[clear]] &= _largest(candidates[clear], ordered[clear], counts[clear])
        rows, prefix = rows[~clear], weights.shape[1]


def _largest(values: Tensor, ordered: Tensor, counts: Tensor) -> Tensor:
    """Returns which values are the `counts` largest of their row, ties to the lowest id.

    Args:
        values: [n, vocab_size].
        ordered: [n, at least the largest count], the largest values of each row in falling order.
        counts: [n], >= 1.
    """
    smallest = ordered.gather(1, counts.unsqueeze(1) - 1)
    chosen = values >= smallest
    tied = (chosen.sum(-1) > counts).nonzero().squeeze(1)
    if tied.numel():
        above, equal = values[tied] > smallest[tied], values[tied] == smallest[tied]
        free = counts[tied].unsqueeze(1) - above.sum(-1, keepdim=True)
        chosen[tied] = above | (equal & (equal.cumsum(-1) <= free))
    return chosen


def _keep_min_p(kept: Tensor, weights: Tensor, min_p: Float32Array) -> None:
    rows = np.flatnonzero(min_p > 0)
    if rows.size == 0:
        return
    shares = torch.from_numpy(min_p[rows]).to(weights.device).unsqueeze(1)
    candidates = weights[rows]
    kept[rows] = kept[rows] & (candidates >= shares * candidates.amax(-1, keepdim=True))


def _draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """Inverts the cumulated distribution, in order of ids: [n]."""
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    total = cumulated[:, -1]
    # u < 1, but u * total may round up to the total, which no token exceeds.
    targets = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, targets.unsqueeze(1), right=True).squeeze(1)


def _chosen_logprobs(
    logits: Tensor, weights: Tensor, processed_rows: IndexArray, tokens: Tensor, parameters: SamplingBatch, finite: BoolArray
) -> tuple[Float32Array | None, Int32Array | None]:
    """Returns the logprobs and ranks of the sampled tokens."""
    wanted = parameters.num_logprobs >= 0
    if not wanted.any():
        return None, None
    logprobs, ranks = np.zeros(len(wanted), np.float32), np.zeros(len(wanted), np.int32)
    raw_rows = np.flatnonzero(wanted & finite & ~parameters.processed_logprobs)
    if raw_rows.size:
        logprobs[raw_rows], ranks[raw_rows] = _logprobs_and_ranks(logits[raw_rows].log_softmax(-1), tokens[raw_rows])
    asked = (wanted & parameters.processed_logprobs)[processed_rows]
    if asked.any():
        distribution = weights[np.flatnonzero(asked)]
        values = (distribution / distribution.sum(-1, keepdim=True)).log()
        rows = processed_rows[asked]
        logprobs[rows], ranks[rows] = _logprobs_and_ranks(values, tokens[rows])
    return logprobs, ranks


def _logprobs_and_ranks(values: Tensor, tokens: Tensor) -> tuple[Float32Array, Int32Array]:
    chosen = values.gather(1, tokens.unsqueeze(1))
    ids = torch.arange(values.shape[1], device=values.device)
    better = (values > chosen) | ((values == chosen) & (ids < tokens.unsqueeze(1)))
    return chosen.squeeze(1).numpy(force=True), _int32(better.sum(-1) + 1)
