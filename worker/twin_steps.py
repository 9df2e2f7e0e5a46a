"""Steps for checks of graphs: each is made twice, over different blocks, so that what one run leaves behind misleads the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from modelworker.graphs.shapes import GraphKey
from modelworker.worker.batch import Int32Array, StepBatch
from modelworker.worker.check_batch import CheckRow, make_check_batch

# Enough for a table with a block behind another, and for one that gets shorter. More rows of that kind would only take longer:
# the others have no more blocks than they need.
_MAX_BLOCKS_PER_SEQUENCE = 3
_NUM_LONG_ROWS = 4


class TwinStep(NamedTuple):
    """One step over two sets of blocks.

    Attributes:
        first: the step.
        second: the same rows and tokens over other blocks.
        first_blocks: [n], int32; all blocks of the first.
        second_blocks: [n], int32; each takes the place of the block at the same index of the first.
    """

    first: StepBatch
    second: StepBatch
    first_blocks: Int32Array
    second_blocks: Int32Array


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMaker:
    """Makes random steps that fit a graph.

    Attributes:
        random: where they come from.
        block_size: of the KV cache.
        num_blocks: likewise, the null block included.
        max_sequences: of a step.
        max_model_len: of a sequence.
        vocab_size: of the model.
    """

    random: np.random.Generator
    block_size: int
    num_blocks: int
    max_sequences: int
    max_model_len: int
    vocab_size: int

    def make(self, key: GraphKey, num_tokens: int) -> TwinStep | None:
        """Makes a step for a graph, of decode rows only where the graph is for those.

        Args:
            key: of the graph.
            num_tokens: at most so many; fewer where the graph's rows or the cache's blocks are used up.

        Returns:
            None where neither the model nor the cache has room for a single row.
        """
        rows = self._rows(key, num_tokens)
        if not rows:
            return None
        tokens = [self.random.integers(0, self.vocab_size, query_len).astype(np.int32) for query_len, _ in rows]
        counts = [self._num_blocks_of(*row) for row in rows]
        total = sum(counts)
        first = np.arange(1, total + 1, dtype=np.int32)
        # Neither beside the first nor in its order.
        second = np.arange(2 * total, total, -1, dtype=np.int32)
        return TwinStep(
            first=_batch(rows, tokens, self._tables(first, counts)),
            second=_batch(rows, tokens, self._tables(second, counts)),
            first_blocks=first,
            second_blocks=second,
        )

    def _rows(self, key: GraphKey, num_tokens: int) -> list[tuple[int, int]]:
        """Returns (query length, context length) of rows that fit the graph, and the cache twice."""
        smallest_context = 0 if key.uniform_query_len is None else 1
        max_rows = self.max_sequences if key.num_sequences is None else key.num_sequences
        blocks = (self.num_blocks - 1) // 2
        rows: list[tuple[int, int]] = []
        while num_tokens > 0 and len(rows) < max_rows:
            longest = min(_MAX_BLOCKS_PER_SEQUENCE * self.block_size, self.max_model_len)
            query_len = key.uniform_query_len or int(self.random.integers(1, min(num_tokens, longest) + 1))
            if query_len > num_tokens or query_len + smallest_context > longest:
                break
            if len(rows) >= _NUM_LONG_ROWS:
                longest = min(self._num_blocks_of(query_len, 1) * self.block_size, longest)
            most_context = min(longest, blocks * self.block_size) - query_len
            if most_context < smallest_context:
                break
            context_len = int(self.random.integers(smallest_context, most_context + 1))
            rows.append((query_len, context_len))
            num_tokens -= query_len
            blocks -= self._num_blocks_of(query_len, context_len)
        return rows

    def _tables(self, blocks: Int32Array, counts: Sequence[int]) -> list[Int32Array]:
        """Deals blocks to rows. Where there is room, each table ends in the last block of the cache, which no row has a use for."""
        tables = np.split(blocks, np.cumsum(counts)[:-1])
        last = self.num_blocks - 1
        if 2 * len(blocks) >= last:
            return tables
        widest = -(-self.max_model_len // self.block_size)
        return [np.append(table, np.int32(last)) if len(table) < widest else table for table in tables]

    def _num_blocks_of(self, query_len: int, context_len: int) -> int:
        return -(-(query_len + context_len) // self.block_size)


def _batch(rows: Sequence[tuple[int, int]], tokens: Sequence[Int32Array], tables: Sequence[Int32Array]) -> StepBatch:
    return make_check_batch(
        [
            CheckRow(token_ids=sampled, context_len=context_len, blocks=table)
            for (_, context_len), sampled, table in zip(rows, tokens, tables, strict=True)
        ]
    )
