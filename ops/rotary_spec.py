"""Reference and samples of rotary_embedding."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modelworker.ops.op_spec import SampleShape, padded, random

_NUM_POSITIONS = 64


def rotary_variant(
    *, head_dim: int, num_heads: int = 4, num_kv_heads: int = 2, rotary_dim: int | None = None, interleaved: bool = False
) -> Mapping[str, Any]:
    """Names a variant of the samples; by default all dimensions are rotated."""
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rotary_dim": rotary_dim or head_dim,
        "interleaved": interleaved,
    }


def rotary_embedding_reference(
    query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool
) -> Mapping[str, Tensor]:
    """(a, b) becomes (a cos - b sin, b cos + a sin), pair by pair, of each token's row of cosines | sines."""
    num_pairs = cos_sin.shape[1] // 2
    table = cos_sin.double()[positions.long()]
    rotated = {"query": query.double().clone(), "key": key.double().clone()}
    for name, heads in {"query": query, "key": key}.items():
        for pair in range(num_pairs):
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + num_pairs)
            a, b = heads[..., first].double(), heads[..., second].double()
            cos, sin = table[:, pair : pair + 1], table[:, num_pairs + pair : num_pairs + pair + 1]
            rotated[name][..., first] = a * cos - b * sin
            rotated[name][..., second] = b * cos + a * sin
    return rotated


def rotary_embedding_sample(shape: SampleShape) -> tuple[Any, ...]:
    """Makes query and key, neighbours in one tensor as a merged projection leaves them, positions in no order, and the table."""
    head_dim, rotary_dim = shape.variant["head_dim"], shape.variant["rotary_dim"]
    num_heads, num_kv_heads = shape.variant["num_heads"], shape.variant["num_kv_heads"]
    merged = padded(random(shape, shape.num_tokens, num_heads + num_kv_heads, head_dim, seed=1), shape.padding)
    angles = random(shape, _NUM_POSITIONS, rotary_dim // 2, seed=2, scale=3.0, dtype=torch.float32)
    positions = (torch.arange(shape.num_tokens, dtype=torch.int32) * 7 + shape.draw) % _NUM_POSITIONS
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    return merged[:, :num_heads], merged[:, num_heads:], positions, table, shape.variant["interleaved"]
