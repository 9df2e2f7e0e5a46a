"""Layers whole and divided among ranks: by arithmetic, and on real ranks over gloo."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from modelworker.ops.cpu.packing import WeightArena
from modelworker.ops.op_settings import OpSettings
from modelworker.worker.errors import SettingsError
from modelworker.worker.models import TensorParallel, build_model, load_model_config
from modelworker.worker.models.embedding import ParallelLMHead, VocabParallelEmbedding
from modelworker.worker.models.linear import (
    MergedColumnParallelLinear,
    OutputPart,
    QKVParallelLinear,
    RowParallelLinear,
)
from modelworker_testing.paged_runs import load_ours, our_logits, random_prompt
from modelworker_testing.ranks import layer_outputs, model_logits, run_on_ranks
from modelworker_testing.tiny_models import save_reference


def _mlp(tp_size: int) -> tuple[MergedColumnParallelLinear, RowParallelLinear]:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "ops": OpSettings(), "tp_rank": 0, "tp_size": tp_size}
    with torch.device("meta"):
        outputs = (OutputPart("gate_proj", 14336), OutputPart("up_proj", 14336))
        gate_up = MergedColumnParallelLinear(4096, outputs, prefix="mlp.gate_up_proj", **options)
        return gate_up, RowParallelLinear(14336, 4096, prefix="mlp.down_proj", **options)


def _num_bytes(*layers: nn.Module) -> int:
    return sum(parameter.numel() * parameter.itemsize for layer in layers for parameter in layer.parameters())


def test_the_mlp_of_llama_8b_has_the_shapes_and_sizes_of_arithmetic() -> None:
    gate_up, down = _mlp(1)
    assert gate_up.get_parameter("weight").shape == (28672, 4096)
    assert down.get_parameter("weight").shape == (4096, 14336)
    assert sum(parameter.numel() for layer in (gate_up, down) for parameter in layer.parameters()) == 176_160_768
    assert _num_bytes(gate_up, down) == 352_321_536
    x = torch.empty(256, 4096, dtype=torch.bfloat16, device="meta")
    activations = gate_up(x)
    assert activations.shape == (256, 28672)
    gate, up = activations.chunk(2, dim=-1)
    product = F.silu(gate) * up
    assert product.shape == (256, 14336)
    assert down(product).shape == (256, 4096)


def test_with_two_ranks_each_holds_half_of_each_weight() -> None:
    gate_up, down = _mlp(2)
    assert gate_up.get_parameter("weight").shape == (14336, 4096)
    assert down.get_parameter("weight").shape == (4096, 7168)
    assert _num_bytes(gate_up, down) == 352_321_536 // 2
    assert gate_up(torch.empty(256, 4096, dtype=torch.bfloat16, device="meta")).shape == (256, 14336)


def test_constructors_allocate_nothing_on_meta() -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16, "ops": OpSettings(), "prefix": "a.b"}
    with torch.device("meta"):
        layers = [
            MergedColumnParallelLinear(8, [OutputPart("b", 8)], bias=True, **options),
            RowParallelLinear(8, 8, bias=True, **options),
            QKVParallelLinear(8, head_dim=4, num_heads=2, num_kv_heads=1, bias=True, **options),
            VocabParallelEmbedding(8, 8, **options),
            ParallelLMHead(8, 8, **options),
        ]
    assert all(parameter.is_meta for layer in layers for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tp_size", "heads", "kv_heads"),
    [(32, 8, 1, 32, 8), (32, 8, 2, 16, 4), (32, 8, 8, 4, 1), (32, 8, 16, 2, 1), (4, 2, 4, 1, 1), (8, 1, 8, 1, 1)],
)
def test_query_heads_are_divided_and_kv_heads_divided_or_replicated(
    num_heads: int, num_kv_heads: int, tp_size: int, heads: int, kv_heads: int
) -> None:
    seen: list[int] = []
    for rank in range(tp_size):
        with torch.device("meta"):
            layer = QKVParallelLinear(
                64,
                head_dim=16,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                prefix="qkv_proj",
                dtype=torch.float32,
                ops=OpSettings(),
                tp_rank=rank,
                tp_size=tp_size,
            )
        assert (layer.num_heads, layer.num_kv_heads) == (heads, kv_heads)
        query, key, value = layer.heads(torch.empty(3, 64, device="meta"))
        assert (query.shape, key.shape, value.shape) == ((3, heads, 16), (3, kv_heads, 16), (3, kv_heads, 16))
        slots = {slot.name: slot for slot in layer.checkpoint_slots()}
        first_query_head = slots["q_proj.weight"].source_start // 16
        first_kv_head = slots["k_proj.weight"].source_start // 16
        # Each query head has the KV head of its group on its own rank.
        group = num_heads // num_kv_heads
        assert {head // group for head in range(first_query_head, first_query_head + heads)} == set(
            range(first_kv_head, first_kv_head + kv_heads)
        )
        seen.extend(range(first_query_head, first_query_head + heads))
    assert seen == list(range(num_heads))


@pytest.mark.parametrize(
    ("config", "size", "named"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, "3 KV heads can't be divided among or replicated evenly over 2"),
        ({"num_attention_heads": 4, "num_key_value_heads": 4}, 3, "query heads: 4 can't be divided evenly among 3"),
        ({"num_attention_heads": 12, "num_key_value_heads": 2}, 3, "2 KV heads can't be divided among or replicated evenly over 3"),
        ({"intermediate_size": 97}, 2, "intermediate_size: 97 can't be divided evenly among 2"),
    ],
)
def test_ranks_that_dont_divide_the_model_are_refused_with_the_numbers(
    tmp_path: Path, config: dict[str, Any], size: int, named: str
) -> None:
    save_reference(tmp_path, **{"hidden_size": 96, **config})
    for rank in range(size):
        with pytest.raises(SettingsError, match=named):
            build_model(load_model_config(tmp_path), dtype=torch.float32, parallel=TensorParallel(rank=rank, size=size))


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_not_among_the_ranks_is_refused(tmp_path: Path, rank: int) -> None:
    save_reference(tmp_path)
    with pytest.raises(SettingsError, match=f"rank {rank} is not in 0 .. 1"):
        build_model(load_model_config(tmp_path), dtype=torch.float32, parallel=TensorParallel(rank=rank, size=2))


def _weights() -> dict[str, Tensor]:
    shapes = {
        "x": (5, 16),
        "y": (5, 24),
        "column.weight": (24, 16),
        "column.bias": (24,),
        "row.weight": (16, 24),
        "row.bias": (16,),
        "embedding.weight": (7, 16),
        "head.weight": (7, 16),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def test_two_ranks_compute_what_one_computes() -> None:
    weights = _weights()
    column = F.linear(weights["x"], weights["column.weight"], weights["column.bias"])
    row = F.linear(column, weights["row.weight"], weights["row.bias"])
    ranks = run_on_ranks(layer_outputs, 2, weights)
    torch.testing.assert_close(torch.cat([rank["column"] for rank in ranks], dim=1), column)
    torch.testing.assert_close(ranks[0]["unreduced"] + ranks[1]["unreduced"], row)
    for rank in ranks:
        torch.testing.assert_close(rank["row"], row)
        torch.testing.assert_close(rank["alone"], F.linear(weights["y"], weights["row.weight"], weights["row.bias"]))
        torch.testing.assert_close(rank["embedding"], weights["embedding.weight"])
        torch.testing.assert_close(rank["head"], weights["x"] @ weights["head.weight"].t())
        torch.testing.assert_close(rank["tied"], weights["x"] @ weights["embedding.weight"].t())


@pytest.mark.parametrize("size", [2, 4])
def test_a_model_divided_among_ranks_has_the_logits_of_the_whole(tmp_path: Path, size: int) -> None:
    save_reference(tmp_path, attention_bias=True, mlp_bias=True)
    expected = our_logits(load_ours(tmp_path), [random_prompt(20), random_prompt(9)])
    for logits in run_on_ranks(model_logits, size, tmp_path, max(2 // size, 1)):
        for ours, whole in zip(logits, expected, strict=True):
            torch.testing.assert_close(ours, whole, atol=2e-4, rtol=2e-4)


class _ScaledMethod:
    """A linear method that stores int8 rows with a scale each, made from the weight once it is loaded."""

    def create_weights(self, layer: nn.Module, *, in_features: int, out_features: int, dtype: torch.dtype, ops: OpSettings) -> None:
        layer.register_parameter("weight", nn.Parameter(torch.empty(out_features, in_features, dtype=dtype), requires_grad=False))

    def checkpoint_slots(self, layer: nn.Module, prefix: str, parts: Any) -> Any:
        return [part.weight_slot(f"{prefix}.weight") for part in parts]

    def process_after_loading(self, layer: nn.Module, arena: WeightArena) -> None:
        weight = layer.get_parameter("weight")
        scale = weight.abs().amax(1, keepdim=True) / 127
        layer.register_buffer("scale", scale)
        layer.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, layer.get_parameter("weight").to(x.dtype) * layer.get_buffer("scale"), bias)


def test_a_linear_method_decides_how_a_weight_is_stored_and_applied() -> None:
    layer = RowParallelLinear(24, 16, bias=True, prefix="row", dtype=torch.float32, ops=OpSettings(), method=_ScaledMethod())
    weights = _weights()
    layer.get_parameter("weight").copy_(weights["row.weight"])
    layer.get_parameter("bias").copy_(weights["row.bias"])
    layer.process_after_loading(torch.device("cpu"), WeightArena())
    assert layer.get_parameter("weight").dtype == torch.int8
    expected = F.linear(weights["y"], weights["row.weight"], weights["row.bias"])
    torch.testing.assert_close(layer(weights["y"]), expected, atol=0.2, rtol=0)
