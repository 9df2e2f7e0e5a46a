"""Weights and RoPE settings of GGUF files, compared with the models that they were made from."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer

from modelworker.worker.gguf.rope import llama3_factors
from modelworker.worker.gguf.weights import rotated_row_order
from modelworker.worker.import_gguf import import_gguf
from modelworker.worker.progress import LogProgress
from modelworker_testing.gguf_files import (
    Recipe,
    add_field,
    imported,
    load,
    logits,
    permuted,
    recipe_of,
    tiny_model,
)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 4},
        {"head_dim": 24},
        {"attention_bias": True, "mlp_bias": True},
        {"rms_norm_eps": 3e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    ],
    ids=["gqa", "one kv head", "as many kv heads", "head_dim of its own", "biases", "other constants"],
)
def test_an_fp32_import_is_the_model_that_was_written(
    tmp_path: Path, byte_level: tuple[Tokenizer, dict[str, Any]], changes: dict[str, Any], tied: bool
) -> None:
    model = tiny_model(**changes, tie_word_embeddings=tied)
    directory, summary = imported(recipe_of(model, byte_level[1]), tmp_path, dtype="float32")
    again = load(directory)
    # The rows of q and k travel without arithmetic, so every weight comes back bit for bit.
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    torch.testing.assert_close(logits(again), logits(model), rtol=0, atol=1e-5)
    assert summary.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_bf16_import_rounds_every_weight_to_the_nearest_even(tmp_path: Path, good: Recipe) -> None:
    directory, _ = imported(good, tmp_path)
    stored = load_file(directory / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    for name, tensor in tiny_model().state_dict().items():
        assert torch.equal(stored[name], tensor.to(torch.bfloat16)), name


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("F16", 1e-3), ("BF16", 5e-3), ("Q8_0", 1e-2), ("Q5_1", 0.05), ("Q5_0", 0.07), ("Q4_1", 0.1), ("Q4_0", 0.12)],
)
def test_quantized_weights_are_dequantized_within_the_error_of_their_type(
    tmp_path: Path, good: Recipe, kind: str, tolerance: float
) -> None:
    quantized = GGMLQuantizationType[kind]
    good.types = {name: quantized for name, values in good.tensors.items() if values.ndim == 2}
    directory, _ = imported(good, tmp_path, dtype="float32")
    stored = load_file(directory / "model.safetensors")
    for name, tensor in tiny_model().state_dict().items():
        error = (stored[name] - tensor).norm() / tensor.norm()
        assert error <= (tolerance if tensor.dim() == 2 else 0.0), name
    # The exact oracle: the library's own dequantization of the matrix as a whole, rows put back by the converter's inverse.
    source = good.tensors["blk.1.attn_q.weight"]
    whole = gguf.dequantize(gguf.quantize(source, quantized), quantized)
    expected = whole.reshape(4, 8, 2, 64).swapaxes(1, 2).reshape(64, 64)
    assert np.array_equal(stored["model.layers.1.self_attn.q_proj.weight"].numpy(), expected)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4"])
def test_every_type_that_the_library_dequantizes_is_imported(
    tmp_path: Path, byte_level: tuple[Tokenizer, dict[str, Any]], kind: str
) -> None:
    """The library can't quantize to most of these, so the blocks are made of random bytes with small scales."""
    quantized = GGMLQuantizationType[kind]
    model = tiny_model(hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4)
    recipe = recipe_of(model, byte_level[1])
    name = "blk.0.ffn_up.weight"
    block, size = gguf.GGML_QUANT_SIZES[quantized]
    raw = np.random.default_rng(3).integers(0, 32, size=(256, 256 // block * size), dtype=np.uint8)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in recipe.fields.items():
        add_field(writer, key, value)
    for tensor, values in recipe.tensors.items():
        if tensor == name:
            writer.add_tensor(tensor, raw, raw_dtype=quantized)
        else:
            writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    import_gguf(path, tmp_path / "model", dtype="float32", progress=LogProgress())
    stored = load_file(tmp_path / "model" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert np.array_equal(stored.numpy(), gguf.dequantize(raw, quantized))


def test_biases_that_the_file_lacks_beside_others_are_zeros(tmp_path: Path, byte_level: tuple[Tokenizer, dict[str, Any]]) -> None:
    model = tiny_model(attention_bias=True)
    recipe = recipe_of(model, byte_level[1])
    for layer in range(2):
        del recipe.tensors[f"blk.{layer}.attn_output.bias"]
        model.model.layers[layer].self_attn.o_proj.bias.data.zero_()
    directory, _ = imported(recipe, tmp_path, dtype="float32")
    torch.testing.assert_close(logits(load(directory)), logits(model), rtol=0, atol=1e-5)


@given(num_heads=st.integers(1, 12), half=st.integers(1, 40))
def test_the_row_order_undoes_the_converters_permutation(num_heads: int, half: int) -> None:
    rows = np.arange(num_heads * half * 2)
    assert np.array_equal(permuted(rows[:, None], num_heads)[:, 0][rotated_row_order(rows.size, num_heads)], rows)


def test_two_imports_of_one_file_are_the_same_bytes(tmp_path: Path, good: Recipe) -> None:
    path = good.write(tmp_path / "model.gguf")
    for name in ("one", "two"):
        import_gguf(path, tmp_path / name, progress=LogProgress())
    names = sorted(entry.name for entry in (tmp_path / "one").iterdir())
    assert names == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_an_import_needs_little_more_memory_than_a_few_rows(tmp_path: Path, byte_level: tuple[Tokenizer, dict[str, Any]]) -> None:
    """A model of 100 MB in fp32 is imported by a process that may allocate 60 MB beyond what its imports took."""
    big = tiny_model(hidden_size=512, intermediate_size=8192)
    path = recipe_of(big, byte_level[1]).write(tmp_path / "model.gguf")
    assert path.stat().st_size > 100e6
    program = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from modelworker.worker.import_gguf import import_gguf\n"
        "from modelworker.worker.progress import LogProgress\n"
        "before = int(Path('/proc/self/status').read_text().split('VmData:')[1].split()[0]) * 1024\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (before + 60_000_000,) * 2)\n"
        "import_gguf(Path(sys.argv[1]), Path(sys.argv[2]), progress=LogProgress())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path), str(tmp_path / "model")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("rope", "extra"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}),
        ({"rope_type": "linear", "factor": 2.5}, {"llama.rope.scale_linear": 2.5}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
                "llama.rope.scaling.finetuned": True,
            },
        ),
        (
            {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 1.5 * (0.1 * np.log(8.0) + 1.0),
            },
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 8.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
                "llama.rope.scaling.yarn_beta_slow": 2.0,
                "llama.rope.scaling.attn_factor": 1.5,
            },
        ),
        ({"rope_type": "default"}, {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}),
        ({"rope_type": "default"}, {"llama.rope.scaling.factor": 0.0}),
    ],
    ids=["linear", "linear, older key", "yarn", "yarn with every number", "none", "not set"],
)
def test_rope_scaling_is_carried_over(
    tmp_path: Path, byte_level: tuple[Tokenizer, dict[str, Any]], rope: dict[str, Any], extra: dict[str, Any]
) -> None:
    model = tiny_model(rope_parameters={"rope_theta": 10000.0, **rope})
    directory, _ = imported(recipe_of(model, byte_level[1], extra=extra), tmp_path, dtype="float32")
    torch.testing.assert_close(logits(load(directory), 200), logits(model, 200), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "parameters",
    [
        (8.0, 1.0, 4.0, 8192, 500000.0, 128),
        (32.0, 1.0, 4.0, 8192, 500000.0, 64),
        (8.0, 1.0, 4.0, 8192, 500000.0, 24),
        (4.0, 1.0, 8.0, 4096, 10000.0, 128),
        (16.0, 1.0, 2.0, 2048, 100000.0, 128),
    ],
)
def test_llama3_scaling_is_recovered_from_its_factors(
    tmp_path: Path, byte_level: tuple[Tokenizer, dict[str, Any]], parameters: tuple[float, float, float, int, float, int]
) -> None:
    factor, low, high, original, theta, head_dim = parameters
    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "rope_theta": theta,
        "original_max_position_embeddings": original,
    }
    model = tiny_model(rope_parameters=rope, max_position_embeddings=original * 8, head_dim=head_dim)
    recipe = recipe_of(model, byte_level[1])
    # The factors as transformers has them: plain frequencies over scaled ones.
    plain = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    recipe.tensors["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq).numpy()
    directory, _ = imported(recipe, tmp_path, dtype="float32")
    assert json.loads((directory / "config.json").read_text())["rope_scaling"] == {
        k: v for k, v in rope.items() if k != "rope_theta"
    }
    torch.testing.assert_close(load(directory).model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)


def test_the_llama3_factors_are_those_of_transformers() -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "rope_theta": 500000.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_model(rope_parameters=rope, max_position_embeddings=131072, head_dim=128)
    plain = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    ours = llama3_factors(theta=500000.0, head_dim=128, factor=8.0, low=1.0, high=4.0, original_context=8192.0)
    np.testing.assert_allclose(plain / ours, model.model.rotary_emb.inv_freq.double().numpy(), rtol=1e-5)


def test_factors_of_one_mean_plain_rope(tmp_path: Path, good: Recipe) -> None:
    good.tensors["rope_freqs.weight"] = np.ones(8, dtype=np.float32)
    directory, _ = imported(good, tmp_path, dtype="float32")
    assert json.loads((directory / "config.json").read_text())["rope_scaling"] is None
