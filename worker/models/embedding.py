"""The token embedding and the head, whole or divided among tensor-parallel ranks by the vocabulary."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from modelworker.worker.models.layer import CheckpointSlot, Layer, empty_parameter
from modelworker.worker.models.linear_method import LinearMethod, UnquantizedLinearMethod
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
        self.register_parameter("weight", empty_parameter(self.part.length, hidden_size, dtype=dtype))

    def checkpoint_slots(self) -> Iterator[CheckpointSlot]:
        """Yields the slot of the weight."""
        yield self.part.weight_slot(f"{self.prefix}.weight")

    def forward(self, token_ids: Tensor) -> Tensor:
        """Hot path: embeds token_ids [num_tokens], each in 0 .. vocab_size - 1, and returns [num_tokens, hidden_size]."""
        if self.tp_size == 1:
            return F.embedding(token_ids, self.weight)
        local = token_ids - self.part.source_start
        elsewhere = (local < 0) | (local >= self.part.length)
        if self.part.length:
            embedded = F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[:, None], 0)
        else:
            embedded = self.weight.new_zeros(token_ids.shape[0], self.weight.shape[1])
        return all_reduce(embedded)


class ParallelLMHead(Layer):
    """The head: float32 logits of hidden states.

    It has a weight of its own, or is tied to an embedding's: then it stands in the checkpoint once, under the embedding's name.
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        prefix: str,
        dtype: torch.dtype,
        tied_to: VocabParallelEmbedding | None = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        disable_tp: bool = False,
        method: LinearMethod | None = None,
    ) -> None:
        super().__init__()
        if disable_tp:
            tp_rank, tp_size = 0, 1
        self.prefix = prefix
        self.vocab_size = vocab_size
        self.tp_size = tp_size
        self.is_tied = tied_to is not None
        self.part = _vocabulary_part(prefix, vocab_size, hidden_size, tp_rank, tp_size)
        self.method = method or UnquantizedLinearMethod()
        if tied_to is None:
            self.method.create_weights(self, in_features=hidden_size, out_features=self.part.length, dtype=dtype)
        else:
            self.register_parameter("weight", tied_to.get_parameter("weight"))

    def checkpoint_slots(self) -> Iterator[CheckpointSlot]:
        """Yields the slots of the weight; none where it is the embedding's."""
        if not self.is_tied:
            yield from self.method.checkpoint_slots(self, self.prefix, (self.part,))

    def process_after_loading(self, device: torch.device) -> None:
        """Lets the linear method finish a weight that is the head's alone."""
        if not self.is_tied:
            self.method.process_after_loading(self)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Hot path: computes logits [n, vocab_size], float32, of hidden_states [n, hidden_size]."""
        logits = self.method.apply_float32(self, hidden_states)
        return logits if self.tp_size == 1 else all_gather_columns(logits, self.vocab_size, self.tp_size)
