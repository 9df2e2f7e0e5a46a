"""What graphs are expected to take, and what happens when they take more."""

import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modelworker.graphs.settings import CaptureMode, GraphSettings
from modelworker.ops.triton_library import TritonLibrary, load_triton
from modelworker.worker.errors import SettingsError
from modelworker.worker.memory_budget import MemoryBudget, graph_bytes
from modelworker.worker.models.registry import load_model_config
from modelworker.worker.plan import step_bytes
from modelworker.worker.settings import ExecutionSettings, KvCacheSettings, ModelSettings, StepSettings
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.engines import engine_of, tiny_settings_with
from modelworker_testing.kernels import own_kernels

MIB = 2**20
BUDGET = MemoryBudget(free_bytes=100 * MIB, kv_cache_bytes=60 * MIB, graph_bytes=10 * MIB, step_bytes=20 * MIB)
SETTINGS = GraphSettings(max_sequences=48, max_tokens_per_step=512)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough for its activations to be more than rounding."""
    return save_tiny(
        tmp_path_factory.mktemp("wide"), hidden_size=512, intermediate_size=2048, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, num_hidden_layers=2,
    )  # fmt: skip


def test_graphs_within_the_estimate_are_reported_beside_it() -> None:
    findings, degradations = BUDGET.judge_graphs(8 * MIB)
    assert findings == ("graphs take 8.0 MiB, and were estimated to take 10.0 MiB",)
    assert degradations == ()


def test_graphs_above_the_estimate_are_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        findings, degradations = BUDGET.judge_graphs(11 * MIB)
    assert findings == ("graphs take 11.0 MiB, and were estimated to take 10.0 MiB: the KV cache was sized for less",)
    assert caplog.messages == [*findings]
    assert degradations == ()


def test_graphs_that_leave_too_little_for_the_largest_step_are_a_degradation() -> None:
    _, (degradation,) = BUDGET.judge_graphs(21 * MIB)
    assert degradation.reason == "memory_tight"


def test_graphs_and_a_kv_cache_beyond_the_free_memory_end_the_start_with_the_flags_to_change() -> None:
    BUDGET.judge_graphs(40 * MIB)
    with pytest.raises(SettingsError, match=r"that is more than the 100\.0 MiB that were free: lower --kv-cache-memory .*sizes"):
        BUDGET.judge_graphs(40 * MIB + 1)


def test_without_graphs_there_is_nothing_to_say_of_them_but_the_step_counts() -> None:
    assert BUDGET.judge_graphs(0) == ((), ())
    findings, (degradation,) = replace(BUDGET, graph_bytes=0, step_bytes=41 * MIB).judge_graphs(0)
    assert (findings, degradation.reason) == ((), "memory_tight")


def test_what_is_not_captured_is_not_estimated_and_a_gpu_keeps_every_graph_beside_the_pool(wide: Path) -> None:
    config = load_model_config(wide)

    def estimate(settings: GraphSettings, device: str) -> int:
        return graph_bytes(settings, config, dtype=torch.bfloat16, device=torch.device(device), triton=None)

    assert estimate(replace(SETTINGS, mode=CaptureMode.NONE), "cuda") == 0
    assert 0 < estimate(SETTINGS, "cpu") < estimate(SETTINGS, "cuda")
    few = replace(SETTINGS, decode_sizes=(48,), mixed_sizes=(96,))
    assert estimate(few, "cpu") == estimate(replace(few, mixed_sizes=(1, 2, 96)), "cpu")
    assert estimate(few, "cuda") < estimate(replace(few, mixed_sizes=(1, 2, 96)), "cuda")


def test_partial_results_of_attention_on_a_gpu_are_counted_in_graphs_that_attend_and_in_steps(wide: Path) -> None:
    config, triton = load_model_config(wide), load_triton()

    def of_attention(num_tokens: int) -> int:
        return triton.attention_workspace_bytes(num_tokens, num_heads=config.num_heads, head_dim=config.head_dim)

    def graphs(settings: GraphSettings) -> int:
        return graph_bytes(settings, config, dtype=torch.bfloat16, device=torch.device("cuda"), triton=triton)

    pieces = replace(SETTINGS, mode=CaptureMode.PIECEWISE, mixed_sizes=(48,))
    # An equal number of graphs, which do or don't hold attention.
    decodes = replace(SETTINGS, mode=CaptureMode.FULL_DECODE_ONLY, decode_sizes=(48,))
    # Either is whole pages of a GPU's allocator.
    assert 6 * MIB <= graphs(decodes) - graphs(pieces) <= of_attention(48) + 2 * MIB

    def step(triton: TritonLibrary | None) -> int:
        settings = StepSettings(max_sequences=48, max_tokens_per_step=512)
        return step_bytes(settings, config, dtype=torch.bfloat16, max_model_len=64, triton=triton)

    assert of_attention(512) / 2 < step(triton) - step(None) < of_attention(512)


@pytest.mark.parametrize(("dtype", "sizes"), [("float32", None), ("bfloat16", (512,))])
def test_graphs_take_no_more_than_was_estimated_and_not_much_less(dtype: str, sizes: tuple[int, ...] | None, wide: Path) -> None:
    own_kernels()
    settings = tiny_settings_with(
        model=ModelSettings(model=str(wide), dtype=dtype),
        kv_cache=KvCacheSettings(num_blocks=64),
        step=StepSettings(max_sequences=48, max_tokens_per_step=512),
        execution=ExecutionSettings(compiler="eager", mixed_graph_sizes=sizes, decode_graph_sizes=sizes and (48,)),
    )
    with engine_of(wide, settings) as engine:
        (finding,) = [text for text in engine.description.self_check.findings if text.startswith("graphs take")]
    taken, estimated = (float(number) for number in re.findall(r"([\d.]+) MiB", finding))
    assert 0.2 < taken / estimated <= 1, finding


def test_what_graphs_are_expected_to_take_is_not_free_for_the_kv_cache(wide: Path) -> None:
    settings = tiny_settings_with(
        model=ModelSettings(model=str(wide)),
        step=StepSettings(max_sequences=1, max_tokens_per_step=2**30),
        execution=ExecutionSettings(compiler="eager", mixed_graph_sizes=(2**29,)),
    )
    with pytest.raises(SettingsError, match="for the KV cache, but only 0 are free for it"), engine_of(wide, settings):
        pass
