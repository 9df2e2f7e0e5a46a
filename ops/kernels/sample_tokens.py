"""sample_tokens: one program draws a token from a row of logits, however the row is filtered.

For logits z the weights are w = exp((z - max z) / temperature). What top-k, top-p and min-p keep of a row is a number of its most
probable tokens, ties to the lowest id; so a row is described by the smallest logit that it keeps and by how many tokens with that
logit. Both are found by bisection over the order of floats: a pass over the row for each bit, out of the L2 cache, instead of a
sort. The draw is the first token, in order of ids, at which the cumulated weights of the kept ones exceed u times their sum.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from modelworker.ops.kernels.arguments import check_dense, check_vector
from modelworker.ops.kernels.geometry import SAMPLED, SAMPLED_WARPS


@triton.jit
def _uniform(seed: tl.tensor, position: tl.tensor) -> tl.tensor:
    """Returns a number in [0, 1), fp64, of 53 random bits.

    Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): key = seed, counter = (position, 0).
    """
    key_0, key_1 = seed & 0xFFFFFFFF, seed >> 32
    word_0, word_1 = position & 0xFFFFFFFF, position >> 32
    word_2, word_3 = tl.zeros_like(position), tl.zeros_like(position)
    for _ in range(10):
        product_0 = word_0 * 0xD2511F53
        product_1 = word_2 * 0xCD9E8D57
        word_0, word_1, word_2, word_3 = (
            (product_1 >> 32) ^ word_1 ^ key_0,
            product_1 & 0xFFFFFFFF,
            (product_0 >> 32) ^ word_3 ^ key_1,
            product_0 & 0xFFFFFFFF,
        )
        key_0 = (key_0 + 0x9E3779B9) & 0xFFFFFFFF
        key_1 = (key_1 + 0xBB67AE85) & 0xFFFFFFFF
    return (((word_0 << 32) | word_1) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _rank(logits: tl.tensor) -> tl.tensor:
    """Returns integers, int64, in the order of fp32 numbers. The two zeros have one."""
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _count_and_sum(
    row: tl.tensor, bound: tl.tensor, highest: tl.tensor, temperature: tl.tensor, VOCAB: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """Returns how many tokens rank above a bound, and the sum of their weights, fp64.

    Each lane adds up its own: the lanes are joined once for the whole row.
    """
    counts = tl.zeros([BLOCK], tl.int32)
    totals = tl.zeros([BLOCK], tl.float64)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logits = tl.load(row + token, mask=token < VOCAB, other=float("-inf"))
        is_above = (token < VOCAB) & (_rank(logits) > bound)
        counts += is_above.to(tl.int32)
        weights = tl.exp((logits - highest) / temperature)
        totals += tl.where(is_above, weights, 0.0).to(tl.float64)
    return tl.sum(counts, 0), tl.sum(totals, 0)


@triton.jit
def _best(row: tl.tensor, VOCAB: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Returns the largest logit, the lowest id that has it, and whether the row has neither NaN nor positive infinity."""
    highs = tl.full([BLOCK], float("-inf"), tl.float32)
    firsts = tl.arange(0, BLOCK)
    num_bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logits = tl.load(row + token, mask=token < VOCAB, other=float("-inf"))
        num_bad += ((logits != logits) | (logits == float("inf"))).to(tl.int32)  # noqa: PLR0124  (NaN is not)
        firsts = tl.where(logits > highs, token, firsts)
        highs = tl.where(logits > highs, logits, highs)
    highest = tl.max(highs, 0)
    best = tl.min(tl.where(highs == highest, firsts, VOCAB), 0).to(tl.int64)
    return highest, best, tl.sum(num_bad, 0) == 0


@triton.jit
def _threshold(
    row: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Returns the lowest rank that top-k and top-p keep, and how many tokens of that rank."""
    lowest = tl.full([], -2139095041, tl.int64)  # the rank of negative infinity
    ties = tl.full([], VOCAB, tl.int32)
    top = _rank(highest)
    if (top_k > 0) & (top_k < VOCAB):
        # The lowest rank above which there are fewer than k tokens.
        below, until = lowest - 1, top
        while until - below > 1:
            middle = below + (until - below) // 2
            count, _ = _count_and_sum(row, middle, highest, temperature, VOCAB, BLOCK)
            is_enough = count < top_k
            until = tl.where(is_enough, middle, until)
            below = tl.where(is_enough, below, middle)
        lowest = until
        count, _ = _count_and_sum(row, lowest, highest, temperature, VOCAB, BLOCK)
        ties = top_k - count
    if top_p < 1:
        above, sum_above = _count_and_sum(row, lowest, highest, temperature, VOCAB, BLOCK)
        including, sum_including = _count_and_sum(row, lowest - 1, highest, temperature, VOCAB, BLOCK)
        # Of the lowest rank, top-k keeps some.
        weight = (sum_including - sum_above) / tl.maximum(including - above, 1).to(tl.float64)
        kept = sum_above + weight * tl.minimum(ties, including - above).to(tl.float64)
        limit = top_p.to(tl.float64) * kept
        # The lowest rank above which the weights sum up to less than the limit.
        below, until = lowest - 1, top
        while until - below > 1:
            middle = below + (until - below) // 2
            _, total = _count_and_sum(row, middle, highest, temperature, VOCAB, BLOCK)
            is_enough = total < limit
            until = tl.where(is_enough, middle, until)
            below = tl.where(is_enough, below, middle)
        above, sum_above = _count_and_sum(row, until, highest, temperature, VOCAB, BLOCK)
        including, sum_including = _count_and_sum(row, until - 1, highest, temperature, VOCAB, BLOCK)
        weight = (sum_including - sum_above) / tl.maximum(including - above, 1).to(tl.float64)
        room = tl.ceil((limit - sum_above) / tl.maximum(weight, 1e-300))
        most = tl.where(until == lowest, ties, VOCAB)
        # The most probable token is always kept.
        ties = tl.maximum(tl.minimum(room, most.to(tl.float64)).to(tl.int32), tl.where(above == 0, 1, 0))
        lowest = until
    return lowest, ties


# Seeds, positions and parameters are slices of buffers: they may start anywhere.
@triton.jit(do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps", "seeds", "positions"])
def _sample_tokens_kernel(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    tokens: tl.tensor,
    are_finite: tl.tensor,
    row_stride: tl.tensor,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * row_stride
    highest, best, is_finite = _best(row, VOCAB, BLOCK)
    tl.store(are_finite + index, is_finite)
    tl.store(tokens + index, best)
    temperature = tl.load(temperatures + index)
    if (temperature > 0) & is_finite & (highest > float("-inf")):
        top_p, min_p = tl.load(top_ps + index), tl.load(min_ps + index)
        lowest, ties = _threshold(row, highest, temperature, tl.load(top_ks + index), top_p, VOCAB, BLOCK)
        # Twice over what is kept: for its sum, then to the token at which the sum exceeds its share.
        number = _uniform(tl.load(seeds + index).to(tl.uint64), tl.load(positions + index).to(tl.uint64))
        target = tl.full([], float("inf"), tl.float64)
        drawn = tl.full([], -1, tl.int64)
        for turn in range(2):
            total = tl.zeros([], tl.float64)
            num_ties = tl.zeros([], tl.int32)
            last = best
            for start in range(0, VOCAB, BLOCK):
                token = start + tl.arange(0, BLOCK)
                values = tl.load(row + token, mask=token < VOCAB, other=float("-inf"))
                ranks = _rank(values)
                is_tie = (ranks == lowest) & (token < VOCAB)
                is_kept = (ranks > lowest) | (is_tie & (num_ties + tl.cumsum(is_tie.to(tl.int32), 0) <= ties))
                num_ties += tl.sum(is_tie.to(tl.int32), 0)
                weights = tl.exp((values - highest) / temperature)
                weights = tl.where(is_kept & (token < VOCAB) & (weights >= min_p), weights, 0.0)
                cumulated = total + tl.cumsum(weights.to(tl.float64), 0)
                exceeds = tl.min(tl.where((cumulated > target) & (weights > 0), token, VOCAB), 0)
                drawn = tl.where((drawn < 0) & (exceeds < VOCAB), exceeds.to(tl.int64), drawn)
                last = tl.maximum(last, tl.max(tl.where(weights > 0, token, 0), 0).to(tl.int64))
                total += tl.sum(weights.to(tl.float64), 0)
            target = number * total
            if turn == 1:
                # u < 1, but u times the sum may round up to the sum, which no token exceeds.
                tl.store(tokens + index, tl.where(drawn < 0, last, drawn))


def launch_sample_tokens(
    logits: Tensor, temperatures: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Hot path: launches the kernel; takes and returns what `ops.sampling.sample_tokens` does.

    Raises:
        ValueError: a tensor has another dtype, shape or layout than the kernel reads.
    """
    if logits.dtype != torch.float32:
        raise ValueError(f"logits: expected {torch.float32}, found {logits.dtype}")
    check_dense("logits", logits)
    num_rows, vocab_size = logits.shape
    check_vector("temperatures", temperatures, size=num_rows, dtype=torch.float32)
    check_vector("top_ks", top_ks, size=num_rows, dtype=torch.int32)
    check_vector("top_ps", top_ps, size=num_rows, dtype=torch.float32)
    check_vector("min_ps", min_ps, size=num_rows, dtype=torch.float32)
    check_vector("seeds", seeds, size=num_rows, dtype=torch.int64)
    check_vector("positions", positions, size=num_rows, dtype=torch.int64)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    are_finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    if num_rows:
        _sample_tokens_kernel[(num_rows,)](
            *(logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, tokens, are_finite, logits.stride(0)),
            VOCAB=vocab_size,
            BLOCK=min(SAMPLED, triton.next_power_of_2(vocab_size)),
            num_warps=SAMPLED_WARPS,
        )
    return tokens, are_finite
