"""A tiny model over a paged KV cache, its static buffers and its sequences: what graphs are captured of in tests.

Every op has a fixed shape, so that the whole step can be captured on any backend; attention alone is split off for pieces.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from modelworker.graphs.backend import Tensors
from modelworker.graphs.full import FullGraphs
from modelworker.graphs.graph_set import Program
from modelworker.graphs.piecewise import PiecewiseGraphs, Stage
from modelworker.graphs.settings import RuntimeMode
from modelworker.graphs.shapes import GraphKey, StepShape, step_shape
from modelworker_testing.graph_batches import arrays_of

HIDDEN, LAYERS, VOCAB = 16, 3, 50
BLOCK_SIZE, BLOCKS_PER_SEQUENCE = 4, 5
MAX_LEN = BLOCK_SIZE * BLOCKS_PER_SEQUENCE
NUM_INPUTS = 6


class Row(NamedTuple):
    """New tokens of a sequence."""

    sequence: int
    query_len: int


class GraphWorld:
    """A model with sequences in its cache.

    Attributes:
        caches: per layer and kind, [num_slots + 1, HIDDEN]; block 0 is nobody's, and what is dropped goes to the last row.
        contexts: tokens of each sequence in the cache.
    """

    def __init__(self, *, max_sequences: int, max_tokens: int, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.max_sequences = max_sequences
        generator = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).div(HIDDEN**0.5).to(self.device)

        self._embedding, self._positions = weight(VOCAB, HIDDEN) * HIDDEN**0.5, weight(MAX_LEN, HIDDEN)
        self._qkv = [weight(HIDDEN, 3 * HIDDEN) for _ in range(LAYERS)]
        self._out = [weight(HIDDEN, HIDDEN) for _ in range(LAYERS)]
        self.tokens = torch.randint(VOCAB, (max_sequences, MAX_LEN), generator=generator)
        blocks = torch.randperm(max_sequences * BLOCKS_PER_SEQUENCE, generator=generator) + 1
        self.blocks = blocks.view(max_sequences, BLOCKS_PER_SEQUENCE)
        self.contexts = [0] * max_sequences
        num_slots = (len(blocks) + 1) * BLOCK_SIZE
        self.caches = [[torch.zeros(num_slots + 1, HIDDEN, device=self.device) for _ in "kv"] for _ in range(LAYERS)]
        # Token ids, positions, slots, query starts, sequence lengths, block tables.
        shapes: list[tuple[int, ...]] = [(max_tokens,)] * 3 + [(max_sequences + 1,), (max_sequences,)]
        shapes.append((max_sequences, BLOCKS_PER_SEQUENCE))
        self.buffers = [torch.full(shape, -7, dtype=torch.int64, device=self.device) for shape in shapes]

    # The model.

    def forward(self, *inputs: Tensor) -> Tensors:
        """Computes a whole step."""
        token_ids, positions, *metadata = inputs
        x, *heads = self._first(token_ids, positions)
        for layer in range(LAYERS):
            (order,) = self._attend(layer, *heads, *metadata)
            x, *heads = self._next(layer, x, heads[-1], order)
        return (x,)

    def stages(self) -> list[Stage]:
        """The model split at attention."""
        heads = list(range(NUM_INPUTS, NUM_INPUTS + 5))
        stages = [_stage("piece 0", self._first, (0, 1), heads, is_piece=True)]
        for layer in range(LAYERS):
            order, end = heads[-1] + 1, layer == LAYERS - 1
            metadata = range(2, NUM_INPUTS)
            attend = partial(self._attend, layer)
            stages.append(_stage(f"attention {layer}", attend, (*heads[1:], *metadata), [order], is_piece=False))
            results = list(range(order + 1, order + (2 if end else 6)))
            arguments = (heads[0], heads[-1], order)
            stages.append(_stage(f"piece {layer + 1}", partial(self._next, layer), arguments, results, is_piece=True))
            heads = results
        return stages

    def programs(self) -> dict[RuntimeMode, Program]:
        """What can be captured in each mode."""
        stages = self.stages()
        piecewise = PiecewiseGraphs(stages, num_inputs=NUM_INPUTS, outputs=stages[-1].results)
        return {RuntimeMode.FULL: FullGraphs(self.forward), RuntimeMode.PIECEWISE: piecewise}

    def _first(self, token_ids: Tensor, positions: Tensor) -> Tensors:
        return self._heads(0, self._embedding[token_ids] + self._positions[positions])

    def _next(self, layer: int, x: Tensor, attended: Tensor, order: Tensor) -> Tensors:
        """Adds to x in place, and returns the same tensor."""
        x.add_(torch.tanh(attended @ self._out[layer]) + order.sum())
        return (x,) if layer == LAYERS - 1 else self._heads(layer + 1, x)

    def _heads(self, layer: int, x: Tensor) -> Tensors:
        query, key, value = (x @ self._qkv[layer]).chunk(3, -1)
        return x, query, key, value, torch.empty_like(x)

    def _attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        slots: Tensor,
        starts: Tensor,
        lens: Tensor,
        tables: Tensor,
    ) -> Tensors:
        """Writes the cache and `out`; what it returns is a new tensor at every call, always 0."""
        keys, values = self.caches[layer]
        at = torch.where(slots < 0, len(keys) - 1, slots)
        keys.index_put_((at,), key)
        values.index_put_((at,), value)
        tokens = torch.arange(len(query), device=query.device)
        real = tokens < starts[-1]
        row = torch.searchsorted(starts[1:], tokens, right=True).clamp(max=len(lens) - 1)
        position = (lens[row] - starts[row + 1] + tokens).clamp(min=0)
        seen = (tables[row][:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=query.device)).flatten(1)
        masked = torch.arange(seen.shape[1], device=query.device) > position[:, None]
        scores = torch.einsum("td,tsd->ts", query, keys[seen]).masked_fill(masked, float("-inf"))
        attended = torch.einsum("ts,tsd->td", scores.softmax(-1), values[seen].masked_fill(masked[..., None], 0))
        out.copy_(torch.where(real[:, None], attended, 0))
        return (torch.zeros(3, device=query.device),)

    # Steps.

    def shape(self, rows: Sequence[Row], decode_query_lens: Sequence[int]) -> StepShape:
        """The shape of a batch."""
        arrays = arrays_of([(row.query_len, self.contexts[row.sequence]) for row in rows])
        return step_shape(*arrays, decode_query_lens)

    def exact_inputs(self, rows: Sequence[Row]) -> Tensors:
        """The inputs of a step at its own size, in new tensors."""
        token_ids, positions, slots, starts, lens = [], [], [], [0], []
        for sequence, query_len in rows:
            context = self.contexts[sequence]
            for position in range(context, context + query_len):
                token_ids.append(int(self.tokens[sequence, position]))
                positions.append(position)
                slots.append(int(self.blocks[sequence, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE)
            starts.append(len(token_ids))
            lens.append(context + query_len)
        tables = torch.zeros(len(rows), BLOCKS_PER_SEQUENCE, dtype=torch.int64)
        for index, (row, length) in enumerate(zip(rows, lens, strict=True)):
            used = -(-length // BLOCK_SIZE)
            tables[index, :used] = self.blocks[row.sequence, :used]
        arrays = [torch.tensor(values, dtype=torch.int64) for values in (token_ids, positions, slots, starts, lens)]
        return tuple(tensor.to(self.device) for tensor in (*arrays, tables))

    def padded_inputs(self, rows: Sequence[Row], key: GraphKey) -> Tensors:
        """Stages a step in the static buffers, and returns the slices of a key. The rest of the buffers is harmless, no more."""
        exact = self.exact_inputs(rows)
        num_tokens = len(exact[0])
        # Any token will do in the tail, as long as nobody stores it or looks at it.
        fills = (num_tokens % VOCAB, MAX_LEN - 1, -1, num_tokens, 0, 0)
        for buffer, tensor, fill in zip(self.buffers, exact, fills, strict=True):
            buffer.fill_(fill)[: len(tensor)] = tensor
        lengths = [key.num_tokens] * 3
        if key.num_sequences is not None:
            lengths += [key.num_sequences + 1, key.num_sequences, key.num_sequences]
        static = [buffer[:length] for buffer, length in zip(self.buffers, lengths, strict=False)]
        return (*static, *exact[len(static) :])

    def inputs_for(self, key: GraphKey) -> Tensors:
        """Stages a batch for the capture: of padding only in FULL graphs, of one row where attention takes the real rows."""
        return self.padded_inputs([Row(0, 1)] if key.num_sequences is None else [], key)

    def eager(self, rows: Sequence[Row]) -> Tensor:
        """Computes a step at its own size, and leaves the caches as they are."""
        return self.eager_with_caches(rows)[0]

    def eager_with_caches(self, rows: Sequence[Row]) -> tuple[Tensor, list[Tensor]]:
        """Computes a step at its own size; returns its result and what would be in the caches, which stay as they are."""
        kept = [cache.clone() for cache in self.all_caches()]
        (hidden,) = self.forward(*self.exact_inputs(rows))
        written = [cache.clone() for cache in self.all_caches()]
        for cache, old in zip(self.all_caches(), kept, strict=True):
            cache.copy_(old)
        return hidden, written

    def all_caches(self) -> list[Tensor]:
        """The caches of all layers."""
        return [cache for pair in self.caches for cache in pair]

    def reset(self) -> None:
        """Empties the caches."""
        self.contexts[:] = [0] * self.max_sequences
        for cache in self.all_caches():
            cache.zero_()

    def advance(self, rows: Sequence[Row]) -> None:
        """Counts a step's tokens as cached."""
        for sequence, query_len in rows:
            self.contexts[sequence] += query_len

    def dense(self, sequence: int, length: int) -> Tensor:
        """Computes the first tokens of a sequence in one pass without a cache: the oracle of `forward`."""
        x = self._embedding[self.tokens[sequence, :length].to(self.device)] + self._positions[:length]
        for layer in range(LAYERS):
            query, key, value = (x @ self._qkv[layer]).split(HIDDEN, -1)
            scores = (query @ key.T).masked_fill(torch.ones(length, length, device=self.device).triu(1) > 0, float("-inf"))
            x = x + torch.tanh(scores.softmax(-1) @ value @ self._out[layer])
        return x


def _stage(name: str, run: Callable[..., Tensors], arguments: Sequence[int], results: Sequence[int], *, is_piece: bool) -> Stage:
    return Stage(
        name=name,
        run=lambda tensors: run(*tensors),
        arguments=tuple(arguments),
        results=tuple(results),
        is_piece=is_piece,
    )
