"""Which piece of a checkpoint's weight a rank holds, and where it stands in a stacked parameter."""

from dataclasses import dataclass
from typing import Literal

from modelworker.worker.errors import SettingsError
from modelworker.worker.models.layer import CheckpointSlot


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPart:
    """One matrix of the checkpoint, [out_features, in_features], of which a linear layer holds a range.

    Attributes:
        name: qualified, of the checkpoint's layer, e.g. model.layers.0.mlp.up_proj.
        split: the dimension that is divided among the ranks.
        source_start: where this rank's range starts, along `split`.
        target_start: where it starts in this layer's parameter, along `split`.
        length: of the range.
    """

    name: str
    out_features: int
    in_features: int
    split: Literal["out", "in"]
    source_start: int
    target_start: int
    length: int

    def weight_slot(self, parameter: str) -> CheckpointSlot:
        """The slot of this part of the weight."""
        return CheckpointSlot(
            name=f"{self.name}.weight",
            shape=(self.out_features, self.in_features),
            parameter=parameter,
            dim=0 if self.split == "out" else 1,
            source_start=self.source_start,
            target_start=self.target_start,
            length=self.length,
        )

    def bias_slot(self, parameter: str | None) -> CheckpointSlot:
        """The slot of this part of the bias [out_features]: cut as the weight's rows are."""
        cut = self.split == "out"
        return CheckpointSlot(
            name=f"{self.name}.bias",
            shape=(self.out_features,),
            parameter=parameter,
            source_start=self.source_start if cut else 0,
            target_start=self.target_start if cut else 0,
            length=self.length if cut else self.out_features,
        )


def divide(size: int, ranks: int, what: str) -> int:
    """Divides a dimension evenly.

    Raises:
        SettingsError: that is not possible.
    """
    if size % ranks:
        raise SettingsError(f"{what}: {size} can't be divided evenly among {ranks} tensor-parallel ranks")
    return size // ranks


def kv_heads_per_rank(num_kv_heads: int, tp_size: int, what: str) -> int:
    """Number of KV heads that a rank holds: an equal share, or one of them where there are more ranks than heads.

    Raises:
        SettingsError: neither the ranks divide the heads nor the heads the ranks.
    """
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        raise SettingsError(
            f"{what}: {num_kv_heads} KV heads can't be divided among or replicated evenly over {tp_size} tensor-parallel ranks"
        )
    return max(num_kv_heads // tp_size, 1)
