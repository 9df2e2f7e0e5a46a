"""What the worker's models launch on a GPU: compiled ahead of time, in which forms, and how large."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton

from modelworker_testing.checkpoints import TINY
from modelworker_testing.triton_launches import Launch, recorded_launches
from modelworker_testing.triton_models import (
    LaunchingModel,
    case_name,
    cases,
    kept_kernels,
    launches_of,
    read_tables,
    resources_of,
    sample,
)

QUICK = ("Llama-3.1-8B", 90, torch.bfloat16)
# What a program may have at most (CUDA C++ Programming Guide, technical specifications). Cards of 8.6 and 8.9 run the code for 8.0.
SHARED_BYTES = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
MAX_SEQUENCES = 64
MAX_TOKENS = 128


def parameters() -> Iterator[Any]:
    for case in cases():
        yield pytest.param(*case, id=case_name(*case), marks=() if case == QUICK else pytest.mark.slow)


@pytest.mark.parametrize(("name", "capability", "dtype"), list(parameters()))
def test_every_form_compiles_and_fits(name: str, capability: int, dtype: torch.dtype) -> None:
    found = resources_of(launches_of(name, capability, dtype))
    for form, several in found.items():
        for one in several:
            assert one.spilled_bytes == 0, form
            assert one.shared_bytes <= SHARED_BYTES[capability], form
    # Last, for it says no more than that something has changed.
    if triton.__version__ not in read_tables():
        pytest.skip(f"the resources of forms compiled by Triton {triton.__version__} are not recorded")
    assert found == read_tables()[triton.__version__][case_name(name, capability, dtype)]


def test_every_table_has_exactly_the_cases_that_are_compiled() -> None:
    tables = read_tables()
    assert tables
    assert all(set(table) == {case_name(*case) for case in cases()} for table in tables.values())


def test_three_programs_of_a_decode_fit_on_an_h200() -> None:
    """What the stages and registers of its tiles are chosen for: 65,536 registers and 227 KiB of a multiprocessor."""
    decodes = [
        one
        for table in read_tables().values()
        for case, forms in table.items()
        for form, found in forms.items()
        for one in found
        if case.endswith("bfloat16 sm_90") and "ROWS=16" in form
    ]
    assert len(decodes) >= 2 * 8
    assert all(3 * 128 * one.registers <= 65536 and 3 * one.shared_bytes <= 227 * 1024 for one in decodes)


def grids(launches: list[Launch]) -> list[tuple[str, tuple[int, ...]]]:
    return [(launch.kernel, launch.grid) for launch in launches]


@pytest.fixture
def model() -> LaunchingModel:
    fields = {**TINY, "head_dim": 64, "max_position_embeddings": 512}
    return LaunchingModel(fields, dtype=torch.bfloat16, max_tokens=MAX_TOKENS, max_sequences=MAX_SEQUENCES)


def test_no_step_makes_a_form_that_start_up_has_not_made(model: LaunchingModel) -> None:
    """Row C13: a decode of every batch, drafts, and prompts beside decodes; values of lengths reach no launch at all."""
    with kept_kernels(), recorded_launches() as found:
        model.prepare()
        model.step(MAX_TOKENS, 1)
        sample(256, MAX_SEQUENCES)
        before = found.num_compiled
        assert before > 0
        for num_sequences in range(1, MAX_SEQUENCES + 1):
            for query_len in (1, 2):
                model.step(num_sequences * query_len, num_sequences)
            sample(256, num_sequences)
        for num_tokens in range(1, MAX_TOKENS + 1):
            model.step(num_tokens, 1 if num_tokens % 3 else 3)
        assert found.num_compiled == before


def test_all_steps_of_one_size_have_the_same_grids_whatever_their_lengths(model: LaunchingModel) -> None:
    with kept_kernels(), recorded_launches() as found:
        for num_tokens, num_sequences in ((8, 8), (40, 8), (64, 1), (16, 3)):
            seen = []
            for context_len in range(1, 65):
                begun = len(found.launches)
                starts = torch.linspace(0, num_tokens, num_sequences + 1).round().int()
                inputs = model.buffers.inputs(num_tokens, num_sequences)
                inputs.query_starts.copy_(starts)
                inputs.seq_lens.copy_(starts.diff() + context_len)
                model.step(num_tokens, num_sequences)
                seen.append(grids(found.launches[begun:]))
            assert all(one == seen[0] for one, _ in itertools.pairwise(seen))


def test_the_recorder_notes_a_form_that_start_up_did_not_make(model: LaunchingModel) -> None:
    """What the test of row C13 stands on: it would notice."""
    with kept_kernels(), recorded_launches() as found:
        model.step(1, 1)
        before = found.num_compiled
        model.prepare()
        assert found.num_compiled > before
