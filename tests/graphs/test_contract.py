"""What every graph backend keeps, with a model over a paged cache captured in it."""

import gc
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from modelworker.graphs.backend import GraphBackend, StaleInputError, UnknownKeyError
from modelworker.graphs.cpu_backend import CpuGraphBackend
from modelworker.graphs.cuda_backend import CudaGraphBackend
from modelworker.graphs.dispatch import Dispatcher, Reason
from modelworker.graphs.graph_set import CaptureReport, GraphSet, Program
from modelworker.graphs.settings import CaptureMode, GraphSettings, RuntimeMode
from modelworker.graphs.shapes import GraphKey, make_key
from modelworker.ops.cpu.isa import cpu_flags, usable_levels
from modelworker.ops.cpu.library import load_library
from modelworker_testing.aten_recorder import AtenRecorder
from modelworker_testing.graph_world import BLOCK_SIZE, MAX_LEN, GraphWorld, Row
from modelworker_testing.poisonable_recorder import PoisonableRecorder

MAX_SEQUENCES, MAX_TOKENS = 4, 16


class Place(NamedTuple):
    """A backend, where it runs, and how its pool's content, beyond what graphs return, is made useless."""

    device: str
    backend: GraphBackend
    poison: Callable[[], None]


def _cpu() -> Place:
    recorder = AtenRecorder()
    return Place("cpu", CpuGraphBackend(recorder), recorder.arena.poison)


def _cpu_kernels() -> Place:
    """The recorder that is served, with the kernels' library; the model's ops are calls for it."""
    library = load_library(usable_levels(cpu_flags())[0], Path(__file__).resolve().parents[2] / "build" / "cpu-kernels")
    recorder = PoisonableRecorder(library)
    return Place("cpu", CpuGraphBackend(recorder), recorder.poison)


def _cuda() -> Place:
    """What graphs return is made useless, memory between their kernels is not: libraries may keep state of theirs in it."""
    return Place("cuda", CudaGraphBackend(torch.device("cuda", 0)), lambda: None)


class Captured(NamedTuple):
    world: GraphWorld
    place: Place
    dispatcher: Dispatcher
    graphs: GraphSet
    report: CaptureReport
    programs: Mapping[RuntimeMode, Program]

    def run(self, rows: list[Row]) -> tuple[GraphKey, Tensor]:
        """Runs a step as the dispatcher says; returns the key and the real rows of the result."""
        key = self.dispatcher.choose(self.world.shape(rows, self.dispatcher.settings.decode_query_lens)).key
        assert key is not None
        self.poison(key)
        (hidden,) = self.graphs.run(key, self.world.padded_inputs(rows, key))
        assert hidden.shape[0] == key.num_tokens
        assert torch.isfinite(hidden).all()
        return key, hidden[: sum(row.query_len for row in rows)].clone()

    def poison(self, key: GraphKey) -> None:
        """Leaves nothing of an earlier replay where a graph writes and returns its results."""
        kept = [cache.clone() for cache in self.world.all_caches()]
        for output in self.programs[key.mode].replay(key, self.world.inputs_for(key)):
            output.fill_(torch.nan)
        for cache, content in zip(self.world.all_caches(), kept, strict=True):
            cache.copy_(content)
        self.place.poison()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(_cpu, id="cpu"),
        pytest.param(_cpu_kernels, id="cpu-kernels"),
        pytest.param(_cuda, id="cuda", marks=pytest.mark.cuda),
    ],
)
def make_place(request: pytest.FixtureRequest) -> Callable[[], Place]:
    make: Callable[[], Place] = request.param
    return make


@pytest.fixture(scope="module", params=[CaptureMode.FULL, CaptureMode.FULL_AND_PIECEWISE], ids=lambda mode: mode.name)
def captured_once(request: pytest.FixtureRequest, make_place: Callable[[], Place]) -> Iterator[Captured]:
    with torch.inference_mode():
        captured = _capture(make_place(), request.param)
        yield captured
        captured.graphs.close()


@pytest.fixture
def captured(captured_once: Captured) -> Captured:
    captured_once.world.reset()
    return captured_once


def _capture(place: Place, mode: CaptureMode) -> Captured:
    world = GraphWorld(max_sequences=MAX_SEQUENCES, max_tokens=MAX_TOKENS, device=place.device)
    settings = GraphSettings(max_sequences=MAX_SEQUENCES, max_tokens_per_step=MAX_TOKENS, mode=mode, decode_query_lens=(1, 3))
    dispatcher = Dispatcher(settings)
    programs = world.programs()
    graphs = GraphSet(backend=place.backend, programs=programs)
    report = graphs.capture(dispatcher, inputs_for=world.inputs_for)
    assert report.failures == ()
    return Captured(world, place, dispatcher, graphs, report, programs)


def _steps(seed: int, count: int, world: GraphWorld) -> Iterator[list[Row]]:
    """Prompts, chunks, decodes and verifications, in any mix that fits, until sequences are full."""
    generator = random.Random(seed)
    for _ in range(count):
        room = {sequence: MAX_LEN - context for sequence, context in enumerate(world.contexts)}
        chosen = generator.sample([sequence for sequence in room if room[sequence] >= 3], generator.randint(1, MAX_SEQUENCES))
        uniform = generator.choice([1, 3, None])
        rows = [Row(sequence, uniform or generator.randint(1, min(4, room[sequence]))) for sequence in chosen]
        yield rows
        for sequence, _ in rows:
            if world.contexts[sequence] > MAX_LEN - 4:
                world.contexts[sequence] = 0


def _owned(world: GraphWorld, rows: list[Row]) -> list[int]:
    slots: list[int] = world.exact_inputs(rows)[2].tolist()
    return slots


def test_the_eager_step_of_the_model_is_right(captured: Captured) -> None:
    """What the other tests compare with is itself compared with attention that has no cache."""
    world = captured.world
    for rows in ([Row(0, 5), Row(2, 1)], [Row(0, 1), Row(2, 3), Row(1, 4)], [Row(0, 1), Row(1, 1), Row(2, 1)]):
        hidden = world.forward(*world.exact_inputs(rows))[0].split([row.query_len for row in rows])
        world.advance(rows)
        for row, found in zip(rows, hidden, strict=True):
            expected = world.dense(row.sequence, world.contexts[row.sequence])[-row.query_len :]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(2))
def test_a_step_in_a_graph_gives_what_eager_gives_and_writes_the_same(captured: Captured, seed: int) -> None:
    world = captured.world
    keys = set()
    for rows in _steps(seed, 20, world):
        expected, expected_caches = world.eager_with_caches(rows)
        before = [cache.clone() for cache in world.all_caches()]
        key, found = captured.run(rows)
        keys.add(key)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        owned = _owned(world, rows)
        untouched = [slot for slot in range(len(before[0]) - 1) if slot not in owned]
        for cache, old, new in zip(world.all_caches(), before, expected_caches, strict=True):
            assert torch.equal(cache[untouched], old[untouched])
            torch.testing.assert_close(cache[owned], new[owned], atol=1e-5, rtol=1e-5)
        world.advance(rows)
    assert len(keys) > 3


def test_every_captured_graph_runs_the_batch_that_fills_it(captured: Captured) -> None:
    world = captured.world
    for key in captured.report.captured:
        if key.uniform_query_len is None:
            world.contexts[:] = [0] * MAX_SEQUENCES
            lens = [key.num_tokens // MAX_SEQUENCES + (index < key.num_tokens % MAX_SEQUENCES) for index in range(MAX_SEQUENCES)]
            rows = [Row(sequence, query_len) for sequence, query_len in enumerate(lens) if query_len]
        else:
            assert key.num_sequences is not None
            world.contexts[:] = [3] * MAX_SEQUENCES
            rows = [Row(sequence, key.uniform_query_len) for sequence in range(key.num_sequences)]
        expected = world.eager(rows)
        hits = captured.graphs.hits[key]
        found_key, found = captured.run(rows)
        assert found_key == key
        assert captured.graphs.hits[key] == hits + 1
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_rows", [1, 3, 4])
def test_n01_a_row_has_the_same_result_alone_and_among_others(captured: Captured, num_rows: int) -> None:
    world = captured.world
    captured.run([Row(sequence, 4) for sequence in range(MAX_SEQUENCES)])
    world.contexts[:] = [4] * MAX_SEQUENCES
    alone = captured.run([Row(1, 1)])[1]
    rows = [Row(1, 1), Row(0, 1), Row(3, 1), Row(2, 1)][:num_rows]
    together = captured.run(rows)[1]
    torch.testing.assert_close(together[:1], alone, atol=1e-5, rtol=1e-5)


def test_g07_the_last_block_is_not_written_by_padding(captured: Captured) -> None:
    world = captured.world
    world.contexts[:] = [4] * MAX_SEQUENCES
    for query_lens in ([1, 1, 1], [3, 3], [2, 1]):
        rows = [Row(sequence, query_len) for sequence, query_len in enumerate(query_lens)]
        last = slice(-1 - BLOCK_SIZE, -1)
        owner = int((world.blocks == world.blocks.max()).nonzero()[0, 0])
        rows = [Row((owner + 1 + row.sequence) % MAX_SEQUENCES, row.query_len) for row in rows]
        for cache in world.all_caches():
            cache[last] = 123.0
        captured.run(rows)
        assert all((cache[last] == 123.0).all() for cache in world.all_caches())


def test_g09_columns_of_a_wider_step_before_have_no_influence(captured: Captured) -> None:
    world = captured.world
    world.contexts[:] = [MAX_LEN - 1, 2, 2, 2]
    captured.run([Row(0, 1)])
    for cache in world.all_caches():
        cache[(world.blocks[0][:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()] = float("nan")
    rows = [Row(1, 1)]
    torch.testing.assert_close(captured.run(rows)[1], world.eager(rows), atol=1e-5, rtol=1e-5)


def test_g10_three_decodes_in_a_graph_of_four_are_those_of_eager(captured: Captured) -> None:
    world = captured.world
    world.contexts[:] = [5, 9, 1, 0]
    rows = [Row(0, 1), Row(1, 1), Row(2, 1)]
    expected = world.eager(rows)
    key, found = captured.run(rows)
    assert key.num_tokens == 4
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_g13_replay_gives_the_same_after_other_allocations_and_garbage_collection(captured: Captured) -> None:
    world = captured.world
    world.contexts[:] = [5, 9, 1, 3]
    steps = [[Row(0, 1), Row(1, 1), Row(2, 1)], [Row(0, 3), Row(3, 3)], [Row(1, 4), Row(2, 1)]]
    before = [captured.run(rows)[1] for rows in steps]
    gc.collect()
    size = max(4 * captured.report.num_bytes // 4, 1)
    noise = [torch.full((part,), float("nan"), device=world.device) for part in (size, size // 2, 97, 16, 16)]
    after = [captured.run(rows)[1] for rows in steps]
    for first, second in zip(before, after, strict=True):
        assert torch.equal(first, second)
    assert all(torch.isnan(tensor).all() for tensor in noise)


def test_before_each_step_of_these_tests_a_graph_holds_no_result_of_an_earlier_one(captured: Captured) -> None:
    world = captured.world
    for key in captured.report.captured:
        (hidden,) = captured.graphs.run(key, world.padded_inputs([Row(0, 1)], key))
        assert torch.isfinite(hidden).all()
        captured.poison(key)
        assert torch.isnan(hidden).all()


def test_an_unknown_key_is_an_error(captured: Captured) -> None:
    key = make_key(RuntimeMode.PIECEWISE, 7, max_sequences=MAX_SEQUENCES)
    with pytest.raises(UnknownKeyError, match="PIECEWISE 7 tokens"):
        captured.graphs.run(key, captured.world.exact_inputs([Row(0, 1)]))


def test_g12_an_input_at_another_address_is_refused_at_every_replay(captured: Captured) -> None:
    world = captured.world
    for key in captured.report.captured:
        for times_run in range(2):
            inputs = world.padded_inputs([Row(0, 1)], key)
            for position in range(2):
                moved = list(inputs)
                moved[position] = inputs[position].clone()
                with pytest.raises(StaleInputError, match=f"{key}: input {position} is torch.int64"):
                    captured.graphs.run(key, moved)
            if times_run == 0:
                captured.graphs.run(key, inputs)


def test_g12_an_input_with_another_layout_is_refused(captured: Captured) -> None:
    key = next(key for key in captured.report.captured if key.num_tokens == 4)
    inputs = list(captured.world.padded_inputs([Row(0, 1)], key))
    for changed in (inputs[0][:3], inputs[0].view(2, 2), inputs[0].to(torch.int64).view(torch.float64)):
        with pytest.raises(StaleInputError):
            captured.graphs.run(key, [changed, *inputs[1:]])


def test_a_dropped_mode_is_unknown_and_the_others_go_on(make_place: Callable[[], Place]) -> None:
    captured = _capture(make_place(), CaptureMode.FULL_AND_PIECEWISE)
    captured.dispatcher.disable(RuntimeMode.PIECEWISE, Reason.FAILED_SELF_CHECK)
    captured.graphs.drop(RuntimeMode.PIECEWISE)
    assert {key.mode for key in captured.graphs.hits} == {RuntimeMode.FULL}
    with pytest.raises(UnknownKeyError):
        captured.graphs.run(captured.report.captured[0], captured.world.inputs_for(captured.report.captured[0]))
    captured.world.contexts[:] = [4] * MAX_SEQUENCES
    rows = [Row(0, 1), Row(1, 1)]
    expected = captured.world.eager(rows)
    torch.testing.assert_close(captured.run(rows)[1], expected, atol=1e-5, rtol=1e-5)
    captured.graphs.close()
    with pytest.raises(UnknownKeyError):
        captured.graphs.run(captured.report.captured[-1], captured.world.inputs_for(captured.report.captured[-1]))


def test_a_borrowed_tensor_lies_in_the_same_memory_with_the_same_layout(make_place: Callable[[], Place]) -> None:
    place = make_place()
    base = torch.randn(6, 8, 5, device=place.device)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        whole = base.to(dtype)
        for tensor in (whole, whole[2:4, ::2], whole.transpose(0, 2), whole[3, 4, 2], whole[1:1], whole[:1].expand(4, 8, 5)):
            borrowed = place.backend.borrowed(tensor)
            assert (borrowed.dtype, borrowed.shape, borrowed.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
            assert tensor.numel() == 0 or borrowed.data_ptr() == tensor.data_ptr()
            assert torch.equal(borrowed, tensor)
    place.backend.close()
