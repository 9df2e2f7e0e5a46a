"""Steps for checks of graphs: each is made twice, over different blocks, so that what one run leaves behind misleads the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from modelworker.graphs.shapes import GraphKey
from modelworker.worker.arrays import IndexArray, Int32Array
from modelworker.worker.batch import StepBatch
from modelworker.worker.check_batch import CheckRow, make_check_batch

# Enough for a table with a block behind another, and for one that gets shorter. More rows of that kind would only take longer:
# the others have no more blocks than they need.
_MAX_BLOCKS_PER_SEQUENCE = 3
_NUM_LONG_ROWS = 4


class TwinRow(NamedTuple):
    """A row over two sets of blocks.

    Attributes:
        token_ids: [query length], int32.
        context_len: of the row.
        first_table: [width], int32.
        second_table: [width], int32; each block takes the place of the one at the same index of the first.
    """

    token_ids: Int32Array
    context_len: int
    first_table: Int32Array
    second_table: Int32Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TwinStep:
    """Rows over two sets of blocks, of which steps are made.

    Attributes:
        rows: in the order of the step that has all of them.
        first_blocks: [n], int32; all blocks of the first set.
        second_blocks: [n], int32; each takes the place of the block at the same index of the first.
    """

    rows: tuple[TwinRow, ...]
    first_blocks: Int32Array
    second_blocks: Int32Array

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return sum(len(row.token_ids) for row in self.rows)

    def over_first(self, indices: Sequence[int] | None = None) -> StepBatch:
        """Makes the step of some rows, or of all, over the first set."""
        return _batch([(row, row.first_table) for row in self._chosen(indices)])

    def over_second(self, indices: Sequence[int] | None = None) -> StepBatch:
        """Makes the step of some rows, or of all, over the second set."""
        return _batch([(row, row.second_table) for row in self._chosen(indices)])

    def over_block(self, block: int) -> StepBatch:
        """Makes the step of all rows with one block in all places of their tables."""
        return _batch([(row, np.full_like(row.first_table, block)) for row in self.rows])

    def tokens_of(self, indices: Sequence[int]) -> IndexArray:
        """Returns where the tokens of some rows are in the step of all."""
        starts = np.cumsum([0, *(len(row.token_ids) for row in self.rows)])
        return np.concatenate([np.arange(0), *(np.arange(starts[index], starts[index + 1]) for index in indices)])

    def select(self, random: np.random.Generator, *, num_tokens: int, max_rows: int) -> tuple[int, ...]:
        """Chooses rows, in random order, that together have at most so many tokens; as many as are met on the way."""
        chosen: list[int] = []
        for index in random.permutation(len(self.rows)):
            length = len(self.rows[index].token_ids)
            if length <= num_tokens and len(chosen) < max_rows:
                chosen.append(int(index))
                num_tokens -= length
        return tuple(chosen)

    def _chosen(self, indices: Sequence[int] | None) -> Sequence[TwinRow]:
        return self.rows if indices is None else [self.rows[index] for index in indices]


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

        In a graph of any mix the first row has one token, and short rows are more frequent than long ones.

        Args:
            key: of the graph.
            num_tokens: at most so many; fewer where the graph's rows or the cache's blocks are used up.

        Returns:
            None where the cache has no room for a single row twice.
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
        tables = zip(self._tables(first, counts), self._tables(second, counts), strict=True)
        return TwinStep(
            rows=tuple(
                TwinRow(token_ids, context_len, *pair)
                for (_, context_len), token_ids, pair in zip(rows, tokens, tables, strict=True)
            ),
            first_blocks=first,
            second_blocks=second,
        )

    def is_possible(self, key: GraphKey) -> bool:
        """Returns whether any step can have the rows of a graph."""
        return (key.uniform_query_len or 0) + self._smallest_context(key) <= self.max_model_len

    def max_rows(self, key: GraphKey) -> int:
        """Returns how many rows a step for a graph can have."""
        return self.max_sequences if key.num_sequences is None else key.num_sequences

    def _rows(self, key: GraphKey, num_tokens: int) -> list[tuple[int, int]]:
        """Returns (query length, context length) of rows that fit the graph, and the cache twice."""
        smallest_context = self._smallest_context(key)
        blocks = (self.num_blocks - 1) // 2
        rows: list[tuple[int, int]] = []
        while num_tokens > 0 and len(rows) < self.max_rows(key):
            least = (key.uniform_query_len or 1) + smallest_context
            longest = min(max(_MAX_BLOCKS_PER_SEQUENCE * self.block_size, least), self.max_model_len)
            query_len = key.uniform_query_len or self._any_query_len(min(num_tokens, longest), is_first=not rows)
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

    def _any_query_len(self, most: int, *, is_first: bool) -> int:
        return 1 if is_first else int(2 ** self.random.uniform(0, np.log2(most)))

    def _smallest_context(self, key: GraphKey) -> int:
        return 0 if key.uniform_query_len is None else 1

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


def _batch(rows: Sequence[tuple[TwinRow, Int32Array]]) -> StepBatch:
    return make_check_batch([CheckRow(token_ids=row.token_ids, context_len=row.context_len, blocks=table) for row, table in rows])
