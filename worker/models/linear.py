"""Linear layers, alone and stacked, whole and divided among tensor-parallel ranks."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from modelworker.ops.cpu.packing import WeightArena
from modelworker.ops.op_settings import OpSettings
from modelworker.worker.models.layer import CheckpointSlot, Layer, empty_parameter
from modelworker.worker.models.linear_method import LinearMethod, UnquantizedLinearMethod
from modelworker.worker.models.tensor_parallel import all_reduce
from modelworker.worker.models.weight_part import WeightPart, divide, kv_heads_per_rank


class LinearLayer(Layer):
    """What the linear layers share: a weight owned by a linear method, and perhaps a bias."""

    __call__: Callable[..., Tensor]
    bias: Tensor | None

    def __init__(
        self,
        parts: tuple[WeightPart, ...],
        *,
        in_features: int,
        out_features: int,
        bias: bool,
        prefix: str,
        dtype: torch.dtype,
        ops: OpSettings,
        method: LinearMethod | None,
    ) -> None:
        super().__init__()
        self.parts = parts
        self.in_features = in_features
        self.out_features = out_features
        self.prefix = prefix
        self.method = method or UnquantizedLinearMethod()
        self.method.create_weights(self, in_features=in_features, out_features=out_features, dtype=dtype, ops=ops)
        self.register_parameter("bias", empty_parameter(out_features, dtype=dtype) if bias else None)

    def checkpoint_slots(self) -> Iterator[CheckpointSlot]:
        """Yields the slots of every part of the weight and the bias."""
        yield from self.method.checkpoint_slots(self, self.prefix, self.parts)
        if self.bias is not None:
            for part in self.parts:
                yield part.bias_slot(f"{self.prefix}.bias")

    def process_after_loading(self, device: torch.device, arena: WeightArena) -> None:
        """Lets the linear method finish the weight."""
        self.method.process_after_loading(self, arena)

    def forward(self, x: Tensor) -> Tensor:
        """Hot path: multiplies x [num_tokens, in_features] and returns [num_tokens, out_features]; the sizes are this rank's."""
        return self.method.apply(self, x, self.bias)


class OutputPart(NamedTuple):
    """A matrix stacked in a column-parallel layer.

    Attributes:
        name: last part of its name in the checkpoint, e.g. up_proj.
        out_features: all its rows, of all ranks together.
        replicas: how many neighbouring ranks hold the same rows.
    """

    name: str
    out_features: int
    replicas: int = 1


class MergedColumnParallelLinear(LinearLayer):
    """One or several matrices with the same input as one, each divided among the ranks by its output rows.

    A rank's output is its share of the first part's features, then of the second's, and so on.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Sequence[OutputPart],
        *,
        prefix: str,
        dtype: torch.dtype,
        ops: OpSettings,
        bias: bool = False,
        tp_rank: int = 0,
        tp_size: int = 1,
        disable_tp: bool = False,
        method: LinearMethod | None = None,
    ) -> None:
        if disable_tp:
            tp_rank, tp_size = 0, 1
        parent = prefix.rpartition(".")[0]
        parts = []
        target_start = 0
        for output in outputs:
            name = f"{parent}.{output.name}" if parent else output.name
            length = divide(output.out_features, tp_size // output.replicas, f"{name}: output rows")
            part = WeightPart(
                name=name,
                out_features=output.out_features,
                in_features=in_features,
                split="out",
                source_start=tp_rank // output.replicas * length,
                target_start=target_start,
                length=length,
            )
            parts.append(part)
            target_start += length
        super().__init__(
            tuple(parts),
            in_features=in_features,
            out_features=target_start,
            bias=bias,
            prefix=prefix,
            dtype=dtype,
            ops=ops,
            method=method,
        )


class QKVParallelLinear(MergedColumnParallelLinear):
    """q, k and v as one. With more ranks than KV heads, neighbouring ranks hold the same KV head.

    `num_heads` and `num_kv_heads` are this rank's after construction.
    """

    def __init__(
        self,
        in_features: int,
        *,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        prefix: str,
        dtype: torch.dtype,
        ops: OpSettings,
        bias: bool = False,
        tp_rank: int = 0,
        tp_size: int = 1,
        disable_tp: bool = False,
        method: LinearMethod | None = None,
    ) -> None:
        if disable_tp:
            tp_rank, tp_size = 0, 1
        heads_per_rank = divide(num_heads, tp_size, f"{prefix}: query heads")
        kv_heads = kv_heads_per_rank(num_kv_heads, tp_size, prefix)
        replicas = max(tp_size // num_kv_heads, 1)
        outputs = (
            OutputPart("q_proj", num_heads * head_dim),
            OutputPart("k_proj", num_kv_heads * head_dim, replicas),
            OutputPart("v_proj", num_kv_heads * head_dim, replicas),
        )
        super().__init__(
            in_features, outputs, prefix=prefix, dtype=dtype, ops=ops, bias=bias, tp_rank=tp_rank, tp_size=tp_size, method=method
        )
        self.head_dim = head_dim
        self.num_heads = heads_per_rank
        self.num_kv_heads = kv_heads

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hot path: projects x [num_tokens, in_features] to query, key and value.

        Returns:
            [num_tokens, num_heads, head_dim], and twice [num_tokens, num_kv_heads, head_dim]: views of one tensor.
        """
        stacked = self(x).view(x.shape[0], self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        query, key, value = torch.split(stacked, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        return query, key, value


class RowParallelLinear(LinearLayer):
    """A matrix divided among the ranks by its input columns; the ranks' results are summed.

    The bias belongs to rank 0 alone, so that it is added once. With `reduce_results=False` the caller sums.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        prefix: str,
        dtype: torch.dtype,
        ops: OpSettings,
        bias: bool = False,
        reduce_results: bool = True,
        tp_rank: int = 0,
        tp_size: int = 1,
        disable_tp: bool = False,
        method: LinearMethod | None = None,
    ) -> None:
        if disable_tp:
            tp_rank, tp_size = 0, 1
        length = divide(in_features, tp_size, f"{prefix}: input columns")
        part = WeightPart(
            name=prefix,
            out_features=out_features,
            in_features=in_features,
            split="in",
            source_start=tp_rank * length,
            target_start=0,
            length=length,
        )
        super().__init__(
            (part,),
            in_features=length,
            out_features=out_features,
            bias=bias and tp_rank == 0,
            prefix=prefix,
            dtype=dtype,
            ops=ops,
            method=method,
        )
        self.bias_is_elsewhere = bias and tp_rank != 0
        self.reduces = reduce_results and tp_size > 1

    def checkpoint_slots(self) -> Iterator[CheckpointSlot]:
        """Yields the slots of the weight and the bias; the latter goes nowhere on other ranks than 0."""
        yield from super().checkpoint_slots()
        if self.bias_is_elsewhere:
            yield self.parts[0].bias_slot(None)

    def forward(self, x: Tensor) -> Tensor:
        """Hot path: multiplies this rank's share x [num_tokens, in_features] and returns [num_tokens, out_features]."""
        output = super().forward(x)
        return all_reduce(output) if self.reduces else output
