"""The checks of graphs compare some layers at a time: no budget counts their memory, and they run once the KV cache is there."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.profiler import profile

from modelworker.graphs.settings import RuntimeMode
from modelworker.graphs.shapes import make_key
from modelworker.worker.check_reference import STRAY_WRITE, CheckReference, relative_difference
from modelworker.worker.engine import Engine
from modelworker.worker.settings import ExecutionSettings, KvCacheSettings, ModelSettings, StepSettings, WorkerSettings
from modelworker.worker.step_runner import PLAIN_WAY
from modelworker.worker.twin_steps import StepMaker, TwinStep
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.engines import engine_of, tiny_settings

NUM_LAYERS = 16
NUM_TOKENS = 512
WIDTH = 1024
MIB = 2**20
KEY = make_key(RuntimeMode.PIECEWISE, NUM_TOKENS, max_sequences=8)
# What the slots of all layers hold in bf16.
SLOT_BYTES = 2 * NUM_LAYERS * NUM_TOKENS * WIDTH * 2


def deep_settings(model: Path) -> WorkerSettings:
    return replace(
        tiny_settings(model),
        model=ModelSettings(model=str(model), dtype="bfloat16"),
        kv_cache=KvCacheSettings(block_size=16, num_blocks=180),
        step=StepSettings(max_sequences=64, max_tokens_per_step=NUM_TOKENS),
        execution=ExecutionSettings(optimization_level=0, graph_mode="NONE"),
    )


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Of a model with many layers, and keys and values that are wide beside its hidden states."""
    model = save_tiny(
        tmp_path_factory.mktemp("deep"),
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=WIDTH // 8,
        max_position_embeddings=256,
    )
    with engine_of(model, deep_settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def step(engine: Engine) -> TwinStep:
    """Rows that fill a graph of any mix."""
    maker = StepMaker(
        random=np.random.default_rng(0),
        block_size=16,
        num_blocks=engine.kv_cache.num_blocks,
        max_sequences=64,
        max_model_len=256,
        vocab_size=engine.description.model.vocab_size,
    )
    step = maker.make(KEY, NUM_TOKENS)
    assert step is not None
    assert step.num_tokens > 0.9 * NUM_TOKENS
    return step


def peak_bytes(run: Callable[[], object]) -> int:
    """Returns by how much torch's memory grows at most while something runs."""
    with torch.inference_mode(), profile(profile_memory=True) as found:
        run()
    assert found.kineto_results is not None
    return max(accumulate((event.nbytes() for event in found.kineto_results.events() if event.name() == "[memory]"), initial=0))


def test_the_check_takes_a_bounded_memory_beside_what_plain_modules_left_in_the_slots(engine: Engine, step: TwinStep) -> None:
    references: list[CheckReference] = []
    rows = range(len(step.rows))
    plain = step.over_first()
    of_the_step = peak_bytes(lambda: engine.runner.decode(plain, engine.runner.stage(plain, None), PLAIN_WAY))
    assert peak_bytes(lambda: references.append(CheckReference(engine.runner, engine.kv_cache, step))) < SLOT_BYTES + 16 * MIB
    [reference] = references
    assert peak_bytes(lambda: reference.run_plain(rows)) < of_the_step + 4 * MIB
    scale = engine.model.model.layers[0].input_layernorm.weight
    with torch.inference_mode():
        before = scale.clone()
        # No tensor may be equal to the one that it is compared with: that takes nothing.
        scale.mul_(1.25)
    try:
        comparisons: list[Any] = []
        assert peak_bytes(lambda: comparisons.append(reference.compare(KEY, PLAIN_WAY))) < of_the_step + 40 * MIB
        assert comparisons[0].difference > 0.01
        assert peak_bytes(reference.has_stray_writes) < 16 * MIB
    finally:
        with torch.inference_mode():
            scale.copy_(before)


@pytest.mark.parametrize("cache", [0, NUM_LAYERS - 1, 2 * NUM_LAYERS - 1])
@pytest.mark.parametrize("is_of_the_rows", [True, False])
def test_one_wrong_value_is_found_in_whatever_layer_it_is(
    engine: Engine, step: TwinStep, cache: int, *, is_of_the_rows: bool
) -> None:
    """Where a token of the step is, which makes a difference, or one that isn't run, which is a stray write."""
    memory = engine.kv_cache.layers[cache // 2][cache % 2]
    ran = range(1, len(step.rows))
    slot = int(step.over_second().slots(16)[-1 if is_of_the_rows else 0])

    def spoil(*_: Any) -> None:
        memory[slot // 16, 3, slot % 16, 5] += 100

    with torch.inference_mode():
        reference = CheckReference(engine.runner, engine.kv_cache, step)
        reference.run_plain(ran)
        assert reference.compare(KEY, PLAIN_WAY)[:2] == (0.0, "")
        handle = engine.model.model.norm.register_forward_hook(spoil)
        try:
            found = reference.compare(KEY, PLAIN_WAY)
        finally:
            handle.remove()
        assert (found.difference > 10, found.fault) == ((True, "") if is_of_the_rows else (False, STRAY_WRITE))
        assert not reference.has_stray_writes()


@pytest.mark.parametrize("blocks", ["first_blocks", "second_blocks"])
@pytest.mark.parametrize("cache", [0, 2 * NUM_LAYERS - 1])
def test_one_changed_value_of_a_context_is_a_stray_write(engine: Engine, step: TwinStep, cache: int, blocks: str) -> None:
    with torch.inference_mode():
        reference = CheckReference(engine.runner, engine.kv_cache, step)
        assert not reference.has_stray_writes()
        engine.kv_cache.layers[cache // 2][cache % 2][int(getattr(step, blocks)[-1]), 7, 15, 127] += 0.5
        assert reference.has_stray_writes()


@st.composite
def values(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    seed = draw(st.integers(0, 2**31))
    scale = draw(st.sampled_from([0.0, 1e-8, 1.0, 300.0]))
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16]), has_nan=st.booleans())
def test_differences_are_those_of_a_written_out_formula(data: st.DataObject, dtype: torch.dtype, *, has_nan: bool) -> None:
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5)))
    actual, expected = (data.draw(values(shape, dtype)) for _ in range(2))
    if has_nan:
        actual[-1, -1, -1] = torch.nan
    before = actual.clone(), expected.clone()
    found = relative_difference(actual, expected)
    wanted = [
        np.abs(one - other).max() / max(np.sqrt(np.square(other).mean()), 1e-6)
        for one, other in zip(actual.double().numpy(), expected.double().numpy(), strict=True)
    ]
    assert found == pytest.approx(np.max(wanted), rel=1e-4, nan_ok=True)
    for tensor, old in zip((actual, expected), before, strict=True):
        torch.testing.assert_close(tensor, old, atol=0, rtol=0, equal_nan=True)
