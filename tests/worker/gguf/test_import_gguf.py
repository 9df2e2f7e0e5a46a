"""`modelworker import-gguf`: what it refuses, what it leaves behind, and the demo model."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import AutoTokenizer

from modelworker.worker.cli import main
from modelworker.worker.errors import CheckpointError, SetupError
from modelworker.worker.import_gguf import import_gguf
from modelworker.worker.progress import LogProgress
from modelworker_testing.gguf_files import Recipe, add_field, imported, load


def _change(key: str, value: Any) -> Callable[[Recipe], None]:
    def apply(recipe: Recipe) -> None:
        recipe.fields[key] = value

    return apply


def _yarn_with(key: str, value: Any) -> Callable[[Recipe], None]:
    def apply(recipe: Recipe) -> None:
        prefix = "llama.rope.scaling"
        recipe.fields |= {f"{prefix}.type": "yarn", f"{prefix}.factor": 4.0, f"{prefix}.original_context_length": 64}
        recipe.fields[f"{prefix}.{key}"] = value

    return apply


def _tensor(name: str, change: Callable[[np.ndarray], np.ndarray] | None) -> Callable[[Recipe], None]:
    def apply(recipe: Recipe) -> None:
        if change is None:
            del recipe.tensors[name]
        else:
            recipe.tensors[name] = change(recipe.tensors.get(name, np.zeros((4, 32), dtype=np.float32)))

    return apply


def _nan(values: np.ndarray) -> np.ndarray:
    values = values.copy()
    values.reshape(-1)[7] = np.nan
    return values


def _architecture(recipe: Recipe) -> None:
    recipe.architecture = "qwen3"


def _twice(recipe: Recipe) -> None:
    tokens = list(recipe.fields["tokenizer.ggml.tokens"])
    tokens[10] = tokens[9]
    recipe.fields["tokenizer.ggml.tokens"] = tokens


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_architecture, "general.architecture: found 'qwen3', expected one of: llama"),
        (_change("llama.block_count", None), "llama.block_count is missing"),
        (_change("llama.block_count", "two"), "llama.block_count: found 'two', expected an integer"),
        (_change("llama.block_count", 3), "the tensor blk.2.attn_norm.weight is missing"),
        (_change("llama.block_count", 1), "tensors that a LlamaForCausalLM doesn't have: blk.1.attn_k.weight"),
        (_change("llama.attention.head_count", 0), "llama.attention.head_count: found 0, expected at least 1"),
        (_change("llama.attention.head_count_kv", 3), "head_count_kv: found 3, expected a divisor of head_count, 4"),
        (
            _change("llama.attention.head_count_kv", [2, 4]),
            "head_count_kv: found [2, 4], expected an integer, the same in every layer",
        ),
        (_change("llama.attention.key_length", 15), "an even number"),
        (_change("llama.attention.value_length", 8), "value_length: found 8, expected 16"),
        (_change("llama.rope.dimension_count", 8), "dimension_count: found 8, expected 16"),
        (_change("llama.vocab_size", 641), "llama.vocab_size: found 641, expected 640"),
        (_change("llama.expert_count", 8), "llama.expert_count: found 8, expected 0"),
        (_change("llama.attention.sliding_window", 64), "sliding_window: found 64, expected 0 or at least the context length, 256"),
        (_change("llama.attention.causal", False), "llama.attention.causal: found False"),
        (_change("llama.logit_scale", 2.0), "won't ignore: llama.logit_scale"),
        (_change("llama.rope.scaling.type", "longrope"), "found 'longrope', expected none, linear or yarn"),
        (
            _change("llama.rope.scaling.attn_factor", 1.25),
            "attn_factor: found 1.25, expected 1.0 where llama.rope.scaling.type is none",
        ),
        (_change("llama.rope.scaling.factor", -2.0), "llama.rope.scaling.factor: found -2.0, expected a number above 0"),
        (_yarn_with("yarn_ext_factor", 0.5), "yarn_ext_factor: found 0.5, expected 1.0"),
        (_yarn_with("yarn_attn_factor", 0.5), "yarn_attn_factor: found 0.5, expected 1.0"),
        (_yarn_with("yarn_log_multiplier", 0.1), "yarn_log_multiplier: found 0.1, expected 0.0"),
        (_yarn_with("original_context_length", None), "llama.rope.scaling.original_context_length is missing"),
        (_change("llama.attention.layer_norm_rms_epsilon", None), "layer_norm_rms_epsilon is missing"),
        (_tensor("token_embd.weight", None), "the tensor token_embd.weight is missing"),
        (_tensor("output_norm.weight", None), "the tensor output_norm.weight is missing"),
        (
            _tensor("blk.0.ffn_up.weight", lambda values: values[:-1]),
            "blk.0.ffn_up.weight has the shape (95, 64), expected (96, 64)",
        ),
        (_tensor("blk.0.attn_sinks.weight", lambda values: values), "doesn't have: blk.0.attn_sinks.weight"),
        (_tensor("blk.1.attn_v.weight", _nan), "blk.1.attn_v.weight holds NaN or infinite values"),
        (_tensor("rope_freqs.weight", lambda _: np.arange(1, 9, dtype=np.float32)), "factors that llama3 scaling can't produce"),
        (_tensor("rope_freqs.weight", lambda _: np.ones(5, dtype=np.float32)), "found 5 factors, expected 8"),
        (_change("tokenizer.ggml.model", "bert"), "tokenizer.ggml.model: found 'bert', expected gpt2 or llama"),
        (_change("tokenizer.ggml.pre", "klingon"), "tokenizer.ggml.pre: found 'klingon', expected one of: gpt-2, smollm"),
        (_change("tokenizer.ggml.pre", None), "name the right one with --pre"),
        (_change("tokenizer.ggml.merges", ["ab"]), "tokenizer.ggml.merges: found 'ab', expected two tokens"),
        (_change("tokenizer.ggml.merges", ["zzz qqq"]), "tokenizer.ggml.merges does not fit tokenizer.ggml.tokens"),
        (_change("tokenizer.ggml.merges", None), "tokenizer.ggml.merges is missing"),
        (_change("tokenizer.ggml.token_type", [1, 2]), "tokenizer.ggml.token_type: found 2"),
        (_change("tokenizer.ggml.eos_token_id", 5000), "eos_token_id: found 5000, expected a token id below"),
        (_change("tokenizer.ggml.tokens", [str(number) for number in range(700)]), "at most 640 tokens"),
        (_twice, "stands there twice"),
    ],
)
def test_what_cannot_be_imported_exactly_is_refused_by_name(
    tmp_path: Path, good: Recipe, change: Callable[[Recipe], None], said: str
) -> None:
    change(good)
    with pytest.raises(CheckpointError) as raised:
        imported(good, tmp_path)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]


def test_a_type_that_cannot_be_dequantized_is_refused(tmp_path: Path, good: Recipe) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in good.fields.items():
        add_field(writer, key, value)
    for name, values in good.tensors.items():
        writer.add_tensor(name, values.astype(np.int8) if name == "blk.0.attn_q.weight" else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.weight is of the type I8, which can't be dequantized"):
        import_gguf(path, tmp_path / "model", progress=LogProgress())


@pytest.mark.parametrize(
    "content", [b"", b"GG", b"PK\x03\x04 a zip", b"GGUF", b"GGUF" + b"\xff" * 40, b"GGUF\x03\0\0\0" + b"\x01" + b"\0" * 15]
)
def test_a_file_that_is_no_gguf_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.gguf: (not a GGUF file|a damaged or truncated GGUF file)") as raised:
        import_gguf(path, tmp_path / "model", progress=LogProgress())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.2, 0.5, 0.9, 0.9999])
def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path, good: Recipe, share: float) -> None:
    path = good.write(tmp_path / "model.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        import_gguf(path, tmp_path / "model", progress=LogProgress())


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.gguf", tmp_path):
        with pytest.raises(CheckpointError, match="can't be read"):
            import_gguf(path, tmp_path / "model", progress=LogProgress())


def test_a_directory_with_content_is_only_replaced_when_asked(tmp_path: Path, good: Recipe) -> None:
    (tmp_path / "model").mkdir()
    imported(good, tmp_path)
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(SetupError, match=r"model: exists and is not empty; --force replaces it"):
        imported(good, tmp_path)
    assert (tmp_path / "model" / "notes.txt").exists()
    imported(good, tmp_path, force=True)
    assert not (tmp_path / "model" / "notes.txt").exists()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "model.gguf"]


def test_a_failed_import_leaves_the_former_directory_alone(tmp_path: Path, good: Recipe) -> None:
    imported(good, tmp_path)
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    good.tensors["blk.1.ffn_down.weight"] = _nan(good.tensors["blk.1.ffn_down.weight"])
    with pytest.raises(CheckpointError):
        imported(good, tmp_path, force=True)
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["model", "model.gguf"]


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path, good: Recipe) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(SetupError, match="exists and is not a directory"):
        imported(good, tmp_path, force=True)


def test_trouble_with_the_disk_is_one_line_and_leaves_nothing(tmp_path: Path, good: Recipe) -> None:
    path = good.write(tmp_path / "model.gguf")
    program = (
        "import resource, signal, sys\n"
        "from modelworker.worker.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", program, "import-gguf", str(path), str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "can't be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.gguf"]


def test_the_command_prints_a_summary(tmp_path: Path, good: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    path = good.write(tmp_path / "model.gguf")
    assert main(["import-gguf", str(path), str(tmp_path / "one")]) == 0
    assert "2 layers, 0.1 M parameters in bfloat16" in capsys.readouterr().out
    assert main(["import-gguf", "--json", str(path), str(tmp_path / "two")]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["size_bytes"] == (tmp_path / "two" / "model.safetensors").stat().st_size
    assert (summary["num_layers"], summary["vocab_size"], summary["dtype"]) == (2, 640, "bfloat16")


def test_the_command_ends_with_one_line_and_a_code_on_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    path.write_text("no model")
    assert main(["import-gguf", str(path), str(tmp_path / "model")]) == 1
    said = capsys.readouterr().err.strip()
    assert "not a GGUF file: it starts with b'no m', expected b'GGUF'" in said
    assert "\n" not in said


def test_smollm2_continues_a_text_and_answers_a_question_as_it_should(smollm2_dir: Path) -> None:
    """Greedy texts of this Q4_1 checkpoint under transformers in fp32."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = load(smollm2_dir)
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    assert inputs.input_ids.tolist() == [[504, 3575, 282, 4649, 314]]
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=2, do_sample=False)[0])
    assert text == "The capital of France is Paris."
    chat = [{"role": "user", "content": "What is gravity?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=8, do_sample=False)[0][inputs.input_ids.shape[1] :])
    assert text == "Gravity is a fundamental concept in physics"
