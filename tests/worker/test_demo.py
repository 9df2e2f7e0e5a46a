"""The demo as people start it, on a small random model with the tokenizer of SmolLM2."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import save_file

from modelworker.worker.demo_display import Pane, PaneDisplay, PlainDisplay, percentile, step_table
from modelworker.worker.scheduler import FinishReason, RequestFinished, StepExecuted

HIDDEN, HEADS, HEAD_DIM, INTERMEDIATE = 32, 4, 8, 48


@pytest.fixture(scope="module")
def small_model(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("small")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(smollm2_dir / name, directory)
    config = json.loads((smollm2_dir / "config.json").read_text())
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "torch_dtype": "float32",
        "dtype": "float32",
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps({**config, **sizes}))
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        **{f"model.layers.0.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"},
        "model.layers.0.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }
    generator = np.random.default_rng(0)
    save_file(
        {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}, directory / "model.safetensors"
    )
    return directory


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelworker.worker.demo", *arguments]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "COLUMNS": "120"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=180)


def test_the_demo_shows_six_texts_a_table_of_steps_and_a_summary_and_leaves_no_worker_behind(small_model: Path) -> None:
    result = run_demo("--model", str(small_model), "--max-tokens", "8", "--", "--max-model-len", "512", "--num-blocks", "40")
    assert result.returncode == 0, result.stdout + result.stderr
    for number in range(1, 7):
        assert f"[{number}] arrives before step" in result.stdout
        assert f"[{number}] ends after" in result.stdout
    assert "of 32 tokens" in result.stdout
    assert "decoding" in result.stdout
    assert "tokens/s; step p50" in result.stdout
    assert "worker drained and stopped" in result.stdout


def test_a_worker_that_does_not_start_fails_the_demo_with_its_last_words(small_model: Path) -> None:
    result = run_demo("--model", str(small_model), "--", "--num-blocks", "none")
    assert result.returncode == 1
    assert "modelworker: error: the worker ended with exit code 2 before it was ready" in result.stderr
    assert "argument --num-blocks: 'none' is not an integer" in result.stderr


def test_a_model_without_a_tokenizer_is_refused_before_anything_starts(tmp_path: Path) -> None:
    result = run_demo("--model", str(tmp_path))
    assert result.returncode == 1
    assert (
        result.stderr == f"modelworker: error: {tmp_path}/tokenizer.json: not found; expected a tokenizer.json or a model "
        "directory that has one\n"
    )


WORDS = [f"word{number} " for number in range(60)]


@pytest.mark.parametrize(("width", "height"), [(120, 40), (80, 24), (60, 12), (200, 80)])
def test_panes_fit_the_terminal_while_texts_grow_and_show_all_of_them_at_the_end(width: int, height: int) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, color_system=None, width=width, height=height)
    panes = [Pane(number, f"prompt {number}", "greedy", 3) for number in range(1, 7)]
    display = PaneDisplay(console, panes)
    for word in WORDS:
        for pane in panes:
            pane.text += word
            display.grew(pane, word)
    display.live.refresh()
    assert len(console.render_lines(display.live.get_renderable(), pad=False)) <= max(height, 3 * 3 + 1)
    before = len(output.getvalue())
    display.close()
    last_picture = output.getvalue()[before:]
    for word in WORDS:
        assert last_picture.count(word.strip()) >= 6


@pytest.mark.parametrize("size", [1, 3, 50, 10_000])
def test_plain_lines_together_hold_the_whole_text_however_it_came(size: int) -> None:
    text = "A line.\n\n" + "".join(WORDS) + "x" * 300 + " the end"
    output = io.StringIO()
    display = PlainDisplay(Console(file=output, width=80))
    pane = Pane(1, "prompt", "greedy", 3)
    display.arrived(pane, 1)
    for start in range(0, len(text), size):
        display.grew(pane, text[start : start + size])
    display.ended(pane, RequestFinished(request_id=0, reason=FinishReason.STOP, output_ids=(1, 2)))
    first, *lines, last = output.getvalue().splitlines()
    assert first == "[1] arrives before step 1 (3 tokens, greedy): prompt"
    assert last == "[1] ends after 2 tokens: stop"
    assert " ".join(line.removeprefix("[1]   ") for line in lines).split() == text.split()


def executed(step_id: int, num_tokens: int, milliseconds: float) -> StepExecuted:
    return StepExecuted(
        step_id=step_id,
        num_tokens=num_tokens,
        num_sequences=num_tokens,
        num_decodes=num_tokens,
        num_drafts=0,
        num_accepted=0,
        mode="NONE",
        padded_tokens=num_tokens,
        round_trip_ms=milliseconds,
        worker_ms=milliseconds,
    )


def test_steps_of_one_shape_in_a_row_share_a_line_of_the_table() -> None:
    table = step_table([executed(1, 2, 5.0), executed(2, 2, 7.0), executed(3, 3, 9.0), executed(4, 2, 1.0)])
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    lines = [line.split() for line in capture.get().splitlines() if "NONE" in line]
    assert lines == [
        ["1", "-", "2", "2", "2", "2", "NONE", "2", "5.0", "7.0"],
        ["3", "3", "3", "3", "NONE", "3", "9.0", "9.0"],
        ["4", "2", "2", "2", "NONE", "2", "1.0", "1.0"],
    ]


def test_the_table_of_more_than_a_thousand_steps_fits_80_columns() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(step_table([executed(step_id, 1000, 12345.6) for step_id in range(1000, 1200)]))
    assert "1000 - 1199" in capture.get()
    assert "12345.6" in capture.get()
    assert "…" not in capture.get()


@pytest.mark.parametrize(("percent", "value"), [(1, 1), (50, 5), (90, 9), (99, 10), (100, 10)])
def test_a_percentile_is_a_value_that_was_measured(percent: float, value: float) -> None:
    assert percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], percent) == value
    assert percentile([3.5], percent) == 3.5
