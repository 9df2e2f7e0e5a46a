"""Compiled models against the models that they were made from."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelworker.compiler.compile import compile_model
from modelworker.compiler.counters import CompileCounters, ProcessCompilations
from modelworker.compiler.model import CompiledModel, Piece
from modelworker.compiler.program import PieceStage
from modelworker.compiler.settings import CompileSettings
from modelworker.ops.cpu.library import CpuLibrary
from modelworker_testing.compiled_models import MAX_LEN, NUM_SEQUENCES, CompilableModel, Lengths, make_compilable

# Dynamo and Inductor load torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

# Decode, prefill, mixed, single tokens, nothing: 0, 1, 2, 17 and 64 tokens with 0 to 4 sequences.
STEPS: list[Lengths] = [
    [(0, 17)],
    [],
    [(17, 1)],
    [(18, 1), (0, 1)],
    [(19, 4), (1, 60)],
    [(23, 1), (61, 3), (0, 1), (0, 12)],
    [(24, 1)],
    [(25, 1), (64 - 2, 2), (1, 1), (12, 1)],
]


class Compiled:
    """A model with its compiled form and what it took."""

    def __init__(self, original: CompilableModel, backend: Any, partition: Any = "fx") -> None:
        self.original = original
        self.counters = CompileCounters()
        settings = CompileSettings(backend=backend, partition=partition)
        self.model = compile_model(original.source, settings, counters=self.counters)

    def differences(self, steps: list[Lengths], model: Callable[..., Any] | None = None) -> list[float]:
        """The largest difference of each step's results; the caches must be equal, NaN where nothing was written included."""
        expected, expected_caches = self.original.run(self.original.source.function, steps)
        found, found_caches = self.original.run(model or self.model, steps)
        for one, other in zip(expected_caches, found_caches, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)
        assert [result.shape for result in found] == [result.shape for result in expected]
        assert [result.dtype for result in found] == [result.dtype for result in expected]
        return [float((one - other).abs().max()) if one.numel() else 0.0 for one, other in zip(expected, found, strict=True)]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Native ops, split and called one by one."""
    return Compiled(make_compilable(tmp_path_factory.mktemp("model")), "eager")


@pytest.fixture(scope="module")
def with_kernels(tmp_path_factory: pytest.TempPathFactory, kernels: CpuLibrary) -> Compiled:
    """C++ kernels called by generated code, bf16, as the worker runs on a CPU."""
    return Compiled(make_compilable(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16, kernels=kernels), "inductor")


@pytest.fixture(scope="module")
def partitioned(tmp_path_factory: pytest.TempPathFactory, kernels: CpuLibrary) -> Compiled:
    """The same, divided by Inductor."""
    original = make_compilable(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16, kernels=kernels)
    return Compiled(original, "inductor", "inductor")


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def generated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Native ops, all of which Inductor generates code for."""
    return Compiled(make_compilable(tmp_path_factory.mktemp("model"), dtype=request.param), "inductor")


def test_a_model_of_native_ops_that_is_split_and_interpreted_computes_what_the_model_computes(interpreted: Compiled) -> None:
    assert interpreted.differences(STEPS) == [0.0] * len(STEPS)


@pytest.mark.parametrize("fixture", ["with_kernels", "partitioned"])
def test_a_compiled_model_with_cpp_kernels_computes_what_the_model_computes_to_the_last_bit(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    compiled: Compiled = request.getfixturevalue(fixture)
    with compiled.counters.expect(process_dynamo=0, process_inductor=0, process_triton=0):
        assert compiled.differences(STEPS) == [0.0] * len(STEPS)


def test_inductor_divides_at_the_splitting_ops_and_every_part_can_be_replaced(partitioned: Compiled) -> None:
    calls: list[int] = []

    def wrap(piece: Piece) -> Any:
        return lambda arguments: (calls.append(piece.index), piece(arguments))[1]

    wrapped = partitioned.model.with_pieces(wrap)
    assert partitioned.differences(STEPS[:1], wrapped) == [0.0]
    # Before, between and after the two ops of each of two layers.
    assert calls == [0, 1, 2, 3, 4]
    assert len(partitioned.model.pieces) == 5
    assert partitioned.differences(STEPS[:1], partitioned.model.plain()) == [0.0]


@pytest.mark.slow
def test_a_compiled_model_of_native_ops_computes_what_the_model_computes_but_for_rounding(generated: Compiled) -> None:
    # Sums in another order; bf16 activations of magnitude 4 have steps of 1/32, and several roundings fall the other way.
    bound = 1e-5 if generated.original.cache.caches[0][0].dtype == torch.float32 else 0.1
    expected, _ = generated.original.run(generated.original.source.function, STEPS)
    found, _ = generated.original.run(generated.model, STEPS)
    differences = [float((one - other).abs().max()) for one, other in zip(expected, found, strict=True) if one.numel()]
    assert max(differences) < bound
    assert max(float(result.abs().max()) for result in expected if result.numel()) > 1


@given(
    st.lists(st.tuples(st.integers(0, MAX_LEN - 1), st.integers(1, 20)), max_size=NUM_SEQUENCES).map(
        lambda rows: [(context, min(query, MAX_LEN - context)) for context, query in rows]
    )
)
@settings(max_examples=30)
def test_any_step_is_computed_without_compiling_anything(with_kernels: Compiled, lengths: Lengths) -> None:
    fill: Lengths = [(0, MAX_LEN)] * NUM_SEQUENCES
    before = with_kernels.counters.process_compilations()
    assert with_kernels.differences([fill, lengths]) == [0.0, 0.0]
    assert with_kernels.counters.process_compilations() - before == ProcessCompilations()


def test_token_counts_that_compilers_like_to_specialize_for_take_no_other_code(with_kernels: Compiled) -> None:
    """Batches of 1 and of 0 after others, in the order in which a router may send them."""
    with with_kernels.counters.expect(process_dynamo=0, process_inductor=0, process_triton=0):
        steps: list[Lengths] = [[(0, 1)], [(0, 1), (0, 1)], [(1, 1)], [(0, 7)], []]
        assert with_kernels.differences(steps) == [0.0] * 5


def test_results_need_no_gradient_and_hold_no_memory_of_the_model(with_kernels: Compiled) -> None:
    results, _ = with_kernels.original.run(with_kernels.model, STEPS[:1])
    assert not results[0].requires_grad


@pytest.mark.parametrize("fixture", ["interpreted", "with_kernels"])
def test_a_model_is_a_piece_before_and_after_each_attention(fixture: str, request: pytest.FixtureRequest) -> None:
    compiled: Compiled = request.getfixturevalue(fixture)
    kinds = ["piece" if isinstance(stage, Piece) else stage.name.partition(".")[2] for stage in compiled.model.stages]
    update = "store_kv.default" if fixture == "interpreted" else "rotary_store_kv.default"
    assert kinds == ["piece", update, "paged_attention.default"] * 2 + ["piece"]
    assert compiled.counters.snapshot()["pieces"] == 3


def test_no_piece_reads_or_copies_a_kv_cache(with_kernels: Compiled) -> None:
    program = with_kernels.model.program
    caches = {index for index, name in enumerate((*program.inputs, *program.bound)) if "_cache" in name}
    assert len(caches) == 4
    for stage in program.stages:
        if isinstance(stage, PieceStage):
            assert caches.isdisjoint(stage.reads)
            assert caches.isdisjoint(stage.writes)


def test_code_compiled_on_one_thread_runs_on_another_where_grad_mode_is_on(with_kernels: Compiled) -> None:
    step = with_kernels.original.step([(0, 5)])
    results: list[Tensor] = []

    def run() -> None:
        assert torch.is_grad_enabled()
        results.append(with_kernels.model(*step))  # type: ignore[arg-type]

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not results[0].requires_grad
    with torch.no_grad():
        assert torch.equal(results[0], with_kernels.original.source.function(*step))


def test_every_piece_can_be_replaced_by_what_wraps_it(with_kernels: Compiled) -> None:
    calls: list[tuple[int, int]] = []

    def wrap(piece: Piece) -> Any:
        def run(arguments: list[Tensor]) -> Any:
            assert len(arguments) == len(piece.inputs)
            static = [argument for argument, is_static in zip(arguments, piece.static, strict=True) if is_static]
            assert all(any(argument is tensor for tensor in with_kernels.original.source.bound.values()) for argument in static)
            calls.append((piece.index, piece.unique))
            return piece(arguments)

        return run

    wrapped = with_kernels.model.with_pieces(wrap)
    assert with_kernels.differences(STEPS[:2], wrapped) == [0.0, 0.0]
    assert calls == [(0, 0), (1, 1), (2, 2)] * 2


def test_what_a_step_computed_is_released_as_soon_as_nothing_reads_it(with_kernels: Compiled) -> None:
    """Between the stages only what later ones read is alive."""
    live: list[int] = []
    program = with_kernels.model.program
    alive: set[int] = set()
    for stage in program.stages:
        alive |= set(stage.writes)
        alive -= set(stage.releases)
        live.append(len(alive))
    assert live[-1] == len(program.outputs)
    assert max(live) <= 6


def _model_of(num_layers: int, directory: Path, kernels: CpuLibrary) -> tuple[CompiledModel, CompileCounters]:
    counters = CompileCounters()
    source = make_compilable(directory, kernels=kernels, num_hidden_layers=num_layers).source
    return compile_model(source, CompileSettings(), counters=counters), counters


@pytest.mark.parametrize("num_layers", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_more_layers_are_not_more_code(num_layers: int, tmp_path: Path, kernels: CpuLibrary) -> None:
    model, counters = _model_of(num_layers, tmp_path, kernels)
    assert (len(model.pieces), counters.snapshot()["compiled"]) == (num_layers + 1, 3)
    assert len({piece.run for piece in model.pieces}) == 3


def test_a_recompile_limit_of_one_makes_no_model_run_uncompiled(tmp_path: Path, kernels: CpuLibrary) -> None:
    with torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1):
        for num_layers in (1, 2):
            model, counters = _model_of(num_layers, tmp_path / str(num_layers), kernels)
            assert len(model.pieces) == num_layers + 1
            assert counters.snapshot()["compiled"] == num_layers + 1


@pytest.mark.slow
def test_a_step_allocates_less_than_one_layer_of_the_cache(tmp_path: Path) -> None:
    compiled = Compiled(make_compilable(tmp_path, num_key_value_heads=4), "inductor")
    layer_bytes = compiled.original.cache.caches[0][0].nbytes
    step = compiled.original.step([(0, 2)])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        compiled.model(*step)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < layer_bytes
