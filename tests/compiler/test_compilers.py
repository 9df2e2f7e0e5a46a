"""Counting what compiles, machines without a compiler, generated code outside of Inductor, programs as text."""

import importlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelworker.compiler.artifact import Artifact, DamagedArtifactError, read_artifact, write_artifact
from modelworker.compiler.compile import compile_model
from modelworker.compiler.counters import CompileCounters, ProcessCompilations
from modelworker.compiler.errors import NoCompilerError
from modelworker.compiler.generated_code import GeneratedCode, extract_code, load_code
from modelworker.compiler.passes import default_passes
from modelworker.compiler.program import OpStage, PieceStage, Program, SlotArgument
from modelworker.compiler.program_json import program_from_json, program_to_json
from modelworker.compiler.settings import PASS_NAMES, CompileSettings, compile_settings_of
from modelworker_testing.small_models import small_source

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


@pytest.mark.parametrize("compiler", ["/nowhere/g++", "/bin/false"])
def test_a_machine_without_a_working_compiler_is_said_to_be_one(compiler: str) -> None:
    # torch reads CXX when it is loaded.
    without = importlib.import_module("torch._inductor.config").patch({"cpp.cxx": (compiler,)})
    with without, pytest.raises(NoCompilerError, match=r"C\+\+ compiler"):
        compile_model(small_source(lambda x: torch.sin(x) + 1), CompileSettings(), counters=CompileCounters())


def test_what_compiles_elsewhere_in_the_process_is_counted_too() -> None:
    counters = CompileCounters()
    before = counters.process_compilations()
    torch.compile(lambda x: x * 2 + 1, backend="aot_eager", dynamic=False)(torch.rand(3))
    assert counters.process_compilations() - before == ProcessCompilations(dynamo=1)


def test_expectations_of_counters_hold_or_say_what_was_counted() -> None:
    counters = CompileCounters()
    with counters.expect(pieces=31, compiled=3):
        counters.increment("pieces", 31)
        counters.increment("compiled", 3)
        counters.increment("others")
    with pytest.raises(AssertionError, match=r"expected \{'compiled': 0\}, counted \{'compiled': 1\}"), counters.expect(compiled=0):
        counters.increment("compiled")


@pytest.fixture
def triton_knobs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Triton's listener as it was afterwards."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    return triton.knobs


def test_kernels_that_triton_compiles_are_counted_and_an_earlier_listener_is_told(triton_knobs: Any) -> None:
    told: list[bool] = []
    triton_knobs.compilation.listener = lambda **event: told.append(event["cache_hit"])
    counters = CompileCounters()
    counters.watch_triton()
    before = counters.process_compilations()
    for cache_hit in (False, True, False):
        triton_knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=cache_hit)
    assert (counters.process_compilations() - before).triton == 2
    assert told == [False, True, False]


def test_levels_compile_nothing_then_pieces_then_measured_ones() -> None:
    assert compile_settings_of(0) is None
    assert compile_settings_of(1) == compile_settings_of(2) == CompileSettings()
    assert compile_settings_of(3, partition="inductor") == CompileSettings(autotune=True, partition="inductor")
    assert compile_settings_of(1, disabled_passes=PASS_NAMES[:1]) == CompileSettings(disabled_passes=PASS_NAMES[:1])
    with pytest.raises(ValueError, match="4"):
        compile_settings_of(4)


def test_the_names_of_the_passes_are_those_that_settings_know() -> None:
    assert tuple(graph_pass.name for graph_pass in default_passes()) == PASS_NAMES


GENERATED = """
# AOT ID: ['0_inference']
import torch
import os
import tempfile
from math import inf, nan
from torch._inductor.utils import maybe_profile
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
aten = torch.ops.aten
alone = torch.ops.nothing_like_that
async_compile = AsyncCompile()
{kernel}
async_compile.wait(globals())
del async_compile
def helper(x):
    return x * inf
class Runner:
    def __init__(self, partitions):
        self.partitions = partitions
    def call(self, args):
        x, y = args
        args.clear()
        extern_kernels.mm(x, y, out=(z := torch.empty(2, 2)))
        return (helper(z), {call})
runner = Runner(partitions=[])
call = runner.call
def benchmark_compiled_module(times=10):
    from torch._inductor.utils import print_performance
    return print_performance(lambda: call([]))
if __name__ == "__main__":
    benchmark_compiled_module()
"""


class ExternKernels:
    mm = staticmethod(torch.mm)
    special_mm = staticmethod(lambda *args: None)


def test_of_generated_code_only_what_runs_is_kept() -> None:
    code = extract_code(GENERATED.format(kernel="", call="aten.neg(x)"), {"extern_kernels": ExternKernels})
    assert "_inductor" not in code.source
    assert not {"alone", "benchmark", "AsyncCompile", "tempfile", "nan", "os"} & set(code.source.replace("(", " ").split())
    x = torch.rand(2, 2)
    product, negative = load_code(code)([x, x])
    assert torch.equal(product, x @ x * math.inf)
    assert torch.equal(negative, -x)


def test_what_generated_code_needs_of_inductor_is_kept() -> None:
    source = GENERATED.format(
        kernel="kernel = async_compile.triton('kernel', '''text''')", call="extern_kernels.special_mm(x, kernel)"
    )
    code = extract_code(source, {"extern_kernels": ExternKernels})
    assert "from torch._inductor.select_algorithm import extern_kernels" in code.source
    assert "from torch._inductor.async_compile import AsyncCompile" in code.source
    assert "kernel = async_compile.triton" in code.source
    assert "async_compile.wait(globals())" in code.source


def test_a_kernel_that_is_no_library_is_an_import_error() -> None:
    with pytest.raises(ImportError):
        load_code(GeneratedCode("def call(args): ...", {"kernel": b"nonsense"}))


ARGUMENTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.builds(SlotArgument, st.integers(0, 99)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
SLOTS = st.lists(st.integers(0, 99), max_size=4).map(tuple)
STAGES = st.builds(PieceStage, st.integers(0, 9), SLOTS, SLOTS, SLOTS) | st.builds(
    OpStage,
    st.text(max_size=9),
    st.lists(ARGUMENTS, max_size=3).map(tuple),
    st.lists(st.tuples(st.text(max_size=3), ARGUMENTS), max_size=2).map(tuple),
    SLOTS,
    SLOTS,
)
NAMES = st.lists(st.text(max_size=5), max_size=3).map(tuple)
PROGRAMS = st.builds(
    Program, NAMES, NAMES, st.integers(0, 99), st.lists(STAGES, max_size=4).map(tuple), SLOTS, st.booleans(), NAMES
)


@given(PROGRAMS)
def test_any_program_survives_json(program: Program) -> None:
    assert program_from_json(program_to_json(program)) == program


KERNELS = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.binary(max_size=9), max_size=2)


@given(PROGRAMS, KERNELS, st.data())
def test_any_artifact_survives_and_any_change_of_a_byte_is_found(
    program: Program, kernels: dict[str, bytes], data: st.DataObject
) -> None:
    artifact = Artifact(
        program, tuple(GeneratedCode(f"code {index}", kernels) for index in range(len(program.pieces))), (), kernels
    )
    factors = {"torch": "2", "shape": [1, "num_tokens"]}
    written = write_artifact(artifact, factors)
    assert written == write_artifact(artifact, factors)
    assert read_artifact(written, factors) == artifact
    position = data.draw(st.integers(0, len(written) - 1))
    damaged = bytearray(written)
    damaged[position] ^= data.draw(st.integers(1, 255))
    for wrong, expected in ((bytes(damaged), factors), (written[:position], factors), (written, {"torch": "3"})):
        with pytest.raises(DamagedArtifactError):
            read_artifact(wrong, expected)
