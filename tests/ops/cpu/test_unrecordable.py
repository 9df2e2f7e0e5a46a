"""What can't be recorded, because a replay would not do it again, and what is refused for it."""

import ctypes
import inspect
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.cpu.recorder import Recorder, UnrecordableError

READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: 1 if x[0, 0] > 0 else 2,
    "int": lambda x: int(x[0, 0]),
    "float": lambda x: float(x[0, 0]),
    "index": lambda x: [1, 2][torch.tensor(1)],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: np.asarray(x) + 1,
    "dlpack": lambda x: x.__dlpack__(),
    "nonzero": lambda x: x.nonzero(),
    "nonzero into out": lambda x: torch.nonzero(x, out=torch.empty(0, dtype=torch.int64)),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: torch.unique(x, return_counts=True),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, torch.tensor([1, 2, 3, 4]), dim=0),
}


@pytest.mark.parametrize("name", READS)
def test_whatever_depends_on_values_is_refused_with_its_line(recorder: Recorder, name: str) -> None:
    x, read = torch.randn(4, 6), READS[name]
    with pytest.raises(UnrecordableError, match="depends on a tensor's values") as caught:
        recorder.record(lambda: read(x))
    assert str(caught.value).startswith(f"{__file__}:{inspect.getsourcelines(read)[1]}: ")


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x: x.to("meta"), "on meta"),
        (lambda x: x.to_sparse(), "sparse"),
        (lambda x: torch.add(x, 1, out=torch.empty(0)), "gives an argument other memory"),
        (lambda x: x.is_pinned(), "returns something else than tensors"),
        (lambda x: torch.view_as_complex((x + 1).view(4, 3, 2)).conj() * 2, "whose elements are computed when they are read"),
    ],
    ids=["device", "layout", "resized", "value", "conjugate"],
)
def test_whatever_a_replay_could_not_do_again_is_refused(recorder: Recorder, run: Callable[[Tensor], object], message: str) -> None:
    with pytest.raises(UnrecordableError, match=message):
        recorder.record(lambda: run(torch.randn(4, 6)))


def made_without_an_op(values: Tensor) -> Tensor:
    """As code that Inductor generates does it."""
    made: Tensor = torch._C._dynamo.guards._empty_strided_cpu(tuple(values.shape), values.stride(), values.dtype)
    ctypes.memmove(made.data_ptr(), values.data_ptr(), values.nbytes)
    return made


@pytest.mark.parametrize("view", [lambda made: made, lambda made: made.view(6, 4)[1:]], ids=["itself", "a view"])
def test_a_returned_tensor_that_no_recorded_op_made_is_refused(recorder: Recorder, view: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(4, 6)
    with pytest.raises(UnrecordableError, match=r"returns a tensor \[[45], [46]\] that no recorded op made: a replay would not"):
        recorder.record(lambda: {"results": [x * 2, view(made_without_an_op(x))]})
    assert recorder.record(lambda: {"results": [x * 2, view(x)]}).num_kernels == 0


def test_inputs_and_weights_may_be_returned(cpu_library: CpuLibrary, recorder: Recorder) -> None:
    before, x = torch.randn(3), torch.randn(2, 8)
    with torch.inference_mode():
        cache, order = torch.zeros(4, 8), torch.empty(0)

    def run() -> tuple[Tensor, ...]:
        cpu_library.ops.fused_add_rms_norm(x, cache[:2], torch.ones(8), 1e-5)
        return x, cache, cache[1:], before, before.view(3, 1), order, torch.zeros(3, 0)

    assert recorder.record(run).outputs[1] is cache


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_step_that_returns_the_result_of_generated_code_is_refused(recorder: Recorder) -> None:
    x = torch.randn(5, 8)
    compiled = torch._inductor.standalone_compile(
        torch.fx.symbolic_trace(lambda x: ((x + 1).sin() * 2,)), [x], dynamic_shapes="from_example_inputs"
    )
    with pytest.raises(UnrecordableError, match="that no recorded op made"):
        recorder.record(lambda: compiled(x))


def test_an_op_that_returns_another_shape_later_raises(recorder: Recorder) -> None:
    x = torch.ones(4)
    with torch.library._scoped_library("modelworker_recorder_test", "DEF") as library:
        library.define("firsts(Tensor x) -> Tensor")
        library.impl("firsts", lambda x: torch.zeros(int(x[0])), "CPU")
        recorded = recorder.record(lambda: torch.ops.modelworker_recorder_test.firsts(x))
        recorded.replay()
        x.fill_(2)
        with pytest.raises(RuntimeError, match=r"firsts.default returned \[1\] when it was recorded, and now \[2\]"):
            recorded.replay()
