"""Ops on the weight of a head, of which there is one copy: how it is stored, and what replacements get."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from modelworker.ops.cpu.packing import WeightArena
from modelworker.ops.custom_op import CustomOp
from modelworker.ops.embedding import Embedding
from modelworker.ops.linear import LinearArgmax, LinearFloat32
from modelworker_testing.kernels import kernel_ops


def test_ops_on_one_weight_follow_the_product_that_decides_how_it_is_stored() -> None:
    kernels = kernel_ops()
    unpacked = replace(kernels, custom_ops=("all", "-linear_float32"))
    for ops, expected in ((kernels, True), (unpacked, False)):
        product = LinearFloat32(50, ops=ops)
        argmax = LinearArgmax(product, ops=replace(ops, custom_ops=("none",)))
        assert (product.is_packed, argmax.is_packed) == (expected, expected)
    reason = LinearArgmax(LinearFloat32(50, ops=unpacked), ops=unpacked).choice.reason
    assert reason == "custom_ops is all, but the weight is not packed, because linear_float32 is native"


def from_outside(_op: CustomOp, *args: Tensor) -> str:
    """What a package from outside brings as a form of an op: it reads a weight as it was loaded."""
    assert {tensor.dim() for tensor in args} <= {1, 2}
    return "from outside"


@pytest.mark.parametrize("form", ["forward_oot", "forward_cpu", "forward_native", "none"])
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("original", [LinearArgmax, Embedding])
def test_a_replacement_on_the_weight_of_a_head_is_used_where_it_can_read_it_and_otherwise_left_out_with_a_warning(
    original: type[LinearArgmax | Embedding], is_packed: bool, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    weight, ids, x = torch.randn(50, 32), torch.tensor([3, 49]), torch.randn(2, 32)
    members = {} if form == "none" else {form: from_outside}
    original.register_oot(replacement := type("Replacement", (original,), members))
    ops = kernel_ops() if is_packed else replace(kernel_ops(), custom_ops=("all", "-linear_float32"))
    product = LinearFloat32(50, ops=ops)
    assert product.is_packed == is_packed
    made: list[LinearArgmax | Embedding] = []
    for _ in range(2):
        made.append(LinearArgmax(product, ops=ops) if original is LinearArgmax else Embedding(50, 32, product=product, ops=ops))
    op = made[0]
    assert type(op) is replacement
    stored = product.pack(weight, WeightArena())
    result = op(x, stored) if isinstance(op, LinearArgmax) else op(stored, ids)
    warnings = [record.getMessage() for record in caplog.records if "is left out" in record.getMessage()]
    if is_packed:
        reason = (
            f"{replacement.__module__}.Replacement is left out: the weight is packed for linear_float32, and only kernels read it"
            " (custom_ops: -linear_float32 leaves it unpacked)"
        )
        assert (op.choice.implementation, op.choice.reason) == ("c++", reason)
        assert warnings == [f"{op.op_name}: {reason}"]
    else:
        assert op.choice.implementation.endswith("Replacement)") == (form != "none")
        assert not warnings
    if not is_packed and form != "none":
        assert result == "from outside"
    elif original is Embedding:
        assert torch.equal(result, weight[ids])
    else:
        assert torch.equal(result[0], (x @ weight.T).argmax(1))
    if isinstance(op, LinearArgmax):
        assert op.is_packed == product.is_packed


def test_a_replacement_of_a_product_gets_the_weight_as_it_was_loaded() -> None:
    LinearFloat32.register_oot(type("Replacement", (LinearFloat32,), {"forward_oot": from_outside}))
    product = LinearFloat32(50, ops=kernel_ops())
    weight = torch.randn(50, 32)
    assert product.pack(weight, WeightArena()) is weight
    assert product(torch.randn(2, 32), weight) == "from outside"
    argmax, embedding = LinearArgmax(product, ops=kernel_ops()), Embedding(50, 32, product=product, ops=kernel_ops())
    assert argmax.choice.implementation == "native"
    assert torch.equal(embedding(weight, torch.tensor([7])), weight[7:8])
