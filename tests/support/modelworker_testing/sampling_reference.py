"""Sampling as the protocol words it, one position at a time, in fp64 and plain Python: what tests compare the worker with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Wish:
    """How one row samples, and the tokens before the sampled position."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    num_logprobs: int = -1
    processed: bool = False
    allowed: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    mask: tuple[bool, ...] | None = None
    bias: dict[int, float] = field(default_factory=dict)
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


def edited(logits: Sequence[float], wish: Wish) -> list[float]:
    """Mask, bias, penalties."""
    result = [float(value) for value in logits]
    for token in range(len(result)):
        if (wish.allowed and token not in wish.allowed) or token in wish.banned or (wish.mask is not None and not wish.mask[token]):
            result[token] = -math.inf
        result[token] += float(np.float32(wish.bias.get(token, 0.0)))
        repetition, frequency, presence = (float(np.float32(x)) for x in (wish.repetition, wish.frequency, wish.presence))
        if token in wish.prompt or token in wish.output:
            result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
        count = wish.output.count(token)
        result[token] -= frequency * count + (presence if count else 0.0)
    return result


def ranking(logits: Sequence[float]) -> list[int]:
    """Token ids by falling logits, equal ones by rising ids."""
    return sorted(range(len(logits)), key=lambda token: (-logits[token], token))


def distribution(logits: Sequence[float], wish: Wish) -> Float64Array:
    """[vocab_size]: probabilities after temperature, top-k, top-p and min-p of logits that are edited already."""
    temperature = float(np.float32(wish.temperature)) or 1.0
    order = [token for token in ranking(logits) if logits[token] > -math.inf]
    if wish.top_k:
        order = order[: wish.top_k]
    weights = {token: math.exp((logits[token] - logits[order[0]]) / temperature) for token in order}
    total = sum(weights.values())
    kept, before = [], 0.0
    for token in order:
        if wish.top_p < 1 and kept and before >= float(np.float32(wish.top_p)) * total:  # 1 is off, whatever sums round to
            break
        kept.append(token)
        before += weights[token]
    kept = [token for token in kept if weights[token] >= float(np.float32(wish.min_p)) * weights[order[0]]]
    result = np.zeros(len(logits))
    for token in kept:
        result[token] = weights[token]
    return result / result.sum()


def log_softmax(logits: Sequence[float]) -> Float64Array:
    """[vocab_size]."""
    values = np.array(logits, np.float64)
    shifted = values - values.max()
    result: Float64Array = shifted - math.log(np.exp(shifted).sum())
    return result
