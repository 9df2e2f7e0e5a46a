"""Layers whose weights are packed for the C++ kernels: what they compute, and that there is one copy."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn

from modelworker.ops.cpu.packing import WeightArena
from modelworker.ops.op_settings import OpSettings
from modelworker.worker.models.embedding import ParallelLMHead, VocabParallelEmbedding
from modelworker.worker.models.linear import MergedColumnParallelLinear, OutputPart
from modelworker_testing.kernels import kernel_ops

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def kernels() -> OpSettings:
    return kernel_ops()


def filled(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape))
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [0, 1, 17, 64])
def test_a_packed_layer_computes_what_the_plain_one_does(kernels: OpSettings, dtype: torch.dtype, rows: int) -> None:
    plain = MergedColumnParallelLinear(72, [OutputPart("up_proj", 50)], prefix="up_proj", dtype=dtype, ops=OpSettings(), bias=True)
    packed = MergedColumnParallelLinear(72, [OutputPart("up_proj", 50)], prefix="up_proj", dtype=dtype, ops=kernels, bias=True)
    packed.load_state_dict(filled(plain).state_dict())
    packed.process_after_loading(CPU, WeightArena())
    x = torch.randn(rows, 72).to(dtype)
    assert packed(x).dtype == dtype
    torch.testing.assert_close(packed(x), plain(x))


def test_packing_frees_the_weight_that_the_checkpoint_filled(kernels: OpSettings) -> None:
    layer = MergedColumnParallelLinear(72, [OutputPart("up_proj", 50)], prefix="up_proj", dtype=torch.float32, ops=kernels)
    weight = weakref.ref(layer.get_parameter("weight"))
    layer.process_after_loading(CPU, WeightArena())
    assert weight() is None
    assert layer.get_parameter("weight").ndim == 4


def head_of(ops: OpSettings, dtype: torch.dtype, tied_to: VocabParallelEmbedding | None = None) -> ParallelLMHead:
    return ParallelLMHead(300, 72, prefix="lm_head", dtype=dtype, ops=ops, tied_to=tied_to)


@pytest.mark.parametrize("custom_ops", [("all",), ("none",), ("all", "-linear_float32")], ids=str)
def test_a_head_computes_float32_logits_and_greedy_tokens(kernels: OpSettings, custom_ops: tuple[str, ...]) -> None:
    head = head_of(replace(kernels, custom_ops=custom_ops), torch.bfloat16)
    weight = filled(head).get_parameter("weight").detach().clone()
    head.process_after_loading(CPU, WeightArena())
    x = torch.randn(5, 72).bfloat16()
    logits = head(x)
    torch.testing.assert_close(logits, x.float() @ weight.float().T)
    ids, largest, is_finite = head.greedy(x)
    assert torch.equal(ids, logits.argmax(dim=1))
    assert torch.equal(largest, logits.amax(dim=1))
    assert is_finite.all()


@pytest.mark.parametrize("custom_ops", [("all",), ("none",), ("none", "+linear_float32"), ("all", "-linear_float32")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_tied_head_and_its_embedding_use_one_copy_of_the_weight_however_it_is_stored(
    kernels: OpSettings, custom_ops: tuple[str, ...], dtype: torch.dtype
) -> None:
    ops = replace(kernels, custom_ops=custom_ops)
    embedding = VocabParallelEmbedding(300, 72, prefix="embed_tokens", dtype=dtype, ops=ops)
    head = head_of(ops, dtype, tied_to=embedding)
    weight = filled(embedding).get_parameter("weight").detach().clone()
    arena = WeightArena()
    embedding.process_after_loading(CPU, arena)
    head.process_after_loading(CPU, arena)
    assert head.get_parameter("weight") is embedding.get_parameter("weight")
    ids = torch.tensor([0, 299, 33], dtype=torch.int32)
    assert torch.equal(embedding(ids), weight[ids])
    x = torch.randn(2, 72).to(dtype)
    torch.testing.assert_close(head(x), x.float() @ weight.float().T)
    assert torch.equal(head.greedy(x)[0], head(x).argmax(dim=1))


def test_an_embedding_without_a_tied_head_is_stored_by_rows(kernels: OpSettings) -> None:
    embedding = VocabParallelEmbedding(300, 72, prefix="embed_tokens", dtype=torch.bfloat16, ops=kernels)
    weight = filled(embedding).get_parameter("weight")
    embedding.process_after_loading(CPU, WeightArena())
    assert embedding.get_parameter("weight") is weight
    assert torch.equal(embedding(torch.tensor([7, 0])), weight[[7, 0]])
