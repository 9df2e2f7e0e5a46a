"""Loops over the catalog: the C++ form of each op at every ISA level."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modelworker.ops.catalog import CATALOG
from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.cpu.recorder import Recorder
from modelworker.ops.cpu.threads import torch_threads
from modelworker.ops.op_spec import OpSpec, SampleShape
from modelworker_testing.op_checks import cpp_form, memories, memory, named_sample, results, run_and_check

SPECS = [spec for spec in CATALOG.values() if not spec.gpu_only]


def shapes() -> Iterator[Any]:
    for spec in SPECS:
        for shape in spec.shapes():
            yield pytest.param(spec, shape, id=f"{spec.name}-{shape}")


def some_shapes() -> Iterator[Any]:
    for spec in SPECS:
        for shape in spec.shapes():
            if shape.num_tokens == 17 and shape.padding:
                yield pytest.param(spec, shape, id=f"{spec.name}-{shape}")


def all_bits(arguments: dict[str, Any], result: Any) -> list[Tensor]:
    """All memory that an op was given, and what it returned."""
    return [*memories(arguments).values(), *map(memory, results(result).values())]


@pytest.mark.parametrize(("spec", "shape"), list(shapes()))
def test_a_kernel_agrees_with_the_reference_and_writes_nothing_else(
    cpu_library: CpuLibrary, spec: OpSpec, shape: SampleShape
) -> None:
    run_and_check(spec, cpp_form(spec, cpu_library), shape)


@pytest.mark.parametrize(("spec", "shape"), list(some_shapes()))
def test_a_kernels_result_does_not_depend_on_the_number_of_threads(
    cpu_library: CpuLibrary, spec: OpSpec, shape: SampleShape
) -> None:
    run = cpp_form(spec, cpu_library)
    bits = []
    for num_threads in (1, 3):
        arguments = named_sample(spec, shape)
        with torch_threads(num_threads):
            bits.append(all_bits(arguments, run(*arguments.values())))
    assert all(torch.equal(one, other) for one, other in zip(*bits, strict=True))


@pytest.mark.parametrize(("spec", "shape"), list(some_shapes()))
def test_a_recorded_kernel_computes_from_what_its_arguments_hold_when_it_is_replayed(
    cpu_library: CpuLibrary, recorder: Recorder, spec: OpSpec, shape: SampleShape
) -> None:
    run = cpp_form(spec, cpu_library)
    arguments = named_sample(spec, shape)
    recorded = recorder.record(lambda: run(*arguments.values()))
    others = named_sample(spec, replace(shape, draw=1))
    for held, other in zip(arguments.values(), others.values(), strict=True):
        if isinstance(held, Tensor):
            memory(held).copy_(memory(other))
    recorded.replay()
    for replayed, ran in zip(all_bits(arguments, recorded.outputs), all_bits(others, run(*others.values())), strict=True):
        assert torch.equal(replayed, ran)
    recorded.close()
