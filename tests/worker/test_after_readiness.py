"""Once a worker is ready, nothing is traced, compiled or captured any more, whatever steps come, and memory stays flat."""

import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from modelworker.compiler.counters import CompileCounters
from modelworker.graphs.dispatch import Choice, Reason
from modelworker.graphs.settings import RuntimeMode
from modelworker.graphs.shapes import GraphKey
from modelworker.ops.cpu.recorder import Recorder
from modelworker.worker.batch import SamplingBatch, StepBatch
from modelworker.worker.check_batch import CheckRow, CheckSampling, make_check_batch
from modelworker.worker.counters import Counters
from modelworker.worker.engine import Engine
from modelworker.worker.result import GraphMode, StepResult
from modelworker.worker.settings import ExecutionSettings
from modelworker.worker.step_runner import PLAIN_WAY, Way
from modelworker_testing.batches import make_batch, with_drafts
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.engines import engine_of, tiny_settings_with
from modelworker_testing.graph_batches import rows_that_hit

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

BLOCK_SIZE, NUM_BLOCKS, MAX_SEQUENCES, MAX_TOKENS = 4, 32, 8, 64
DECODE_QUERY_LENS = (1, 3)
ALLOWED_GROWTH_BYTES = 20 * 2**20


@pytest.fixture(scope="module")
def counters() -> Counters:
    """Of the engine's worker."""
    return Counters()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, counters: Counters) -> Iterator[Engine]:
    settings = tiny_settings_with(execution=ExecutionSettings(decode_query_lens=DECODE_QUERY_LENS))
    with engine_of(save_tiny(tmp_path_factory.mktemp("tiny")), settings, counters) as engine:
        assert engine.description.degradations == ()
        yield engine


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def random_step(random: np.random.Generator) -> StepBatch:
    """A step of decodes of one query length or of several, of prompts and chunks, of both, or of nothing; greedy or sampling."""
    kind = random.choice(["decode", "drafts", "prefill", "mixed", "empty"], p=[0.4, 0.1, 0.2, 0.28, 0.02])
    if kind == "empty":
        return make_batch([])
    decode_len = int(random.choice(DECODE_QUERY_LENS))
    blocks = iter(random.permutation(NUM_BLOCKS - 1) + 1)
    rows: list[tuple[int, int, list[int]]] = []
    for _ in range(int(random.integers(1, MAX_SEQUENCES + 1))):
        if kind == "drafts":
            decode_len = int(random.choice(DECODE_QUERY_LENS))
        if kind in ("decode", "drafts") or (kind == "mixed" and random.random() < 0.5):
            query_len, context_len = decode_len, int(random.integers(1, 10))
        else:
            query_len, context_len = int(random.integers(1, 17)), int(random.choice([0, random.integers(0, 6)]))
        width = -(-(query_len + context_len) // BLOCK_SIZE)
        table = [int(block) for block, _ in zip(blocks, range(width), strict=False)]
        if len(table) < width or sum(row[0] for row in rows) + query_len > MAX_TOKENS:
            break
        rows.append((query_len, context_len, table))
    batch = make_batch(rows, seed=int(random.integers(1000)))
    if kind in ("decode", "drafts"):
        batch = with_drafts(batch)
    if random.random() < 0.3:
        sampling = CheckSampling(temperature=float(random.choice([0.0, 0.7])), top_k=int(random.choice([0, 5])), top_p=0.9)
        batch = dataclasses.replace(batch, sampling=sampling_of(sampling, len(rows)))
    return dataclasses.replace(batch, sample=(random.random(len(rows)) < 0.8) | (batch.draft_lens > 0))


def sampling_of(sampling: CheckSampling, num_rows: int) -> SamplingBatch | None:
    row = CheckRow(token_ids=np.ones(1, np.int32), context_len=0, blocks=np.ones(1, np.int32))
    return make_check_batch([row] * num_rows, sampling).sampling


def assert_ran_as_chosen(batch: StepBatch, choice: Choice, result: StepResult) -> None:
    graph, key = result.graph, choice.key
    assert graph.mode == GraphMode(int(choice.mode))
    assert graph.fallback_reason == choice.reason.value
    assert graph.padded_tokens == (batch.num_tokens if key is None else key.num_tokens)
    if key is None or key.num_sequences is None:
        assert graph.padded_sequences == batch.num_sequences
    else:
        assert graph.padded_sequences == key.num_sequences
    assert graph.compiled == (key is None)
    assert result.sequence_errors == ()


def compile_events(counters: Counters) -> dict[str, int]:
    """What a worker's router is told of compiling."""
    return {key: amount for key, amount in counters.snapshot().items() if key.startswith("compile_events_total")}


def captured_modes(engine: Engine) -> set[RuntimeMode]:
    return {key.mode for key in engine.runner.captured}


@pytest.mark.parametrize("num_steps", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_steps_of_random_shapes_compile_and_capture_nothing_and_memory_stays_flat(
    engine: Engine, counters: Counters, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    recordings: list[object] = []
    record = Recorder.record
    monkeypatch.setattr(Recorder, "record", lambda self, run: (recordings.append(run), record(self, run))[1])
    graphs = engine.runner.graphs
    assert graphs is not None
    random = np.random.default_rng(num_steps)
    engine.reset_kv_cache()
    compilations, hits, events = CompileCounters().process_compilations(), dict(graphs.hits), compile_events(counters)
    modes: set[GraphMode] = set()
    reasons: set[str] = set()
    expected_hits = dict(hits)
    for step in range(num_steps):
        batch = random_step(random)
        choice = engine.runner.choose(batch)
        result = engine.step(batch)
        assert_ran_as_chosen(batch, choice, result)
        modes.add(result.graph.mode)
        reasons.add(result.graph.fallback_reason)
        if choice.key is not None:
            expected_hits[choice.key] += 1
        if step == num_steps // 10:
            gc.collect()
            resident = resident_bytes()
    gc.collect()
    growth = resident_bytes() - resident
    print(f"{num_steps} steps: resident memory grew by {growth / 2**20:.1f} MiB; modes {modes}, reasons {reasons}")
    assert CompileCounters().process_compilations() == compilations
    assert compile_events(counters) == events
    assert recordings == []
    assert graphs.hits == expected_hits
    assert growth < ALLOWED_GROWTH_BYTES
    assert modes == set(GraphMode)
    assert reasons == {"", "empty", "not_decode", "not_uniform", "over_max"}


def test_a_compilation_after_readiness_would_be_counted(engine: Engine, counters: Counters) -> None:
    before = compile_events(counters)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    now = compile_events(counters)
    traced = 'compile_events_total{event="process_dynamo"}'
    assert now == before | {traced: before[traced] + 1}


def test_every_captured_graph_is_hit_by_the_batch_that_it_was_captured_for(engine: Engine) -> None:
    """Through the engine: one function makes the key of a capture and that of a look-up."""
    graphs = engine.runner.graphs
    assert graphs is not None
    assert captured_modes(engine) == {RuntimeMode.PIECEWISE, RuntimeMode.FULL}
    for key in engine.runner.captured:
        rows = [(query, min(context, 7), [1, 2, 3][: -(-(query + context) // 4)]) for query, context in rows_that_hit(key)]
        blocks = iter(range(1, NUM_BLOCKS))
        rows = [(query, context, [next(blocks) for _ in range(-(-(query + context) // 4))]) for query, context, _ in rows]
        before = graphs.hits[key]
        result = engine.step(with_drafts(make_batch(rows)))
        assert graphs.hits[key] == before + 1, key
        assert result.graph.padded_tokens == key.num_tokens


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 0, [1])],
        [(3, 0, [1])],
        [(3, 0, [1]), (3, 4, [2, 3])],
        [(1, 0, [1]), (1, 4, [2, 3])],
    ],
    ids=["a prompt of 1 token", "a prompt of 1 + k tokens", "a prompt and a verification", "a prompt of 1 token and a decode"],
)
def test_a_fresh_prompt_as_long_as_a_decode_never_runs_in_a_full_graph(
    engine: Engine, rows: list[tuple[int, int, list[int]]]
) -> None:
    engine.reset_kv_cache()
    result = engine.step(with_drafts(make_batch(rows)))
    assert (result.graph.mode, result.graph.fallback_reason) == (GraphMode.PIECEWISE, "not_decode")
    engine.reset_kv_cache()
    eager = engine.step_as(with_drafts(make_batch(rows)), PLAIN_WAY)
    assert result.sampled_ids.tolist() == eager.sampled_ids.tolist()


@pytest.mark.parametrize("rows", [[(3, 4, [1, 2])], [(3, 4, [1, 2]), (1, 4, [3, 4])]], ids=["alone", "beside a decode"])
def test_a_chunk_of_a_prompt_as_long_as_a_drafted_row_never_runs_in_a_full_graph(
    engine: Engine, rows: list[tuple[int, int, list[int]]]
) -> None:
    result = engine.step(make_batch(rows))
    assert (result.graph.mode, result.graph.fallback_reason) == (GraphMode.PIECEWISE, "not_decode")
    assert result.sampled_counts.tolist() == [1] * len(rows)


def test_a_replay_after_unrelated_allocations_and_garbage_collection_gives_the_same(engine: Engine) -> None:
    graphs = engine.runner.graphs
    assert graphs is not None
    engine.reset_kv_cache()
    batch = make_batch([(1, 5, [4, 9]), (1, 2, [7]), (1, 11, [1, 2, 3])])

    def run(key: GraphKey | None) -> list[torch.Tensor]:
        engine.reset_kv_cache()
        with torch.inference_mode():
            way = Way(Choice(key, Reason.NONE))
            hidden = engine.runner.decode(batch, engine.runner.stage(batch, key), way).hidden_states.clone()
        return [hidden, *(cache.clone() for layer in engine.kv_cache.layers for cache in layer)]

    for mode in (RuntimeMode.PIECEWISE, RuntimeMode.FULL):
        choice = engine.runner.choose_mode(batch, mode)
        assert choice is not None
        before = run(choice.key)
        gc.collect()
        # The pool of these graphs has 2 MiB.
        noise = [torch.full((size,), float("nan")) for size in (2**21, 2**12, 2**10, 300, 64, 16) for _ in range(2)]
        for actual, expected in zip(run(choice.key), before, strict=True):
            assert torch.equal(actual, expected)
        assert all(tensor.isnan().all() for tensor in noise)
