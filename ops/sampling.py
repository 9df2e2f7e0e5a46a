"""Draws tokens from logits, on the device that holds them."""

from collections.abc import Callable

import torch
from torch import Tensor

from modelworker.ops.custom_op import CustomOp
from modelworker.ops.library import register_op
from modelworker.ops.op_settings import OpSettings

_LOW = 0xFFFFFFFF


def sample_tokens(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Draws a token from each row of logits, without a look at any value on the host.

    Of the kept tokens it is the first, in order of ids, at which their cumulated weights exp((z - max z) / temperature) exceed u
    times their sum; u is `uniform_numbers` of the seed and the position.

    Args:
        logits: [num_rows, vocab_size], fp32, finite or -inf (a token that is not allowed).
        temperatures: [num_rows], fp32; 0: the largest logit, the lowest id of equal ones.
        top_ks: [num_rows], int32, keeps so many, of equal ones the lowest ids; 0 = off.
        top_ps: [num_rows], fp32, of the rest keeps tokens before which the probabilities sum up to less; 1 = off.
        min_ps: [num_rows], fp32, keeps tokens with at least this share of the largest probability; 0 = off.
        seeds: [num_rows], int64: the bits of the unsigned seed.
        positions: [num_rows], int64, of the sampled token in its sequence.

    Returns:
        [num_rows] each: the token, int64; whether the row is free of NaN and positive infinity, bool; the token means nothing
        where it is not. Where every logit is -inf the token is 0.
    """
    vocab_size = logits.shape[1]
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    highest, best = ordered[:, :1], ids[:, 0]
    is_random = temperatures > 0
    weights = ((ordered - highest) / torch.where(is_random, temperatures, 1).unsqueeze(1)).exp()
    ranks = torch.arange(vocab_size, device=logits.device)
    most = torch.where(top_ks > 0, top_ks, vocab_size).unsqueeze(1)
    weights = torch.where(ranks < most, weights, 0)
    cumulated = weights.cumsum(-1, dtype=torch.float64)
    shares = top_ps.unsqueeze(1).double()
    limits = torch.where(shares < 1, shares * cumulated[:, -1:], torch.inf)
    # The most probable token is always kept.
    kept = ((cumulated - weights < limits) | (ranks == 0)) & (weights >= min_ps.unsqueeze(1))
    cumulated = torch.zeros_like(weights).scatter(1, ids, torch.where(kept, weights, 0)).cumsum(-1, dtype=torch.float64)
    total = cumulated[:, -1:]
    # u < 1, but u times the sum may round up to the sum, which no token exceeds.
    targets = torch.minimum(uniform_numbers(seeds, positions).unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    drawn = (cumulated <= targets).sum(-1)
    is_free = logits.amax(-1) < torch.inf  # which NaN is not
    has_any = highest[:, 0] > -torch.inf
    return torch.where(is_random & has_any, drawn, best), is_free


def uniform_numbers(seeds: Tensor, positions: Tensor) -> Tensor:
    """Returns a number in [0, 1), fp64, of 53 random bits, for each seed and position [n], int64.

    Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): key = seed, counter = (position, 0).
    The products keep their low 64 bits; shifts bring in copies of the sign, which are masked away.
    """
    key_0, key_1 = seeds & _LOW, (seeds >> 32) & _LOW
    word_0, word_1 = positions & _LOW, (positions >> 32) & _LOW
    word_2 = word_3 = torch.zeros_like(positions)
    for _ in range(10):
        product_0, product_1 = word_0 * 0xD2511F53, word_2 * 0xCD9E8D57
        word_0, word_1, word_2, word_3 = (
            ((product_1 >> 32) & _LOW) ^ word_1 ^ key_0,
            product_1 & _LOW,
            ((product_0 >> 32) & _LOW) ^ word_3 ^ key_1,
            product_0 & _LOW,
        )
        key_0 = (key_0 + 0x9E3779B9) & _LOW
        key_1 = (key_1 + 0xBB67AE85) & _LOW
    return (((word_0 << 32 | word_1) >> 11) & (2**53 - 1)).double() * 2.0**-53


def _sample_tokens_fake(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    num_rows = logits.shape[0]
    return logits.new_empty(num_rows, dtype=torch.int64), logits.new_empty(num_rows, dtype=torch.bool)


@CustomOp.register("sample_tokens")
class SampleTokens(CustomOp):
    """Draws tokens on a GPU. On a CPU the worker draws among the largest logits alone, which takes it less than any whole row.

    Args:
        ops: the settings of the model's ops.
    """

    __call__: Callable[..., tuple[Tensor, Tensor]]

    def __init__(self, *, ops: OpSettings) -> None:
        super().__init__(ops=ops, cuda_obstacle=ops.triton_obstacle)
        if ops.triton is not None:
            self._triton = ops.triton.ops.sample_tokens.default

    def forward_native(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        """Takes the arguments of `sample_tokens`."""
        return sample_tokens(*args)

    def forward_cuda(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward_native`, by the Triton kernel."""
        tokens, is_free = self._triton(*args)
        return tokens, is_free


register_op(sample_tokens, fake=_sample_tokens_fake)
