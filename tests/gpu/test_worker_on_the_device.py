"""A tiny model on the device, started as a worker starts: every way to run a step gives the tokens of plain modules on the CPU."""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from modelworker.compiler.counters import CompileCounters
from modelworker.graphs.backend import StaleInputError
from modelworker.graphs.settings import RuntimeMode
from modelworker.worker.arrays import Int32Array
from modelworker.worker.batch import StepBatch
from modelworker.worker.check_batch import CheckRow, make_check_batch
from modelworker.worker.counters import Counters
from modelworker.worker.cpu_kernels import CpuKernels
from modelworker.worker.engine import Engine
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.models.checkpoint import Checkpoint
from modelworker.worker.models.registry import load_model_config
from modelworker.worker.models.weights import load_weights
from modelworker.worker.progress import LogProgress
from modelworker.worker.result import GraphExecution, GraphMode
from modelworker.worker.settings import (
    CacheSettings,
    DeviceSettings,
    ExecutionSettings,
    KvCacheSettings,
    ModelSettings,
    StepSettings,
    WorkerSettings,
)
from modelworker.worker.startup import build_engine
from modelworker_testing.bare_engine import build_bare_engine
from modelworker_testing.checkpoints import save_tiny

pytestmark = pytest.mark.cuda
BLOCK_SIZE, NUM_BLOCKS = 4, 64
PROMPT_LENS = (5, 9, 1, 14)
NUM_DECODES = 12
LEVELS = {"eager": 0, "compiled": 1, "graphs": 2}
KERNEL_OPS = {"paged_attention", "rotary_store_kv", "sample_tokens"}


class Generated(NamedTuple):
    """What a few prompts became.

    Attributes:
        tokens: of each prompt.
        prefills: how its chunks ran.
        decodes: how its decodes ran.
    """

    tokens: list[list[int]]
    prefills: list[GraphExecution]
    decodes: list[GraphExecution]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def engine_at(checkpoint: Path, device: torch.device, cache_folder: Path) -> Iterator[Callable[[str], Engine]]:
    """Engines by the name of their level, each started once."""
    num_threads = torch.get_num_threads()
    engines: dict[str, Engine] = {}

    def get(name: str) -> Engine:
        if name not in engines:
            settings = settings_of(checkpoint, device, cache_folder, LEVELS[name])
            engines[name] = build_engine(settings, LogProgress(), Counters())
        return engines[name]

    yield get
    torch.set_num_threads(num_threads)
    gc.unfreeze()


def settings_of(checkpoint: Path, device: torch.device, cache_folder: Path, level: int) -> WorkerSettings:
    return WorkerSettings(
        model=ModelSettings(model=str(checkpoint), dtype="float32"),
        kv_cache=KvCacheSettings(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS),
        step=StepSettings(max_sequences=8, max_tokens_per_step=64),
        device=DeviceSettings(device="cuda" if device.type == "cuda" else "cpu", threads=1),
        execution=ExecutionSettings(optimization_level=level),
        cache=CacheSettings(cache_dir=str(cache_folder)),
    )


@pytest.fixture(scope="module")
def expected(checkpoint: Path, cache_folder: Path) -> Generated:
    """What plain modules give on the CPU, in native ops."""

    def load(model: CausalLM, device: torch.device) -> None:
        load_weights(model, Checkpoint.open(checkpoint), device=device, digest=False)

    cpu = torch.device("cpu")
    engine = build_bare_engine(
        settings_of(checkpoint, cpu, cache_folder, 0),
        config=load_model_config(checkpoint),
        dtype=torch.float32,
        device=cpu,
        kernels=CpuKernels(),
        fill=load,
    )
    return generate(engine)


def generate(engine: Engine) -> Generated:
    """Prefills prompts, two in one step and one in two chunks, and decodes them greedily, all in each step."""
    random = np.random.default_rng(5)
    prompts = [random.integers(3, 101, length).astype(np.int32) for length in PROMPT_LENS]
    width = -(-(max(PROMPT_LENS) + NUM_DECODES + 1) // BLOCK_SIZE)
    tables = (random.permutation(len(prompts) * width) + 1).astype(np.int32).reshape(-1, width)
    tokens: list[list[int]] = [[] for _ in prompts]
    prefills, decodes = [], []

    def step(rows: Sequence[tuple[int, Int32Array, int]]) -> GraphExecution:
        batch = make_check_batch(
            [CheckRow(token_ids=new, context_len=context, blocks=tables[prompt]) for prompt, new, context in rows]
        )
        result = engine.step(batch)
        assert result.sequence_errors == ()
        for (prompt, _, _), token in zip(rows, result.sampled_ids, strict=True):
            tokens[prompt].append(int(token))
        return result.graph

    prefills.append(step([(0, prompts[0], 0), (1, prompts[1], 0)]))
    prefills.append(step([(3, prompts[3][:6], 0)]))
    tokens[3].clear()
    prefills.append(step([(2, prompts[2], 0), (3, prompts[3][6:], 6)]))
    for index in range(NUM_DECODES):
        rows = [(prompt, np.array([tokens[prompt][-1]], np.int32), length + index) for prompt, length in enumerate(PROMPT_LENS)]
        decodes.append(step(rows))
        # Another number of rows than any graph has, in another order.
        if index == NUM_DECODES // 2:
            decodes.append(step([(prompt, tail, context) for prompt, tail, context in reversed(again(rows, tokens))]))
    return Generated(tokens, prefills, decodes)


def again(rows: Sequence[tuple[int, Int32Array, int]], tokens: list[list[int]]) -> list[tuple[int, Int32Array, int]]:
    """The first three rows once more: they write what is there already, and sample what they sampled."""
    del tokens[0][-1], tokens[1][-1], tokens[2][-1]
    return list(rows[:3])


def test_plain_modules_give_the_tokens_of_the_cpu(engine_at: Callable[[str], Engine], expected: Generated) -> None:
    found = generate(engine_at("eager"))
    assert found.tokens == expected.tokens
    assert {(one.mode, one.compiled, one.fallback_reason) for one in (*found.prefills, *found.decodes)} == {
        (GraphMode.NONE, False, "disabled")
    }


def test_compiled_pieces_give_the_tokens_of_the_cpu(engine_at: Callable[[str], Engine], expected: Generated) -> None:
    engine = engine_at("compiled")
    assert engine.description.degradations == ()
    found = generate(engine)
    assert found.tokens == expected.tokens
    assert {(one.mode, one.compiled) for one in (*found.prefills, *found.decodes)} == {(GraphMode.NONE, True)}


def test_graphs_give_the_tokens_of_the_cpu(engine_at: Callable[[str], Engine], expected: Generated) -> None:
    engine = engine_at("graphs")
    found = generate(engine)
    assert found.tokens == expected.tokens
    assert {one.mode for one in found.prefills} == {GraphMode.PIECEWISE}
    assert {(one.mode, one.fallback_reason) for one in found.decodes} == {(GraphMode.FULL, "")}
    assert {one.padded_tokens for one in found.decodes} == {4}


def test_full_graphs_are_captured_and_their_replays_wait_for_nothing(
    engine_at: Callable[[str], Engine], device: torch.device
) -> None:
    engine = engine_at("graphs")
    assert engine.description.degradations == ()
    assert engine.runner.dispatcher.disabled == {}
    full = [key for key in engine.runner.captured if key.mode is RuntimeMode.FULL]
    assert full
    if device.type == "cuda":
        assert {op.implementation for op in engine.description.ops if op.name in KERNEL_OPS} == {"triton"}
        for key in full:
            inputs = engine.runner.stage_blank(key)
            torch.cuda.synchronize(device)
            torch.cuda.set_sync_debug_mode("error")
            try:
                engine.runner.replay(key, inputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize(device)


def test_a_graph_refuses_inputs_that_lie_elsewhere(engine_at: Callable[[str], Engine]) -> None:
    runner = engine_at("graphs").runner
    assert runner.captured
    for key in runner.captured:
        inputs = runner.stage_blank(key)
        with pytest.raises(StaleInputError, match=r"input 0 is torch\.int32"):
            runner.replay(key, inputs._replace(token_ids=inputs.token_ids.clone()))
        runner.replay(key, inputs)


def test_nothing_is_compiled_after_readiness(engine_at: Callable[[str], Engine]) -> None:
    engine, counters = engine_at("graphs"), CompileCounters()
    if "triton" in sys.modules:
        counters.watch_triton()
    random = np.random.default_rng(9)
    before = counters.process_compilations()
    for _ in range(60):
        engine.step(random_step(random))
    assert counters.process_compilations() == before


def random_step(random: np.random.Generator) -> StepBatch:
    rows, block = [], 1
    for _ in range(int(random.integers(1, 9))):
        context, query = int(random.integers(0, 20)), int(random.choice([1, 1, 1, 2, 7]))
        blocks = np.arange(block, block + 7, dtype=np.int32)
        block += 7
        rows.append(CheckRow(token_ids=random.integers(0, 101, query).astype(np.int32), context_len=context, blocks=blocks))
    return make_check_batch(rows)
