"""The inputs of a step, in memory that never moves: captured graphs read them there."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from modelworker.worker.arrays import Int32Array, Int64Array
from modelworker.worker.batch import StepBatch
from modelworker.worker.models.causal_lm import AttentionMetadata

NULL_BLOCK = 0
NO_SLOT = -1


class StepInputs(NamedTuple):
    """What the decoder is given, in this order.

    Attributes:
        token_ids: [num_tokens], int32.
        positions: [num_tokens], int32.
        slots: [num_tokens], int64.
        query_starts: [num_sequences + 1], int32.
        seq_lens: [num_sequences], int32.
        block_tables: [num_sequences, width], int32.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    query_starts: Tensor
    seq_lens: Tensor
    block_tables: Tensor

    @property
    def attention(self) -> AttentionMetadata:
        """What attention is given."""
        return AttentionMetadata(self.query_starts, self.seq_lens, self.block_tables, self.slots)


RunDecoder = Callable[..., Sequence[Tensor]]
"""Takes the tensors of `StepInputs` and returns the hidden states, [num_tokens, hidden_size], as the only one of a sequence."""


class StepBuffers:
    """Room for the inputs of the largest step.

    They are written on the host and copied to the device at once; on a CPU, host and device are the same memory.

    Args:
        max_tokens: of a step, padding included.
        max_sequences: likewise.
        max_blocks: of a block table.
        device: where the model computes.

    Attributes:
        max_tokens: of a step, padding included.
        max_sequences: likewise.
        max_blocks: of a block table.
    """

    def __init__(self, *, max_tokens: int, max_sequences: int, max_blocks: int, device: torch.device) -> None:
        # The tables come last: what lies before them, and as many of their rows as a step has, are one range.
        sizes = (2 * max_tokens, max_tokens, max_tokens, max_sequences + 1, max_sequences, max_sequences * max_blocks)
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = self._host if device.type == "cpu" else torch.zeros_like(self._host, device=device)
        self._uploaded = torch.cuda.Event() if device.type == "cuda" else None
        self.max_tokens = max_tokens
        self.max_sequences = max_sequences
        self.max_blocks = max_blocks
        self._tables_start = sum(sizes[:-1])
        slots, token_ids, positions, starts, lens, tables = self._device.split(sizes)
        self._inputs = StepInputs(token_ids, positions, slots.view(torch.int64), starts, lens, tables.view(-1, max_blocks))
        host = self._host.numpy()
        offsets = np.cumsum((0, *sizes))
        parts = [host[start:end] for start, end in itertools.pairwise(offsets)]
        self._slots: Int64Array = parts[0].view(np.int64)
        self._token_ids, self._positions, self._starts, self._lens = parts[1:5]
        self._tables: Int32Array = parts[5].reshape(-1, max_blocks)
        # Columns of the tables that may hold blocks of an earlier step.
        self._used_columns = 0
        self._numbers = np.arange(max_sequences + 1, dtype=np.int32)

    def stage(self, batch: StepBatch, block_size: int, *, num_tokens: int, num_sequences: int) -> None:
        """Hot path: writes a step, and makes everything harmless up to the numbers of tokens and sequences it is padded to.

        Padded tokens have token id and position 0, and no slot; padded sequences no tokens, no context, and the null block.
        """
        real_tokens, real_sequences = batch.num_tokens, batch.num_sequences
        self._wait_for_upload()
        self._token_ids[:real_tokens] = batch.token_ids
        self._stage_tables(_tables_of(batch), num_sequences)
        if real_tokens == real_sequences:
            self._stage_single_tokens(batch, block_size)
        else:
            self._positions[:real_tokens] = batch.positions
            self._slots[:real_tokens] = batch.slots(block_size)
            self._starts[: real_sequences + 1] = batch.query_starts
            self._lens[:real_sequences] = batch.seq_lens
        self._pad(real_tokens, num_tokens, real_sequences, num_sequences)
        self._upload(num_sequences)

    def stage_blank(self, *, num_tokens: int, num_sequences: int) -> None:
        """Writes a step that leaves the KV cache alone: equal shares of tokens that attend to the null block, or only padding."""
        self._wait_for_upload()
        starts = np.arange(num_sequences + 1) * (num_tokens // max(num_sequences, 1))
        self._starts[: num_sequences + 1] = starts
        self._lens[:num_sequences] = np.diff(starts)
        self._tables[:num_sequences] = NULL_BLOCK
        self._pad(0, num_tokens, num_sequences, num_sequences)
        self._upload(num_sequences)

    def inputs(self, num_tokens: int, num_sequences: int) -> StepInputs:
        """Returns the first so many tokens and sequences of the buffers."""
        whole = self._inputs
        return StepInputs(
            whole.token_ids[:num_tokens],
            whole.positions[:num_tokens],
            whole.slots[:num_tokens],
            whole.query_starts[: num_sequences + 1],
            whole.seq_lens[:num_sequences],
            whole.block_tables[:num_sequences],
        )

    def _stage_single_tokens(self, batch: StepBatch, block_size: int) -> None:
        """Hot path: writes what follows from one token in each row: its position is the context's length."""
        num_rows = batch.num_sequences
        rows = self._numbers[:num_rows]
        self._positions[:num_rows] = batch.context_lens
        self._starts[: num_rows + 1] = self._numbers[: num_rows + 1]
        np.add(batch.context_lens, 1, out=self._lens[:num_rows])
        blocks, offsets = np.divmod(batch.context_lens, block_size)
        slots = self._slots[:num_rows]
        slots[:] = _tables_of(batch)[rows, blocks]
        slots *= block_size
        slots += offsets

    def _stage_tables(self, tables: Int32Array, num_sequences: int) -> None:
        rows, width = tables.shape
        self._tables[:rows, :width] = tables
        self._tables[:rows, width : self._used_columns] = NULL_BLOCK
        self._tables[rows:num_sequences, : self._used_columns] = NULL_BLOCK
        self._used_columns = max(self._used_columns, width)

    def _pad(self, real_tokens: int, num_tokens: int, real_sequences: int, num_sequences: int) -> None:
        if num_tokens > real_tokens:
            self._token_ids[real_tokens:num_tokens] = 0
            self._positions[real_tokens:num_tokens] = 0
            self._slots[real_tokens:num_tokens] = NO_SLOT
        if num_sequences > real_sequences:
            self._starts[real_sequences + 1 : num_sequences + 1] = real_tokens
            self._lens[real_sequences:num_sequences] = 0

    def _upload(self, num_sequences: int) -> None:
        if self._uploaded is not None:
            used = self._tables_start + num_sequences * self.max_blocks
            self._device[:used].copy_(self._host[:used], non_blocking=True)
            self._uploaded.record()

    def _wait_for_upload(self) -> None:
        """Waits until the device has read what was staged before."""
        if self._uploaded is not None:
            self._uploaded.synchronize()


def _tables_of(batch: StepBatch) -> Int32Array:
    """Hot path: returns the block tables; where all are equally long they are there already, row by row."""
    num_rows = batch.num_sequences
    width = len(batch.block_ids) // num_rows if num_rows else 0
    if width and len(batch.block_ids) == width * num_rows and (num_rows == 1 or bool((batch.block_counts == width).all())):
        return batch.block_ids.reshape(num_rows, width)
    return batch.block_tables
