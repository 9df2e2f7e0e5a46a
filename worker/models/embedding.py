"""The token embedding and the head, whole or divided among tensor-parallel ranks by the vocabulary."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from modelworker.ops.cpu.packing import WeightArena
from modelworker.ops.embedding import Embedding
from modelworker.ops.linear import LinearArgmax, LinearFloat32, best_of
from modelworker.ops.op_settings import OpSettings
from modelworker.worker.models.layer import CheckpointSlot, Layer, empty_parameter, replace_parameter
from modelworker.worker.models.tensor_parallel import all_gather_columns, all_reduce
from modelworker.worker.models.weight_part import WeightPart


def _vocabulary_part(prefix: str, vocab_size: int, hidden_size: int, tp_rank: int, tp_size: int) -> WeightPart:
    """This rank's rows: ceil(vocab_size / tp_size), fewer on the last ranks where that isn't even."""
    share = -(-vocab_size // tp_size)
    start = min(tp_rank * share, vocab_size)
    return WeightPart(
        name=prefix,
        out_features=vocab_size,
        in_features=hidden_size,
        split="out",
        source_start=start,
        target_start=0,
        length=min(share, vocab_size - start),
    )


class VocabParallelEmbedding(Layer):
    """Looks token ids up in `weight` [vocab_size, hidden_size]; a rank holds some of its rows, the ranks' results are summed."""

    __call__: Callable[..., Tensor]
    weight: Tensor

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        prefix: str,
        dtype: torch.dtype,
        ops: OpSettings,
        tp_rank: int = 0,
        tp_size: int = 1,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        if disable_tp:
            tp_rank, tp_size = 0, 1
        self.prefix = prefix
        self.tp_size = tp_size
        self.part = _vocabulary_part(prefix, vocab_size, hidden_size, tp_rank, tp_size)
        self._ops = ops
        self.store_for(None)
        self.register_parameter("weight", empty_parameter(self.part.length, hidden_size, dtype=dtype))

    def store_for(self, product: LinearFloat32 | None) -> None:
        """Decides how the weight is stored once it is loaded: as the head's product reads it, or by rows."""
        # In a tuple: the op is a part of the head, not of this layer.
        self._product = (product,) if product is not None else ()
        self.lookup = Embedding(self.part.length, self.part.in_features, product=product, ops=self._ops)

    def checkpoint_slots(self) -> Iterator[CheckpointSlot]:
        """Yields the slot of the weight."""
        yield self.part.weight_slot(f"{self.prefix}.weight")

    def process_after_loading(self, device: torch.device, arena: WeightArena) -> None:
        """Packs the weight where a tied head's product takes it packed."""
        for product in self._product:
            replace_parameter(self, "weight", product.pack(self.weight, arena))

    def forward(self, token_ids: Tensor) -> Tensor:
        """Hot path: embeds token_ids [num_tokens], each in 0 .. vocab_size - 1, and returns [num_tokens, hidden_size]."""
        if self.tp_size == 1:
            return self.lookup(self.weight, token_ids)
        local = token_ids - self.part.source_start
        elsewhere = (local < 0) | (local >= self.part.length)
        if self.part.length:
            embedded = self.lookup(self.weight, local.masked_fill(elsewhere, 0)).masked_fill(elsewhere[:, None], 0)
        else:
            embedded = self.weight.new_zeros(token_ids.shape[0], self.part.in_features)
        return all_reduce(embedded)


class ParallelLMHead(Layer):
    """The head: float32 logits of hidden states.

    It has a weight of its own, or is tied to an embedding's: then it stands in the checkpoint once, under the embedding's name, and
    in memory once, as this layer reads it.
    """

    __call__: Callable[..., Tensor]
    weight: Tensor

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        prefix: str,
        dtype: torch.dtype,
        ops: OpSettings,
        tied_to: VocabParallelEmbedding | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        if disable_tp:
            tp_rank, tp_size = 0, 1
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.tp_size = tp_size
        self.part = _vocabulary_part(prefix, vocab_size, hidden_size, tp_rank, tp_size)
        self.product = LinearFloat32(self.part.length, ops=ops)
        self.argmax = LinearArgmax(self.product, ops=ops)
        # In a tuple: the embedding is not a part of this layer.
        self._tied_to = (tied_to,) if tied_to is not None else ()
        if tied_to is None:
            self.register_parameter("weight", empty_parameter(self.part.length, hidden_size, dtype=dtype))
        else:
            tied_to.store_for(self.product)
            self.register_parameter("weight", tied_to.get_parameter("weight"))

    @property
    def is_tied(self) -> bool:
        """Whether the weight is the embedding's."""
        return bool(self._tied_to)

    def checkpoint_slots(self) -> Iterator[CheckpointSlot]:
        """Yields the slot of the weight; none where it is the embedding's."""
        if not self.is_tied:
            yield self.part.weight_slot(f"{self.prefix}.weight")

    def process_after_loading(self, device: torch.device, arena: WeightArena) -> None:
        """Packs the weight where the product takes it packed. One that is the embedding's is packed there, before."""
        for embedding in self._tied_to:
            self.register_parameter("weight", embedding.get_parameter("weight"))
        if not self.is_tied:
            replace_parameter(self, "weight", self.product.pack(self.weight, arena))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Hot path: computes logits [n, vocab_size], float32, of hidden_states [n, hidden_size]."""
        logits = self.product(hidden_states, self.weight)
        return logits if self.tp_size == 1 else all_gather_columns(logits, self.vocab_size, self.tp_size)

    def greedy(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hot path: finds the most probable token of each of hidden_states [n, hidden_size].

        Returns:
            [n] each: its id, int64, the lowest of equal ones; its logit, float32; whether all logits of the row are finite, bool.
        """
        if self.tp_size == 1 and self.argmax.is_packed == self.product.is_packed:
            return self.argmax(hidden_states, self.weight)
        return best_of(self(hidden_states))
