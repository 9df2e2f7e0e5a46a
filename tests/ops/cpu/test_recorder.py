"""Recording of a step as the ops that it really runs."""

import gc
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from modelworker.ops.cpu.bound_call import BoundCall
from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.cpu.packing import WeightArena, pack_weight
from modelworker.ops.cpu.recorder import RecordedStep, Recorder
from modelworker.ops.cpu.threads import torch_threads

SUPPORT = Path(__file__).resolve().parents[2] / "support"
HEADS, KV_HEADS, HEAD_DIM, SIZE, HIDDEN = 4, 2, 32, 128, 192
MIB = 1 << 20


class Layer:
    """A decoder layer of the library's ops alone, or with torch's between them."""

    def __init__(self, library: CpuLibrary, arena: WeightArena, *, with_torch: bool) -> None:
        self.ops, self.with_torch = library.ops, with_torch
        self.norms = [torch.rand(SIZE).bfloat16() + 0.5 for _ in range(2)]
        shapes = {"qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, SIZE), "o": (SIZE, HEADS * HEAD_DIM), "gate_up": (2 * HIDDEN, SIZE)}
        self.shapes = {**shapes, "down": (SIZE, HIDDEN)}
        self.weights = {
            name: pack_weight(library, torch.randn(shape).bfloat16() / shape[1] ** 0.5, arena)
            for name, shape in self.shapes.items()
        }
        self.caches = [torch.zeros(9, KV_HEADS, 16, HEAD_DIM).bfloat16() for _ in range(2)]

    def linear(self, name: str, x: Tensor) -> Tensor:
        result: Tensor = self.ops.linear(x, self.weights[name], None, self.shapes[name][0])
        return result

    def __call__(self, x: Tensor, residual: Tensor, step: "Step") -> tuple[Tensor, Tensor]:
        self.ops.fused_add_rms_norm(x, residual, self.norms[0], 1e-5)
        heads = self.linear("qkv", x).view(-1, HEADS + 2 * KV_HEADS, HEAD_DIM)
        query, key, value = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        if self.with_torch:
            value = value.contiguous().mul_(0.5)
        order = self.ops.rotary_store_kv(
            query, key, value, None, None, 0.0, step.positions, step.cos_sin, False, *self.caches, step.slots
        )
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        lists = (step.starts, step.lengths, step.tables, order)
        self.ops.paged_attention(query, *self.caches, output, *lists, HEAD_DIM**-0.5, 0, 0.0)
        x = self.linear("o", output.view(-1, HEADS * HEAD_DIM))
        self.ops.fused_add_rms_norm(x, residual, self.norms[1], 1e-5)
        gate_up = self.linear("gate_up", x)
        gate, up = gate_up.chunk(2, dim=-1)
        hidden = F.silu(gate) * up if self.with_torch else self.ops.silu_and_mul(gate_up)
        return self.linear("down", hidden), residual


class Step:
    """Layers, and a batch of sequences that each add one token per step."""

    def __init__(self, library: CpuLibrary, *, num_layers: int = 3, num_tokens: int = 5, with_torch: bool = False) -> None:
        torch.manual_seed(0)
        self.ops, arena = library.ops, WeightArena()
        self.layers = [Layer(library, arena, with_torch=with_torch) for _ in range(num_layers)]
        self.table = torch.randn(50, SIZE).bfloat16()
        self.head = pack_weight(library, torch.randn(50, SIZE).bfloat16(), arena)
        angles = torch.randn(99, HEAD_DIM // 2)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.ids = torch.zeros(num_tokens, dtype=torch.int64)
        self.positions = torch.zeros(num_tokens, dtype=torch.int32)
        self.slots = torch.zeros(num_tokens, dtype=torch.int64)
        self.starts = torch.arange(num_tokens + 1, dtype=torch.int32)
        self.lengths = torch.ones(num_tokens, dtype=torch.int32)
        self.tables = torch.zeros(num_tokens, 2, dtype=torch.int32)

    def __call__(self) -> tuple[Tensor, Tensor]:
        x = self.ops.embedding(self.table, self.ids)
        residual = torch.zeros_like(x)
        for layer in self.layers:
            x, residual = layer(x, residual, self)
        ids, _, _ = self.ops.linear_argmax(x, self.head, 50)
        return x, ids

    def change(self, seed: int) -> None:
        """Other tokens at other places."""
        generator = torch.Generator().manual_seed(seed)
        count = self.ids.numel()
        self.ids.copy_(torch.randint(50, (count,), generator=generator))
        self.positions.copy_(torch.randint(16, (count,), generator=generator))
        blocks = torch.randperm(8, generator=generator)[:count] + 1
        self.slots.copy_(blocks * 16 + self.positions)
        self.lengths.copy_(self.positions + 1)
        self.tables[:, 0] = blocks
        for layer in self.layers:
            for cache in layer.caches:
                cache.copy_(torch.randn(cache.shape, generator=generator))


@pytest.mark.parametrize("with_torch", [False, True], ids=["kernels", "with torch"])
def test_a_replay_reads_new_values_and_computes_what_eager_mode_does(
    cpu_library: CpuLibrary, recorder: Recorder, with_torch: bool
) -> None:
    step = Step(cpu_library, with_torch=with_torch)
    step.change(0)
    recorded = recorder.record(step)
    for seed in (1, 2):
        # Whatever dies and is allocated in between must not matter.
        garbage = [torch.full((size,), float("nan")) for size in (50, 5000, 500_000)]
        gc.collect()
        step.change(seed)
        with torch.inference_mode():
            expected = step()
        step.change(seed)
        recorded.replay()
        assert all(torch.equal(one, two) for one, two in zip(recorded.outputs, expected, strict=True))
        assert expected[0].isfinite().all()
        del garbage
    recorded.close()


def test_a_step_is_replayed_by_any_number_of_threads(cpu_library: CpuLibrary, recorder: Recorder) -> None:
    step = Step(cpu_library)
    step.change(1)
    recorded = recorder.record(step)
    expected = recorded.outputs[0].clone()
    for num_threads in (1, 2, 3):
        step.change(1)
        with torch.inference_mode():
            recorded.outputs[0].zero_()
        with torch_threads(num_threads):
            recorded.replay()
        assert torch.equal(recorded.outputs[0], expected)


def bound_calls(recorded: RecordedStep[Any]) -> dict[str, int]:
    """How often each op that is no kernel is called; without any, a replay is one list."""
    return Counter(segment.name for segment in recorded._segments if isinstance(segment, BoundCall))


def test_a_step_of_kernels_is_one_list_and_other_ops_are_calls_between(cpu_library: CpuLibrary, recorder: Recorder) -> None:
    plain = recorder.record(Step(cpu_library))
    assert bound_calls(plain) == {"aten.zeros_like.default": 1}
    mixed = recorder.record(Step(cpu_library, with_torch=True))
    counts = dict(bound_calls(mixed))
    per_layer = ("aten.clone.default", "aten.mul_.Tensor", "aten.silu.default", "aten.mul.Tensor")
    assert [counts.pop(name) for name in per_layer] == [3] * 4
    assert counts == bound_calls(plain)
    # silu_and_mul is a kernel of the other step only.
    assert plain.num_kernels == mixed.num_kernels + 3
    without = recorder.record(lambda: cpu_library.ops.silu_and_mul(torch.ones(2, 8)[0]))
    assert (without.num_kernels, bound_calls(without)) == (1, {"aten.ones.default": 1})


@pytest.mark.parametrize("with_torch", [False, True], ids=["kernels", "with torch"])
def test_many_layers_take_the_memory_of_about_one(cpu_library: CpuLibrary, with_torch: bool) -> None:
    sizes = []
    for num_layers in (1, 30):
        recorder = Recorder(cpu_library)
        step = Step(cpu_library, num_layers=num_layers, num_tokens=512, with_torch=with_torch)
        step.starts.zero_()
        recorder.record(step)
        sizes.append(recorder.num_bytes)
        recorder.close()
    assert sizes[0] > 4 * MIB
    assert sizes[1] <= sizes[0] + 2 * MIB


@pytest.mark.parametrize("with_torch", [False, True], ids=["kernels", "with torch"])
def test_a_smaller_step_fits_into_the_memory_of_a_larger_one_and_both_go_on_working(
    cpu_library: CpuLibrary, recorder: Recorder, with_torch: bool
) -> None:
    steps = [Step(cpu_library, num_tokens=count, with_torch=with_torch) for count in (8, 4, 1)]
    recorded = []
    for step in steps:
        step.change(0)
        recorded.append(recorder.record(step))
        if step is steps[0]:
            num_bytes = recorder.num_bytes
    assert recorder.num_bytes == num_bytes
    for seed, index in enumerate((0, 2, 1, 0, 1, 2, 0)):
        steps[index].change(seed)
        with torch.inference_mode():
            expected = steps[index]()
        steps[index].change(seed)
        recorded[index].replay()
        assert torch.equal(recorded[index].outputs[0], expected[0])


def test_closing_a_step_makes_room_for_another(recorder: Recorder) -> None:
    x = torch.randn(MIB)
    recorder.record(lambda: x + 1).close()
    recorder.record(lambda: x + 1)
    assert recorder.num_bytes == 4 * MIB
    kept = recorder.record(lambda: x + 1)
    assert recorder.num_bytes == 4 * MIB
    other = recorder.record(lambda: x + 2)
    assert recorder.num_bytes == 8 * MIB
    kept.replay()
    other.replay()
    assert torch.equal(kept.outputs, x + 1)
    kept.close()
    with pytest.raises(RuntimeError, match="is closed"):
        kept.replay()


def test_the_outputs_outlive_the_recorder(cpu_library: CpuLibrary) -> None:
    recorder = Recorder(cpu_library)
    x = torch.randn(5)
    recorded = recorder.record(lambda: x * 2)
    output = recorded.outputs
    recorder.close()
    x.fill_(3)
    recorded.replay()
    recorded.close()
    del recorder, recorded
    gc.collect()
    assert output.tolist() == [6.0] * 5


OPS: dict[str, Callable[[Tensor], object]] = {
    "an out variant": lambda x: torch.mm(x, x.t()),
    "a copy": lambda x: x.t().contiguous(),
    "a conversion": lambda x: x.to(torch.float64),
    "several results": lambda x: x.sort(dim=1, descending=True),
    "a list of results": lambda x: torch.split_copy(x, 2),
    "in place": lambda x: x.clone().add_(1).mul_(x),
    "into out": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    "into a slice": lambda x: torch.zeros(6, 12)[1:5, ::2].copy_(x).mul_(2),
    "the same tensor twice": lambda x: (y := x.clone()).addmm_(y, torch.eye(6)),
    "views": lambda x: x.reshape(6, 4).t()[1:].unsqueeze(0).expand(3, -1, -1) + 1,
    "a reshape that copies": lambda x: x.t().reshape(-1)[3:].view(-1),
    "a view changed in place": lambda x: x.clone().unsqueeze_(0).squeeze_(0).t_() + 1,
    "indexing": lambda x: x[torch.tensor([2, 0]), 1:4],
    "a mask": lambda x: x.masked_fill(x > 0, 3.0),
    "a write by index": lambda x: x.clone().index_put_((torch.tensor([1]),), torch.tensor(5.0)),
    "a write by mask": lambda x: x.clone().index_put_((x > 0,), torch.tensor(5.0)),
    "a constant": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) + torch.arange(6),
    "a composite op": lambda x: F.scaled_dot_product_attention(x.view(1, 2, 2, 6), x.view(1, 2, 2, 6), x.view(1, 2, 2, 6)),
    "a module": lambda x: F.layer_norm(F.linear(x, torch.ones(5, 6), torch.ones(5)), (5,)),
    "no elements": lambda x: x[:0] + 1,
    "complex numbers": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)) * 1j),
}


def flat(result: object) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", OPS)
def test_any_op_of_torch_is_called_again(recorder: Recorder, name: str) -> None:
    x = torch.randn(4, 6)
    run = OPS[name]
    expected = flat(run(x))
    # What follows takes the memory of what died: a call that reads or writes elsewhere shows up.
    recorded = recorder.record(lambda: (*flat(run(x)), run(x), run(x)))
    for _ in range(3):
        outputs = recorded.outputs[: len(expected)]
        for output, exact in zip(outputs, expected, strict=True):
            assert (output.stride(), output.dtype) == (exact.stride(), exact.dtype)
            assert torch.equal(output, exact)
        x.normal_()
        expected = flat(run(x))
        recorded.replay()


def test_random_numbers_are_drawn_anew(recorder: Recorder) -> None:
    recorded = recorder.record(lambda: torch.randn(100))
    first = recorded.outputs.clone()
    recorded.replay()
    assert not torch.equal(recorded.outputs, first)


def test_what_another_op_does_inside_is_done_by_that_op_alone(cpu_library: CpuLibrary, recorder: Recorder) -> None:
    def gated(x: Tensor) -> Tensor:
        # It may well read values: it reads them again when it is called again.
        result: Tensor = cpu_library.ops.silu_and_mul(torch.tensor(x.tolist()))
        return result

    with torch.library._scoped_library("modelworker_recorder_test", "DEF") as library:
        library.define("gated(Tensor x) -> Tensor")
        library.impl("gated", gated, "CPU")
        x = torch.randn(3, 8)
        recorded = recorder.record(lambda: torch.ops.modelworker_recorder_test.gated(x))
        assert (recorded.num_kernels, bound_calls(recorded)) == (0, {"modelworker_recorder_test.gated.default": 1})
        x.normal_()
        recorded.replay()
        assert torch.equal(recorded.outputs, cpu_library.ops.silu_and_mul(x))


def test_an_exception_leaves_nothing_recording_and_no_memory_taken(cpu_library: CpuLibrary, recorder: Recorder) -> None:
    x = torch.randn(MIB)

    def fail() -> None:
        kept = [x + 1, x + 2, cpu_library.ops.silu_and_mul(x)]
        raise KeyError(len(kept))

    recorder.record(lambda: [x + 1, x + 2, cpu_library.ops.silu_and_mul(x)]).close()
    gc.collect()
    num_bytes = recorder.num_bytes
    for _ in range(3):
        with pytest.raises(KeyError, match="3"):
            recorder.record(fail)
        gc.collect()
        with pytest.raises(RuntimeError, match="this thread records no list"):
            cpu_library.ops.pool_empty([1], [1], torch.float32)
        assert x.tolist()
        assert (x + 1).untyped_storage().resizable()
    assert recorder.num_bytes == num_bytes
    recorded = recorder.record(lambda: x * 3)
    x.fill_(2)
    recorded.replay()
    assert recorded.outputs.eq(6).all()


def test_a_step_that_goes_on_after_an_ops_exception_is_recorded_to_its_end(cpu_library: CpuLibrary, recorder: Recorder) -> None:
    x = torch.randn(4, 6)

    def run() -> Tensor:
        with pytest.raises(RuntimeError):
            torch.mm(x, x)
        result: Tensor = cpu_library.ops.silu_and_mul(x)
        return result

    recorded = recorder.record(run)
    assert recorded.num_kernels == 1
    x.normal_()
    recorded.replay()
    assert torch.equal(recorded.outputs, cpu_library.ops.silu_and_mul(x))


def test_a_step_within_a_step_is_refused(recorder: Recorder) -> None:
    with pytest.raises(RuntimeError, match="this thread records another list"):
        recorder.record(lambda: recorder.record(lambda: torch.ones(1)))
    assert recorder.record(lambda: torch.ones(1)).outputs.tolist() == [1.0]


def test_other_threads_are_not_recorded_and_record_on_their_own(cpu_library: CpuLibrary, recorder: Recorder) -> None:
    x, other = torch.randn(3, 8), torch.randn(5, 8)
    results: list[Tensor] = []

    def compute() -> None:
        results.append(cpu_library.ops.silu_and_mul(other) + 1)
        own = Recorder(cpu_library)
        recorded = own.record(lambda: cpu_library.ops.silu_and_mul(other))
        other.normal_()
        recorded.replay()
        results.append(recorded.outputs)
        own.close()

    def run() -> Tensor:
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        result: Tensor = cpu_library.ops.silu_and_mul(x)
        return result

    recorded = recorder.record(run)
    assert (recorded.num_kernels, bound_calls(recorded)) == (1, {})
    assert results[0].shape == (5, 4)
    assert torch.equal(results[1], cpu_library.ops.silu_and_mul(other))
    x.normal_()
    recorded.replay()
    assert torch.equal(recorded.outputs, cpu_library.ops.silu_and_mul(x))


def test_constants_that_a_kernel_reads_are_kept(cpu_library: CpuLibrary, recorder: Recorder) -> None:
    x = torch.randn(3, 64)
    recorded = recorder.record(lambda: cpu_library.ops.rms_norm(x, torch.tensor([2.0] * 64), 1e-5))
    gc.collect()
    garbage = [torch.full((64,), float("nan")) for _ in range(100)]
    recorded.replay()
    torch.testing.assert_close(recorded.outputs, F.rms_norm(x, (64,), torch.full((64,), 2.0), 1e-5))
    assert len(garbage) == 100


_RECORDS_AND_LISTS_MODULES = """
import sys
import torch
from modelworker.ops.cpu.recorder import Recorder
from modelworker_testing.kernels import own_kernels

library = own_kernels()
recorded = Recorder(library).record(lambda: library.ops.silu_and_mul(torch.ones(2, 8)))
assert recorded.num_kernels == 1
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
"""


def test_recording_loads_no_compiler() -> None:
    """Loading one takes longer than to record all graphs of a small model."""
    path = f"import sys; sys.path.insert(0, {str(SUPPORT)!r})\n"
    done = subprocess.run([sys.executable, "-c", path + _RECORDS_AND_LISTS_MODULES], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
