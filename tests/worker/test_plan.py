"""What start-up decides before it loads anything."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modelworker.worker.errors import SettingsError
from modelworker.worker.models.config import ModelConfig
from modelworker.worker.models.registry import load_model_config
from modelworker.worker.plan import (
    ProductTimes,
    check_weights_fit,
    choose_device,
    choose_dtype,
    choose_feedback_capacity,
    choose_max_model_len,
    judge_memory,
    measure_products,
)
from modelworker.worker.settings import DeviceSettings, FeedbackSettings, FencingSettings, ModelSettings, WorkerSettings
from modelworker_testing.checkpoints import save_tiny

SUPPORT = Path(__file__).parents[1] / "support"
BFLOAT16_FAST = ProductTimes(bfloat16_ms=0.5, float32_ms=2.0)
BFLOAT16_SLOW = ProductTimes(bfloat16_ms=400.0, float32_ms=2.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_model_config(save_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize(
    ("asked", "checkpoint", "products", "chosen", "reasons"),
    [
        ("auto", "bfloat16", BFLOAT16_FAST, torch.bfloat16, []),
        ("auto", "bfloat16", BFLOAT16_SLOW, torch.float32, ["bfloat16_slow"]),
        ("auto", "float32", BFLOAT16_FAST, torch.float32, []),
        ("auto", "float32", BFLOAT16_SLOW, torch.float32, []),
        ("auto", None, BFLOAT16_FAST, torch.float32, []),
        ("auto", "float16", BFLOAT16_FAST, torch.bfloat16, ["float16_rounded"]),
        ("auto", "float16", BFLOAT16_SLOW, torch.float32, ["bfloat16_slow"]),
        ("bfloat16", "bfloat16", BFLOAT16_SLOW, torch.bfloat16, ["bfloat16_slow"]),
        ("bfloat16", "float32", BFLOAT16_FAST, torch.bfloat16, []),
        ("float32", "bfloat16", BFLOAT16_FAST, torch.float32, []),
    ],
)
def test_auto_takes_the_checkpoints_type_unless_bfloat16_is_slower_and_a_forced_slow_one_is_said(
    config: ModelConfig, asked: str, checkpoint: str | None, products: ProductTimes, chosen: torch.dtype, reasons: list[str]
) -> None:
    choice = choose_dtype(ModelSettings(dtype=asked), replace(config, dtype=checkpoint), products)
    assert choice.dtype == chosen
    assert [degradation.reason for degradation in choice.degradations] == reasons


def test_the_reason_of_a_type_has_the_measured_times(config: ModelConfig) -> None:
    choice = choose_dtype(ModelSettings(), replace(config, dtype="bfloat16"), BFLOAT16_SLOW)
    for part in ("the checkpoint is in bfloat16", "400.00 ms in bfloat16", "2.00 ms in float32"):
        assert part in choice.reason
    assert choice.degradations[0].message.endswith("computing in float32")


def test_products_are_measured_in_both_types() -> None:
    products = measure_products(torch.device("cpu"))
    assert products.bfloat16_ms > 0
    assert products.float32_ms > 0


def test_a_gpu_that_is_not_there_is_refused() -> None:
    assert choose_device(DeviceSettings(device="cpu")) == torch.device("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(SettingsError, match="--device cuda"):
            choose_device(DeviceSettings(device="cuda"))


def test_a_length_beyond_the_models_is_refused(config: ModelConfig) -> None:
    assert choose_max_model_len(ModelSettings(), config) == 64
    assert choose_max_model_len(ModelSettings(max_model_len=10), config) == 10
    with pytest.raises(SettingsError, match=r"--max-model-len 65 is more than the model was made for \(64\)"):
        choose_max_model_len(ModelSettings(max_model_len=65), config)


def test_weights_larger_than_the_free_memory_are_refused_with_both_sizes() -> None:
    check_weights_fit(1000, 1000)
    with pytest.raises(SettingsError, match="the weights need 1001 bytes, but only 1000 are free"):
        check_weights_fit(1001, 1000)


def test_a_step_that_may_not_fit_is_a_degradation_and_no_refusal() -> None:
    assert judge_memory(2**20, 2**20) == ()
    (degradation,) = judge_memory(2**20, -5)
    assert degradation.reason == "memory_tight"
    assert "1.0 MiB" in degradation.message
    assert "leave 0 B" in degradation.message


_LARGEST_STEP = """
import re, sys
from pathlib import Path
import numpy as np
from modelworker.worker.client.step import StepSampling
from modelworker.worker.models.registry import load_model_config
from modelworker.worker.plan import step_bytes
from modelworker.worker.settings import *
from modelworker_testing.engines import engine_of, execute

def memory(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1)) * 1024

directory, length, rows, tokens, drafts = Path(sys.argv[1]), 4096, 48, 768, int(sys.argv[2])
settings = WorkerSettings(
    model=ModelSettings(model=str(directory)),
    kv_cache=KvCacheSettings(num_blocks=2 + length // 32 * 2),
    step=StepSettings(max_sequences=rows, max_tokens_per_step=tokens),
    device=DeviceSettings(device="cpu", threads=1),
)
with engine_of(directory, lambda _: settings) as engine:
    table = list(range(1, 1 + length // 32))
    random = np.random.default_rng(0)
    idle = memory("VmRSS")
    execute(engine, query_lens=[tokens], context_lens=[length - tokens], token_ids=random.integers(0, 2000, tokens).tolist(),
            tables=[table])
    own = [[1 + row] for row in range(rows)]
    lens, sampled = [1 + drafts] * rows, rows * (1 + drafts)
    execute(engine, query_lens=lens, context_lens=[0] * rows, token_ids=[5] * sampled, tables=own, draft_lens=[drafts] * rows,
            sampling=StepSampling(temperature=[50.0 if drafts else 1.0] * rows, top_k=[0 if drafts else 500] * rows,
                                  top_p=[0.9] * rows, min_p=[0.01] * rows, num_logprobs=[20 if drafts else 0] * rows))
    estimated = step_bytes(
        settings.step, load_model_config(directory), dtype=engine.kv_cache.geometry.dtype, max_model_len=length, triton=None
    )
    print((memory("VmHWM") - idle) / estimated, estimated)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
# Attention takes the most where the vocabulary is small, sampling where every token is a draft and no filter cuts much off.
@pytest.mark.parametrize(("vocab_size", "drafts"), [(2_000, 0), (30_000, 15)])
def test_the_largest_step_takes_about_the_estimated_memory(tmp_path: Path, vocab_size: int, drafts: int) -> None:
    directory = save_tiny(
        tmp_path, hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        vocab_size=vocab_size, max_position_embeddings=4096, num_hidden_layers=1,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SUPPORT)!r})\n{_LARGEST_STEP}", str(directory), str(drafts)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    share, estimated = map(float, done.stdout.split())
    assert estimated > 2**26
    # Allocators round up and keep a little; compiled kernels hold less than the plain ops of which the estimate is.
    assert (0.5 if drafts else 0.1) < share < 1.2


@pytest.mark.parametrize(
    ("max_feedback_sequences", "max_steps_in_flight", "kept"),
    [(None, 64, 256), (7, 64, 7), (2**20, 256, 2**20), (2**20, 257, None), (5000, 2**20, None)],
)
def test_the_table_of_fed_back_tokens_has_a_bound(
    max_feedback_sequences: int | None, max_steps_in_flight: int, kept: int | None
) -> None:
    settings = WorkerSettings(
        feedback=FeedbackSettings(max_feedback_sequences=max_feedback_sequences),
        fencing=FencingSettings(max_steps_in_flight=max_steps_in_flight),
    )
    if kept is not None:
        assert choose_feedback_capacity(settings) == kept
        return
    with pytest.raises(SettingsError, match="--max-feedback-sequences or --max-steps-in-flight"):
        choose_feedback_capacity(settings)
