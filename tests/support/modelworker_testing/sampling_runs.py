"""Runs the worker's sampling on given logits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from modelworker.ops.sampling import SampleTokens
from modelworker.worker.arrays import IndexArray, Int32Array
from modelworker.worker.batch import GrammarMasks, LogitBias, SamplingBatch, StepBatch, TokenLists
from modelworker.worker.kept_tokens import gap_error
from modelworker.worker.ragged import starts_of
from modelworker.worker.sampling.choice import Samples, choose
from modelworker.worker.sampling.history import TokenStreams
from modelworker.worker.sampling.positions import SampledPositions
from modelworker_testing.sampling_reference import Wish

_NEUTRAL: dict[str, tuple[float, Any]] = {
    "temperature": (0, np.float32), "top_k": (0, np.int32), "top_p": (1, np.float32), "min_p": (0, np.float32),
    "seed": (0, np.uint64), "has_seed": (True, np.bool_), "presence": (0, np.float32), "frequency": (0, np.float32),
    "repetition": (1, np.float32), "num_logprobs": (-1, np.int32), "processed_logprobs": (False, np.bool_),
}  # fmt: skip


def parameters(num_rows: int, **changes: Any) -> SamplingBatch:
    """Sampling parameters, neutral but for those given: one value for all rows, or one for each."""
    arrays = {
        name: np.broadcast_to(np.array(changes.get(name, value), dtype), (num_rows,)).copy()
        for name, (value, dtype) in _NEUTRAL.items()
    }
    return SamplingBatch(**arrays, **{name: value for name, value in changes.items() if name not in _NEUTRAL})


def run(
    logits: Tensor,
    sampling: SamplingBatch,
    positions: Any = 5,
    streams: TokenStreams | None = None,
    sample_tokens: SampleTokens | None = None,
) -> Samples:
    """Samples once in each row of logits, which stay as they are; where an op is given, as on a GPU."""
    num_rows = len(logits)
    places = SampledPositions(
        rows=np.arange(num_rows),
        tokens=np.arange(num_rows),
        positions=np.broadcast_to(np.array(positions, np.int32), (num_rows,)).copy(),
        offsets=np.zeros(num_rows, np.intp),
    )
    with torch.inference_mode():
        return choose(logits.clone(), sampling, places, sampling.seed, streams, sample_tokens)


def run_wishes(logits: Tensor, wishes: Sequence[Wish]) -> Samples:
    """Samples once in each row of logits, as each row wishes."""
    sampling = sampling_of(wishes, logits.shape[1])
    lengths = [len(wish.prompt) + len(wish.output) for wish in wishes]
    streams = TokenStreams(
        starts=starts_of(np.array(lengths, np.int32))[:-1],
        token_ids=np.array([token for wish in wishes for token in wish.prompt + wish.output], np.int32),
        prompt_lens=np.array([len(wish.prompt) for wish in wishes], np.int32),
    )
    return run(logits, sampling, lengths, streams if sampling.has_penalties.any() else None)


def sampling_of(wishes: Sequence[Wish], vocab_size: int) -> SamplingBatch:
    """What the wire makes of wishes; parts that no row has are absent."""
    masked = [row for row, wish in enumerate(wishes) if wish.mask is not None]
    masks = np.array([wishes[row].mask for row in masked], np.bool_).reshape(-1, vocab_size)
    bits = np.packbits(np.pad(masks, ((0, 0), (0, -vocab_size % 32))), axis=1, bitorder="little")
    biased = token_lists([list(wish.bias) for wish in wishes])
    values = np.array([value for wish in wishes for value in wish.bias.values()], np.float32)
    return parameters(
        len(wishes),
        **{
            name: [getattr(wish, name) for wish in wishes]
            for name in (
                "temperature", "top_k", "top_p", "min_p", "seed", "presence", "frequency", "repetition", "num_logprobs",
            )
        },
        processed_logprobs=[wish.processed for wish in wishes],
        allowed=token_lists([wish.allowed for wish in wishes]),
        banned=token_lists([wish.banned for wish in wishes]),
        grammar=GrammarMasks(rows=np.array(masked, np.int32), bits=bits) if masked else None,
        bias=None if biased is None else LogitBias(tokens=biased, values=values),
    )  # fmt: skip


def token_lists(lists: Sequence[Sequence[int]]) -> TokenLists | None:
    """Lists of tokens; None if all are empty."""
    if not any(lists):
        return None
    return TokenLists(
        counts=np.array([len(ids) for ids in lists], np.int32), token_ids=np.array([i for ids in lists for i in ids], np.int32)
    )


def nothing_kept(batch: StepBatch, gaps: IndexArray, firsts: Int32Array) -> Int32Array:
    """What is kept of sequences where there is no token feedback: nothing."""
    raise gap_error(batch, int(gaps[0]), int(firsts[0]), num_kept=0, position=0)
