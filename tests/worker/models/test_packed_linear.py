import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from modelworker.ops.cpu.isa import cpu_flags, usable_levels
from modelworker.ops.cpu.library import load_library
from modelworker.worker.models.embedding import ParallelLMHead
from modelworker.worker.models.linear import ColumnParallelLinear
from modelworker.worker.models.packed_linear import PackedLinearMethod, PackedProducts

_CACHE = Path(__file__).resolve().parents[3] / "build" / "cpu-kernels"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def products() -> PackedProducts:
    return PackedProducts(load_library(usable_levels(cpu_flags())[0], _CACHE), max_rows=64)


def filled(layer: nn.Module) -> nn.Module:
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape))
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("rows", [0, 1, 17, 64])
def test_a_packed_layer_computes_what_the_plain_one_does(products: PackedProducts, dtype: torch.dtype, rows: int) -> None:
    plain = ColumnParallelLinear(72, 50, prefix="up_proj", dtype=dtype, bias=True)
    packed = ColumnParallelLinear(72, 50, prefix="up_proj", dtype=dtype, bias=True, method=PackedLinearMethod(products))
    packed.load_state_dict(filled(plain).state_dict())
    packed.process_after_loading(CPU)
    x = torch.randn(rows, 72).to(dtype)
    assert packed(x).dtype == dtype
    torch.testing.assert_close(packed(x), plain(x))


def test_packing_frees_the_weight_that_the_checkpoint_filled(products: PackedProducts) -> None:
    layer = ColumnParallelLinear(72, 50, prefix="up_proj", dtype=torch.float32, method=PackedLinearMethod(products))
    weight = weakref.ref(layer.get_parameter("weight"))
    layer.process_after_loading(CPU)
    assert weight() is None
    assert [name for name, _ in layer.named_parameters()] == ["packed_weight"]


def test_a_head_computes_float32_logits_and_greedy_tokens(products: PackedProducts) -> None:
    method = PackedLinearMethod(products)
    head = ParallelLMHead(300, 72, prefix="lm_head", dtype=torch.bfloat16, method=method)
    weight = filled(head).get_parameter("weight").detach().clone()
    head.process_after_loading(CPU)
    x = torch.randn(5, 72).bfloat16()
    logits = head(x)
    torch.testing.assert_close(logits, x.float() @ weight.float().T)
    ids, largest, is_finite = method.apply_argmax(head, x)
    assert torch.equal(ids, logits.argmax(dim=1))
    assert torch.equal(largest, logits.amax(dim=1))
    assert is_finite.all()


def test_a_tied_head_and_its_embedding_use_one_packed_weight(products: PackedProducts) -> None:
    embedding, head = nn.Module(), nn.Module()
    embedding_method, head_method = PackedLinearMethod(products), PackedLinearMethod(products)
    embedding_method.create_weights(embedding, in_features=72, out_features=300, dtype=torch.bfloat16)
    weight = filled(embedding).get_parameter("weight").detach().clone()
    embedding_method.process_after_loading(embedding)
    head_method.share(head, embedding, in_features=72, out_features=300)
    assert head.get_parameter("packed_weight") is embedding.get_parameter("packed_weight")
    ids = torch.tensor([0, 299, 33], dtype=torch.int32)
    assert torch.equal(embedding_method.embed(embedding, ids), weight[ids])
    x = torch.randn(2, 72).bfloat16()
    torch.testing.assert_close(head_method.apply_float32(head, x), x.float() @ weight.float().T)


def test_more_rows_than_the_greedy_search_was_made_for_are_refused(products: PackedProducts) -> None:
    few = PackedProducts(products.library, max_rows=4)
    method = PackedLinearMethod(few)
    head = ParallelLMHead(300, 72, prefix="lm_head", dtype=torch.float32, method=method)
    filled(head)
    head.process_after_loading(CPU)
    with pytest.raises(RuntimeError, match="expected a scratch of at least"):
        method.apply_argmax(head, torch.randn(5, 72))
