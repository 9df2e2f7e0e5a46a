"""Steps that are measured: what they are, what they are called, and what is left out."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelworker.graphs.dispatch import Reason
from modelworker.graphs.settings import RuntimeMode
from modelworker.worker import cli
from modelworker.worker.engine import Engine
from modelworker.worker.machine_limits import LimitProbe
from modelworker.worker.settings import ExecutionSettings
from modelworker.worker.step_bench import StepCase, make_batch, obstacle, run_cases
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.engines import engine_of, tiny_settings_with
from modelworker_testing.kernels import own_kernels

Output = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    execution = ExecutionSettings(optimization_level=1, graph_mode="FULL_DECODE_ONLY", compiler="eager", decode_graph_sizes=(1, 4))
    with engine_of(save_tiny(tmp_path_factory.mktemp("model")), tiny_settings_with(execution=execution)) as engine:
        yield engine


cases = st.builds(
    StepCase,
    num_sequences=st.integers(1, 9),
    query_len=st.integers(1, 12),
    context_len=st.integers(0, 60),
    chunk=st.integers(0, 20),
)


@given(cases)
def test_a_measured_step_is_one_that_the_worker_would_accept(engine: Engine, case: StepCase) -> None:
    if obstacle(case, engine.description):
        return
    batch = make_batch(case, engine.description)
    block_size = engine.description.kv_cache.block_size
    slots = batch.slots(block_size)
    assert len(np.unique(slots)) == len(slots) == sum(query_len for query_len, _ in case.rows)
    written = set((slots // block_size).tolist())
    for row, (query_len, context_len) in enumerate(case.rows):
        used = batch.block_tables[row, : -(-(query_len + context_len) // block_size)]
        assert used.min() >= 1
        assert used.max() < engine.description.kv_cache.num_blocks
        assert written.isdisjoint(used[: context_len // block_size].tolist())


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (StepCase(num_sequences=9, query_len=1, context_len=1), "it needs 9 sequences, the worker has 8"),
        (StepCase(num_sequences=8, query_len=1, context_len=1, chunk=4), "it needs 9 sequences, the worker has 8"),
        (StepCase(num_sequences=1, query_len=65, context_len=0), "it needs 65 tokens in a step, the worker has 64"),
        (StepCase(num_sequences=1, query_len=1, context_len=64), "it needs 65 tokens of a sequence, the worker has 64"),
        (StepCase(num_sequences=8, query_len=8, context_len=3), ""),
    ],
)
def test_a_step_beyond_the_limits_is_left_out_with_the_reason(engine: Engine, case: StepCase, reason: str) -> None:
    assert obstacle(case, engine.description) == reason


def test_every_way_that_there_is_is_measured_under_its_own_name(engine: Engine) -> None:
    probe = LimitProbe(torch.device("cpu"), torch.float32, own_kernels())
    case = StepCase(num_sequences=3, query_len=1, context_len=8)

    def ways() -> list[str]:
        return [result.way for result in run_cases(engine, [case], probe, rounds=1)]

    assert ways() == ["eager", *(["compiled"] if RuntimeMode.NONE in engine.runner.compiled_modes else []), "FULL"]
    engine.runner.disable(RuntimeMode.FULL, Reason.DISABLED)
    engine.runner.disable(RuntimeMode.NONE, Reason.DISABLED)
    assert ways() == ["eager"]


def test_a_decode_of_several_tokens_is_measured_as_the_drafts_that_it_stands_for(engine: Engine) -> None:
    batch = make_batch(StepCase(num_sequences=2, query_len=4, context_len=8, chunk=5), engine.description)
    assert batch.draft_lens.tolist() == [3, 3, 0]


@pytest.mark.parametrize("as_json", [True, False])
def test_the_command_prints_a_row_for_each_step_and_way(tmp_path: Path, capsys: Output, as_json: bool) -> None:
    words = ["bench", "step", "--model", str(save_tiny(tmp_path)), "--enforce-eager", "--batch", "1,2,99", "--context", "8"]
    words += ["--prefill", "6", "--rounds", "2", "--num-blocks", "32", "--threads", "1", *(["--json"] if as_json else [])]
    assert cli.main(words) == 0
    printed = capsys.readouterr()
    assert "decode 99 x 1, context 8 is left out: it needs 99" in printed.err
    names = ["decode 1 x 1, context 8", "decode 2 x 1, context 8", "prefill 6"]
    if as_json:
        records = [json.loads(line) for line in printed.out.splitlines()]
        assert [(record["case"], record["way"]) for record in records] == [(name, "eager") for name in names]
        assert all(record["step_ms"] >= record["min_ms"] > 0 and record["times_floor"] > 0 for record in records)
    else:
        assert [line.partition("  ")[0] for line in printed.out.splitlines() if "eager" in line] == names
