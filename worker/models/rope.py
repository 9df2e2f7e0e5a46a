"""Rotary position embedding: frequencies, the table of cosines and sines, and the layers that know both.

Everything up to the rotation itself is float32 whatever the model computes in: rounding a frequency or a position to bfloat16
would blur neighbouring positions of a long context.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from modelworker.ops.cpu.packing import WeightArena
from modelworker.worker.models.causal_lm import AttentionMetadata
from modelworker.worker.models.layer import Layer
from modelworker.worker.models.rope_config import RopeConfig


class RotaryAngles(NamedTuple):
    """Where the rotation of each token of a step stands.

    Attributes:
        rows: [num_tokens], the token's row in `cos_sin`.
        cos_sin: [number of rows, head_dim], float32: cosines | sines.
    """

    rows: Tensor
    cos_sin: Tensor


def frequency_exponents(head_dim: int) -> Tensor:
    """Computes 0, 2/head_dim, 4/head_dim ...: [head_dim / 2], float32, on the CPU."""
    return torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Computes the angle per position of each pair of dimensions.

    The formulae are those of transformers' `modeling_rope_utils`. For `dynamic` it is that of sequences up to the original length.

    Returns:
        [head_dim / 2], float32, on the CPU.
    """
    exponents = frequency_exponents(head_dim)
    inverse = 1.0 / (rope.theta**exponents)
    match rope.rope_type:
        case "linear":
            return inverse / rope.factor
        case "llama3":
            return _llama3(rope, inverse)
        case "yarn":
            return _yarn(rope, exponents)
        case "default" | "dynamic":
            return inverse


def attention_factor(rope: RopeConfig) -> float:
    """Computes the factor on cosines and sines: 1 but for yarn (https://arxiv.org/abs/2309.00071, section 3.4)."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(mscale: float) -> float:
        return 1.0 if rope.factor <= 1.0 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def cos_sin_rows(angles: Tensor, factor: float = 1.0) -> Tensor:
    """Computes cosines | sines, [n, head_dim] float32, of angles [n, head_dim / 2]."""
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    original = rope.original_max_position_embeddings
    wavelengths = 2 * math.pi / inverse
    scaled = torch.where(wavelengths > original / rope.low_freq_factor, inverse / rope.factor, inverse)
    smooth = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (wavelengths >= original / rope.high_freq_factor) & (wavelengths <= original / rope.low_freq_factor)
    return torch.where(between, (1 - smooth) * scaled / rope.factor + smooth * scaled, scaled)


def _yarn(rope: RopeConfig, exponents: Tensor) -> Tensor:
    """YaRN (https://arxiv.org/abs/2309.00071, section 3.2): interpolation and extrapolation, mixed by the number of rotations."""
    head_dim = 2 * len(exponents)

    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    frequencies = rope.theta**exponents
    ramp = ((torch.arange(len(exponents), dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    extrapolated = 1 - ramp
    return 1.0 / (rope.factor * frequencies) * (1 - extrapolated) + 1.0 / frequencies * extrapolated


class RotaryEmbedding(Layer, ABC):
    """Knows by which angles queries and keys are rotated. Its buffers stay float32 when the model is cast."""

    __call__: Callable[..., RotaryAngles]

    @abstractmethod
    def forward(self, positions: Tensor, attention: AttentionMetadata) -> RotaryAngles:
        """Hot path: says which angles belong to the tokens of a step; computed once, used by every layer.

        Args:
            positions: [num_tokens], int32.
            attention: the step's sequences.
        """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            moved = self.get_buffer(name)
            setattr(self, name, moved.to(buffer.dtype) if buffer.is_meta else buffer.to(moved.device))
        return self


class TableRotaryEmbedding(RotaryEmbedding):
    """Takes the angles from a table of all positions, `cos_sin` [max_model_len, head_dim], filled by `process_after_loading`."""

    cos_sin: Tensor

    def __init__(self, rope: RopeConfig, *, head_dim: int, max_model_len: int) -> None:
        super().__init__()
        self.rope = rope
        self.register_buffer("cos_sin", torch.empty(max_model_len, head_dim, dtype=torch.float32), persistent=False)

    def process_after_loading(self, device: torch.device, arena: WeightArena) -> None:
        """Computes the table."""
        max_model_len, head_dim = self.cos_sin.shape
        positions = torch.arange(max_model_len, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, inverse_frequencies(self.rope, head_dim))
        self.cos_sin = cos_sin_rows(angles, attention_factor(self.rope)).to(device)

    def forward(self, positions: Tensor, attention: AttentionMetadata) -> RotaryAngles:
        """Hot path: the table, and the tokens' positions as its rows."""
        return RotaryAngles(positions, self.cos_sin)


class DynamicRotaryEmbedding(RotaryEmbedding):
    """Dynamic NTK scaling, whose base grows with the sequence: there is no table, the angles are computed in each step.

    As in transformers, all tokens that a step adds to a sequence are rotated for the length that the sequence has after the step,
    and keys already in the cache keep the rotation they were stored with. Up to the original length that is plain RoPE. Beyond it
    the result depends, as it does there, on how a prompt is divided into steps. Unlike there it never depends on other sequences.
    """

    exponents: Tensor

    def __init__(self, rope: RopeConfig, *, head_dim: int) -> None:
        super().__init__()
        self.rope = rope
        self.head_dim = head_dim
        self.register_buffer("exponents", torch.empty(head_dim // 2, dtype=torch.float32), persistent=False)

    def process_after_loading(self, device: torch.device, arena: WeightArena) -> None:
        """Computes the exponents of the frequencies."""
        self.exponents = frequency_exponents(self.head_dim).to(device)

    def forward(self, positions: Tensor, attention: AttentionMetadata) -> RotaryAngles:
        """Hot path: computes the angles of the tokens of a step."""
        tokens = torch.arange(positions.shape[0], dtype=torch.int32, device=positions.device)
        sequences = torch.bucketize(tokens, attention.query_starts[1:], right=True)
        # Padding, tokens past the last sequence, belongs to one without tokens.
        seq_lens = torch.cat((attention.seq_lens, attention.seq_lens.new_zeros(1)))
        original, factor = self.rope.original_max_position_embeddings, self.rope.factor
        lengths = seq_lens[sequences].clamp(min=original).to(torch.float32)
        growth = factor * lengths / original - (factor - 1)
        base = self.rope.theta * growth ** (self.head_dim / (self.head_dim - 2))
        inverse = 1.0 / base[:, None] ** self.exponents
        return RotaryAngles(tokens, cos_sin_rows(positions[:, None].to(torch.float32) * inverse))


def make_rotary_embedding(rope: RopeConfig, *, head_dim: int, max_model_len: int) -> RotaryEmbedding:
    """Makes the layer that the RoPE type needs."""
    if rope.rope_type == "dynamic":
        return DynamicRotaryEmbedding(rope, head_dim=head_dim)
    return TableRotaryEmbedding(rope, head_dim=head_dim, max_model_len=max_model_len)
