"""What the engine sees of a model: the interface that every architecture implements."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from modelworker.ops.custom_op import CustomOp
from modelworker.ops.sampling import SampleTokens
from modelworker.worker.models.layer import CheckpointSlot, Layer, whole_tensor

KvCaches = Sequence[tuple[Tensor, Tensor]]
"""Per layer (key_cache, value_cache), each [num_blocks, num_kv_heads, block_size, head_dim]."""


class AttentionMetadata(NamedTuple):
    """The sequences of a step, as attention needs them.

    Attributes:
        query_starts: [num_sequences + 1], int32, where each sequence's tokens start; the last entry is their number.
        seq_lens: [num_sequences], int32, tokens of each sequence in the cache after this step.
        block_tables: [num_sequences, width], int32.
        slots: [num_tokens], int64, where each token's key and value go; -1: nowhere.
    """

    query_starts: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slots: Tensor


class CausalLM(nn.Module, ABC):
    """A decoder-only language model. It holds no state of a step: everything that changes from step to step is an argument.

    Made on the meta device by `registry.build_model`, filled by `weights.load_weights`.

    Attributes:
        sample_tokens: draws from logits on the device; None on a CPU, where the worker draws without it.
    """

    sample_tokens: SampleTokens | None

    @abstractmethod
    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionMetadata, kv_caches: KvCaches) -> Tensor:
        """Hot path: runs the decoder over the tokens of a step and stores their keys and values.

        Args:
            token_ids: [num_tokens], int32.
            positions: [num_tokens], int32, of each token in its sequence.
            attention: the step's sequences.
            kv_caches: one pair per layer, written in the slots of this step.

        Returns:
            [num_tokens, hidden_size], after the final norm.
        """

    @abstractmethod
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Hot path: applies the head to hidden states [n, hidden_size] and returns [n, vocab_size], float32, never rounded."""

    @abstractmethod
    def greedy(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hot path: finds the most probable token of each of hidden_states [n, hidden_size].

        Returns:
            [n] each: its id, int64, the lowest of equal ones; its logit, float32; whether all logits of the row are finite, bool.
        """

    @property
    @abstractmethod
    def has_tied_head(self) -> bool:
        """Whether the head shares the embedding's weight."""

    @abstractmethod
    def untie_head(self) -> None:
        """Gives the head a weight of its own, not yet filled."""

    @abstractmethod
    def weights_read(self) -> Iterator[Tensor]:
        """Yields the parameters that every step reads as a whole, once each: all but an embedding that isn't the head."""

    def checkpoint_slots(self) -> Iterator[CheckpointSlot]:
        """Yields what the model needs from a checkpoint, layer by layer."""
        for prefix, module in self.named_modules():
            if isinstance(module, Layer):
                yield from module.checkpoint_slots()
            elif isinstance(module, CustomOp):
                # An op knows nothing of checkpoints: what it owns is filled by the whole tensor of the same name.
                for name, parameter in module.named_parameters(prefix, recurse=False):
                    yield whole_tensor(name, parameter)
