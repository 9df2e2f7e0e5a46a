"""Changes logits before they are sampled from: bias, penalties, masks. Formulae and their order are those of the package."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from modelworker.worker.batch import BoolArray, GrammarMasks, IndexArray, Int32Array, SamplingBatch, TokenLists
from modelworker.worker.sampling.history import TokenStreams
from modelworker.worker.sampling.positions import SampledPositions
from modelworker.worker.sampling.ragged import ranges, starts_of
from modelworker.worker.sampling.tensors import to_device

_LARGEST = torch.finfo(torch.float32).max
_NEVER = float("-inf")


def edited_positions(sampling: SamplingBatch, positions: SampledPositions) -> BoolArray:
    """[n]: whether the logits of a position are changed before they are sampled from."""
    rows = np.zeros(len(sampling.temperature), np.bool_)
    for lists in (sampling.allowed, sampling.banned, None if sampling.bias is None else sampling.bias.tokens):
        if lists is not None:
            rows |= lists.counts > 0
    if sampling.grammar is not None:
        rows[sampling.grammar.rows] = True
    return (rows | sampling.has_penalties)[positions.rows]


def edit_logits(logits: Tensor, sampling: SamplingBatch, positions: SampledPositions, streams: TokenStreams | None) -> None:
    """Hot path: applies bias, penalties and masks, in place.

    Masks come last here: what they set to -inf stays there whatever is added to it or multiplied with it.

    Args:
        logits: [n, vocab_size], fp32, finite at edited positions. Afterwards finite or -inf there.
        sampling: of the step.
        positions: [n], of these logits.
        streams: tokens of rows with penalties.
    """
    vocab_size = logits.shape[1]
    if sampling.bias is not None:
        owners, entries = _entries_at(sampling.bias.tokens, positions.rows)
        values = to_device(sampling.bias.values[entries], logits.device)
        keys = owners * vocab_size + sampling.bias.tokens.token_ids[entries]
        _change(logits, keys, lambda chosen: chosen + values)
    if streams is not None:
        _penalize(logits, sampling, positions, streams)
    if sampling.banned is not None:
        owners, entries = _entries_at(sampling.banned, positions.rows)
        keys = owners * vocab_size + sampling.banned.token_ids[entries]
        logits.view(-1)[to_device(keys, logits.device)] = _NEVER
    if sampling.allowed is not None:
        _keep_allowed(logits, sampling.allowed, positions)
    if sampling.grammar is not None:
        _keep_grammatical(logits, sampling.grammar, positions)


def _change(logits: Tensor, keys: IndexArray, change: Callable[[Tensor], Tensor]) -> None:
    """Replaces single logits, row * vocab_size + id, by finite functions of theirs. A key may stand more than once."""
    flat, places = logits.view(-1), to_device(keys, logits.device)
    flat[places] = change(flat[places]).clamp_(-_LARGEST, _LARGEST)


def _entries_at(lists: TokenLists, rows: IndexArray) -> tuple[IndexArray, IndexArray]:
    """Enumerates the entries of the list of each of some rows: which of the rows, and which entry."""
    return ranges(starts_of(lists.counts)[rows], lists.counts[rows])


def _penalize(logits: Tensor, sampling: SamplingBatch, positions: SampledPositions, streams: TokenStreams) -> None:
    vocab_size, device = logits.shape[1], logits.device
    penalized = np.flatnonzero(sampling.has_penalties[positions.rows])
    rows = positions.rows[penalized]
    owners, entries = ranges(streams.starts[rows], positions.positions[penalized])
    keys = penalized[owners] * vocab_size + streams.token_ids[entries]
    repetition = sampling.repetition[rows][owners]
    repeats = repetition != 1
    if repeats.any():
        factors = to_device(repetition[repeats], device)
        _change(logits, keys[repeats], lambda chosen: torch.where(chosen > 0, chosen / factors, chosen * factors))
    subtracts = (sampling.presence[rows] != 0) | (sampling.frequency[rows] != 0)
    is_output = entries - streams.starts[rows][owners] >= streams.prompt_lens[rows][owners]
    counted, counts = np.unique(keys[subtracts[owners] & is_output], return_counts=True)
    if counted.size:
        owning = positions.rows[counted // vocab_size]
        amounts = to_device(sampling.frequency[owning] * counts.astype(np.float32) + sampling.presence[owning], device)
        _change(logits, counted, lambda chosen: chosen - amounts)


def _keep_allowed(logits: Tensor, allowed: TokenLists, positions: SampledPositions) -> None:
    restricted = np.flatnonzero(allowed.counts[positions.rows] > 0)
    if restricted.size == 0:
        return
    owners, entries = _entries_at(allowed, positions.rows[restricted])
    forbidden = torch.ones(len(restricted), logits.shape[1], dtype=torch.bool, device=logits.device)
    forbidden.view(-1)[to_device(owners * logits.shape[1] + allowed.token_ids[entries], logits.device)] = False
    _forbid(logits, restricted, forbidden)


def _keep_grammatical(logits: Tensor, grammar: GrammarMasks, positions: SampledPositions) -> None:
    masked = np.flatnonzero(np.isin(positions.rows, grammar.rows))
    if masked.size == 0:
        return
    masks = np.searchsorted(grammar.rows, positions.rows[masked]) + positions.offsets[masked]
    bits = np.unpackbits(grammar.bits[masks], axis=1, count=logits.shape[1], bitorder="little")
    _forbid(logits, masked, to_device(bits, logits.device) == 0)


def _forbid(logits: Tensor, positions: IndexArray | Int32Array, forbidden: Tensor) -> None:
    """Sets logits to -inf: of `positions`, where `forbidden` [number of positions, vocab_size]."""
    if len(positions) == len(logits):
        logits.masked_fill_(forbidden, _NEVER)
    else:
        places = to_device(positions, logits.device)
        logits[places] = logits[places].masked_fill_(forbidden, _NEVER)
