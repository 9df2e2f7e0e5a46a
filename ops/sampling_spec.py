"""Reference and samples of sample_tokens."""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from modelworker.ops.op_spec import SampleShape, padded, random, returned_at

_LOW = 0xFFFFFFFF
# temperature, top-k, top-p, min-p of one row after the other.
_FILTERS = (
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (0.0, 3, 0.5, 0.5),
    (1.3, 0, 0.6, 0.0),
    (2.0, 0, 1.0, 0.2),
    (0.8, 9, 0.8, 0.05),
    (1.0, 1000, 1e-6, 0.0),
)


def sample_tokens_reference(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, seeds: Tensor, positions: Tensor
) -> Mapping[str, Tensor]:
    """Sorts, filters and draws row after row, on lists of numbers."""
    parameters = (temperatures, top_ks, top_ps, min_ps, seeds, positions)
    rows = zip(logits.tolist(), *(values.tolist() for values in parameters), strict=True)
    tokens = [_draw(*row) for row in rows]
    return {
        returned_at(0): torch.tensor(tokens, dtype=torch.float64),
        returned_at(1): torch.ones(len(tokens), dtype=torch.float64),
    }


def _draw(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int) -> int:
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if temperature == 0:
        return order[0]
    weights = [math.exp((logit - max(logits)) / temperature) for logit in logits]
    order = order[: top_k or None]
    if top_p < 1:
        limit, before, kept = top_p * math.fsum(weights[token] for token in order), 0.0, order[:1]
        for previous, token in pairwise(order):
            before += weights[previous]
            if before < limit:
                kept.append(token)
        order = kept
    left = sorted(token for token in order if weights[token] >= min_p)
    target, cumulated = _uniform_number(seed, position) * math.fsum(weights[token] for token in left), 0.0
    for token in left:
        cumulated += weights[token]
        if cumulated > target:
            return token
    return left[-1]


def _uniform_number(seed: int, position: int) -> float:
    """Philox 4x32-10 on integers of any size (Salmon et al., SC 2011)."""
    keys = [seed & _LOW, seed >> 32 & _LOW]
    words = [position & _LOW, position >> 32 & _LOW, 0, 0]
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [second >> 32 ^ words[1] ^ keys[0], second & _LOW, first >> 32 ^ words[3] ^ keys[1], first & _LOW]
        keys = [keys[0] + 0x9E3779B9 & _LOW, keys[1] + 0xBB67AE85 & _LOW]
    return float((words[0] << 32 | words[1]) >> 11) * 2.0**-53


def sample_tokens_sample(shape: SampleShape) -> tuple[Any, ...]:
    """Makes logits, fp32 whatever the activations are (those of bf16 hold many equal ones), and rows with all kinds of filters."""
    num_rows = shape.num_tokens
    logits = random(shape, num_rows, shape.variant["vocab_size"], seed=1, scale=2.0).float()
    logits[:, 5::11] = float("-inf")
    chosen = [_FILTERS[row % len(_FILTERS)] for row in range(num_rows)]
    temperatures, top_ks, top_ps, min_ps = ([row[index] for row in chosen] for index in range(4))
    row = torch.arange(num_rows)
    return (
        padded(logits, shape.padding),
        torch.tensor(temperatures, dtype=torch.float32),
        torch.tensor(top_ks, dtype=torch.int32),
        torch.tensor(top_ps, dtype=torch.float32),
        torch.tensor(min_ps, dtype=torch.float32),
        # Seeds of all 64 bits, half of them negative as int64.
        row * 0x1E3779B97F4A7C15 + shape.draw,
        row * 7 + 2**33,
    )
