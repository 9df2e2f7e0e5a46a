"""Changes logits before they are sampled from: bias, penalties, masks. Formulae and their order are those of the package."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from modelworker.worker.arrays import BoolArray, Float32Array, IndexArray
from modelworker.worker.batch import GrammarMasks, SamplingBatch, TokenLists
from modelworker.worker.ragged import ranges, starts_of
from modelworker.worker.sampling.history import TokenStreams
from modelworker.worker.sampling.positions import SampledPositions
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
    owners, entries = _entries_at(allowed, positions.rows[restricted])
    places = to_device(restricted[owners] * logits.shape[1] + allowed.token_ids[entries], logits.device)
    flat = logits.view(-1)
    kept = flat[places]
    logits.index_fill_(0, to_device(restricted, logits.device), _NEVER)
    flat[places] = kept


def _keep_grammatical(logits: Tensor, grammar: GrammarMasks, positions: SampledPositions) -> None:
    masked = np.flatnonzero(np.isin(positions.rows, grammar.rows))
    masks = np.searchsorted(grammar.rows, positions.rows[masked]) + positions.offsets[masked]
    # 0 or -inf for the eight tokens of each byte: 2.8 ms for 64 masks of 49,152, to which a boolean mask's use alone takes 10.
    addends = np.take(_addends_of_bytes(), grammar.bits[masks], axis=0)
    addends = addends.reshape(len(masked), 8 * grammar.bits.shape[1])[:, : logits.shape[1]]
    if len(masked) == len(logits):
        logits.add_(to_device(addends, logits.device))
    else:
        logits.index_add_(0, to_device(masked, logits.device), to_device(addends, logits.device))


def _addends_of_bytes() -> Float32Array:
    """[256, 8]: what the bits of each byte add to the logits of their tokens, the lowest bit first."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits, np.float32(0), np.float32(_NEVER))
