"""Loading weights: every parameter exactly once, and every fault of a checkpoint named."""

import json
import logging
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelworker.worker.errors import CheckpointError
from modelworker.worker.models import (
    CausalLM,
    Checkpoint,
    LoadedWeights,
    TensorParallel,
    build_model,
    load_model_config,
    load_weights,
)
from modelworker_testing.paged_runs import load_ours, our_logits, random_prompt
from modelworker_testing.tiny_models import make_reference, reference_logits, save_reference

CLOSE = {"atol": 2e-4, "rtol": 2e-4}
CPU = torch.device("cpu")


def load(directory: Path, **options: Any) -> LoadedWeights:
    model = build_model(load_model_config(directory), dtype=torch.float32)
    return load_weights(model, Checkpoint.open(directory), device=CPU, **options)


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def set_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def parameters(model: CausalLM) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def write_safetensors(path: Path, header: dict[str, Any] | bytes, data: bytes = b"") -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.bias",
        "model.layers.1.input_layernorm.weight",
        "model.norm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
)
def test_a_missing_tensor_stops_the_start_by_name_also_one_part_of_a_stacked_parameter(tmp_path: Path, name: str) -> None:
    save_reference(tmp_path, attention_bias=True)
    edit(tmp_path, lambda tensors: tensors.pop(name))
    text = refusal(tmp_path)
    assert name in text
    assert "missing" in text
    assert str(tmp_path / "model.safetensors") in text


def test_many_missing_tensors_are_one_short_line(tmp_path: Path) -> None:
    save_reference(tmp_path)
    set_config(tmp_path, num_hidden_layers=9)
    assert "and 58 more are missing" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.sinks", "model.layers.2.mlp.up_proj.weight", "lm_head.bias", "other"])
def test_an_extra_tensor_stops_the_start_by_name(tmp_path: Path, name: str) -> None:
    save_reference(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({name: torch.ones(3)}))
    text = refusal(tmp_path)
    assert name in text
    assert "not part of the model" in text


def test_biases_in_the_file_are_refused_when_the_config_says_there_are_none(tmp_path: Path) -> None:
    save_reference(tmp_path, attention_bias=True, mlp_bias=True)
    set_config(tmp_path, attention_bias=False)
    assert "q_proj.bias" in refusal(tmp_path)
    set_config(tmp_path, attention_bias=True, mlp_bias=False)
    assert "gate_proj.bias" in refusal(tmp_path)


def test_biases_of_one_are_those_of_transformers(tmp_path: Path) -> None:
    reference = make_reference(attention_bias=True)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(1.0)
    reference.save_pretrained(tmp_path)
    prompt = random_prompt(20)
    torch.testing.assert_close(our_logits(load_ours(tmp_path), [prompt])[0], reference_logits(reference, prompt), **CLOSE)


def test_saved_buffers_that_are_computed_anyway_are_ignored_and_nothing_else_of_that_kind(tmp_path: Path) -> None:
    save_reference(tmp_path)
    extras = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "model.rotary_emb.inv_freq": torch.zeros(8),
        "model.layers.0.self_attn.masked_bias": torch.zeros(1),
    }
    digest = load(tmp_path).digest
    edit(tmp_path, lambda tensors: tensors.update(extras))
    assert load(tmp_path).digest == digest
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.bias": torch.zeros(1)}))
    assert "self_attn.bias" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "expected", "found"),
    [
        ("model.norm.weight", torch.ones(63), "[64]", "[63]"),
        ("model.norm.weight", torch.ones(1, 64), "[64]", "[1, 64]"),
        ("model.layers.0.self_attn.k_proj.weight", torch.ones(64, 64), "[32, 64]", "[64, 64]"),
        ("model.layers.0.mlp.gate_proj.weight", torch.ones(64, 96), "[96, 64]", "[64, 96]"),
        ("model.embed_tokens.weight", torch.ones(128, 64), "[101, 64]", "[128, 64]"),
        ("lm_head.weight", torch.ones(0, 64), "[101, 64]", "[0, 64]"),
    ],
)
def test_a_misshapen_tensor_is_refused_with_both_shapes(
    tmp_path: Path, name: str, tensor: Tensor, expected: str, found: str
) -> None:
    save_reference(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({name: tensor}))
    text = refusal(tmp_path)
    for part in (name, expected, found, "model.safetensors"):
        assert part in text


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64, torch.bool, torch.float64])
def test_a_tensor_of_another_kind_of_dtype_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    save_reference(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64).to(dtype)}))
    text = refusal(tmp_path)
    assert "model.norm.weight" in text
    assert "expected the dtype F32, BF16 or F16, found " in text


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("served", [torch.float32, torch.bfloat16])
def test_floating_point_tensors_are_converted_to_the_type_that_the_model_computes_in(
    tmp_path: Path, saved: torch.dtype, served: torch.dtype
) -> None:
    reference = make_reference().to(saved)
    reference.save_pretrained(tmp_path)
    model = load_ours(tmp_path, dtype=served)
    torch.testing.assert_close(model.get_parameter("lm_head.weight"), reference.lm_head.weight.detach().to(served), atol=0, rtol=0)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_tied_and_untied_with_and_without_a_head_in_the_file(
    tmp_path: Path, is_tied: bool, head: str, caplog: pytest.LogCaptureFixture
) -> None:
    reference = make_reference(tie_word_embeddings=False)
    if head == "equal":
        reference.lm_head.weight = torch.nn.Parameter(reference.model.embed_tokens.weight.detach().clone())
    reference.save_pretrained(tmp_path)
    set_config(tmp_path, tie_word_embeddings=is_tied)
    if head == "absent":
        edit(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
        reference.lm_head.weight = reference.model.embed_tokens.weight
    if head == "absent" and not is_tied:
        assert "lm_head.weight" in refusal(tmp_path)
        return
    with caplog.at_level(logging.WARNING):
        model = load_ours(tmp_path)
    prompt = random_prompt(20)
    torch.testing.assert_close(our_logits(model, [prompt])[0], reference_logits(reference, prompt), **CLOSE)
    assert model.has_tied_head == (is_tied and head != "different")
    assert ("both are used, not tied" in caplog.text) == (is_tied and head == "different")
    shared = model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    assert shared == model.has_tied_head


def test_a_tied_checkpoint_may_hold_the_embedding_under_the_heads_name_alone(tmp_path: Path) -> None:
    reference = save_reference(tmp_path, tie_word_embeddings=True)
    expected = load(tmp_path).digest
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop("model.embed_tokens.weight")}))
    prompt = random_prompt(20)
    torch.testing.assert_close(our_logits(load_ours(tmp_path), [prompt])[0], reference_logits(reference, prompt), **CLOSE)
    assert load(tmp_path).digest == expected


@pytest.mark.parametrize("cut", [1, 1024])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_truncated_file_is_refused_with_both_sizes(tmp_path: Path, cut: int, sharded: bool) -> None:
    make_reference().save_pretrained(tmp_path, max_shard_size="60KB" if sharded else "1GB")
    path = sorted(tmp_path.glob("model*.safetensors"))[-1]
    size = path.stat().st_size
    os.truncate(path, size - cut)
    text = refusal(tmp_path)
    for part in (str(path), "truncated", str(size), str(size - cut)):
        assert part in text


def test_a_file_that_is_too_long_is_refused_with_both_sizes(tmp_path: Path) -> None:
    save_reference(tmp_path)
    path = tmp_path / "model.safetensors"
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"x" * 7)
    text = refusal(tmp_path)
    assert f"too long: expected {size} bytes" in text
    assert str(size + 7) in text


@pytest.mark.parametrize("content", [b"", b"1234", b"\x10\0\0\0\0\0\0\0{}"])
def test_a_file_without_a_whole_header_is_refused_with_sizes(tmp_path: Path, content: bytes) -> None:
    save_reference(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    text = refusal(tmp_path)
    assert "truncated" in text
    assert f"found {len(content) if len(content) < 8 else len(content) - 8}" in text


_ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "named"),
    [
        (b"{", "header is invalid"),
        (b"[]", "expected an object, found list"),
        (b"\xff\xfe", "header is invalid"),
        (b"[" * 50_000, "header is invalid"),
        (b'{"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, "a": 1}', "'a' stands there twice"),
        ({"a": 7}, "a: expected a known dtype"),
        ({"a": {**_ENTRY, "dtype": "Q4"}}, "a: expected a known dtype"),
        ({"a": {**_ENTRY, "dtype": []}}, "a: expected a known dtype"),
        ({"a": {**_ENTRY, "shape": [-2]}}, "a: expected a known dtype"),
        ({"a": {**_ENTRY, "shape": [2.0]}}, "a: expected a known dtype"),
        ({"a": {**_ENTRY, "shape": 2}}, "a: expected a known dtype"),
        ({"a": {**_ENTRY, "data_offsets": [0]}}, "a: expected a known dtype"),
        ({"a": {"dtype": "F32"}}, "a: expected a known dtype"),
        ({"a": {**_ENTRY, "shape": [3]}}, "a: expected 12 bytes for F32 [3]"),
        ({"a": {**_ENTRY, "data_offsets": [8, 16]}}, "a: expected its data at offset 0"),
        ({"a": _ENTRY, "b": {**_ENTRY, "data_offsets": [4, 12]}}, "b: expected its data at offset 8"),
        ({"a": _ENTRY, "b": _ENTRY}, "b: expected its data at offset 8"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, header: Any, named: str) -> None:
    save_reference(tmp_path)
    write_safetensors(tmp_path / "model.safetensors", header, b"\0" * 8)
    assert named in refusal(tmp_path)


def test_a_huge_header_length_is_refused_without_reading_it(tmp_path: Path) -> None:
    save_reference(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    assert "at most 100000000 bytes, found 9223372036854775808" in refusal(tmp_path)


@settings(max_examples=200)
@given(data=st.data())
def test_whatever_bytes_are_changed_in_a_header_the_file_is_read_or_refused_in_one_line(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.getbasetemp() / "mutated"
    directory.mkdir(exist_ok=True)
    path = directory / "model.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, path)
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    refused = "model.safetensors"
    try:
        Checkpoint.open(directory)
    except CheckpointError as error:
        refused = str(error)
    assert "\n" not in refused
    assert "model.safetensors" in refused


def shard(directory: Path) -> tuple[Path, dict[str, Any]]:
    make_reference().save_pretrained(directory, max_shard_size="60KB")
    index = directory / "model.safetensors.index.json"
    return index, json.loads(index.read_text())


def test_files_that_the_index_does_not_name_are_not_looked_at(tmp_path: Path) -> None:
    shard(tmp_path)
    digest = load(tmp_path).digest
    for name in ("model.safetensors", "consolidated.safetensors", "model-00009-of-00009.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"rubbish")
    assert load(tmp_path).digest == digest


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    shard(tmp_path)
    path = sorted(tmp_path.glob("model-*.safetensors"))[1]
    path.unlink()
    assert f"{path}: is missing" in refusal(tmp_path)


def test_a_tensor_that_the_index_promises_and_no_shard_holds_is_named(tmp_path: Path) -> None:
    index, content = shard(tmp_path)
    content["weight_map"]["model.extra"] = content["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(content))
    text = refusal(tmp_path)
    assert "model.extra: is missing" in text
    assert content["weight_map"]["lm_head.weight"] in text


def test_a_tensor_that_stands_in_two_shards_is_a_duplicate(tmp_path: Path) -> None:
    _, content = shard(tmp_path)
    other = next(name for name in content["weight_map"].values() if name != content["weight_map"]["model.norm.weight"])
    tensors = load_file(tmp_path / other)
    save_file({**tensors, "model.norm.weight": torch.ones(64)}, tmp_path / other)
    text = refusal(tmp_path)
    assert "model.norm.weight: duplicate" in text
    assert other in text


def test_a_tensor_that_the_index_leaves_out_is_named(tmp_path: Path) -> None:
    index, content = shard(tmp_path)
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    assert "model.norm.weight: stands in the file, but not in" in refusal(tmp_path)


@pytest.mark.parametrize("file_name", ["../secret.safetensors", "/etc/passwd", "sub/model.safetensors", "model.bin", ""])
def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path: Path, file_name: str) -> None:
    index, content = shard(tmp_path)
    content["weight_map"]["model.norm.weight"] = file_name
    index.write_text(json.dumps(content))
    assert f"found {file_name!r}" in refusal(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "x", "a": "y"}}']
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path: Path, content: str) -> None:
    index, _ = shard(tmp_path)
    index.write_text(content)
    assert str(index) in refusal(tmp_path)


def test_a_directory_without_safetensors_is_refused(tmp_path: Path) -> None:
    save_reference(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "expected model.safetensors or model.safetensors.index.json, found neither" in refusal(tmp_path)


def test_the_digest_depends_on_content_and_not_on_the_division_into_files(tmp_path: Path) -> None:
    whole, divided = tmp_path / "whole", tmp_path / "divided"
    reference = make_reference()
    reference.save_pretrained(whole)
    reference.save_pretrained(divided, max_shard_size="60KB")
    digest = load(whole).digest
    assert digest.startswith("sha256:")
    assert len(digest) == len("sha256:") + 64
    assert load(divided).digest == digest
    assert load(whole, digest=False).digest == ""

    def flip_one_bit(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"].view(torch.int32)[5] ^= 1

    edit(whole, flip_one_bit)
    assert load(whole).digest != digest


def test_progress_adds_up_to_the_size_of_all_tensors(tmp_path: Path) -> None:
    save_reference(tmp_path, tie_word_embeddings=True)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    steps: list[int] = []
    load(tmp_path, progress=steps.append)
    assert sum(steps) == Checkpoint.open(tmp_path).num_bytes
    assert len(steps) > 10


def test_data_that_does_not_start_at_a_multiple_of_its_items_is_read_right(tmp_path: Path) -> None:
    save_reference(tmp_path)
    expected = parameters(load_ours(tmp_path))
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + length].rstrip()
    header += b" " * (3 - len(header) % 4)
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    for name, parameter in parameters(load_ours(tmp_path)).items():
        assert torch.equal(parameter, expected[name])


@pytest.mark.parametrize(("num_kv_heads", "tp_size"), [(2, 2), (2, 4), (4, 2), (1, 4), (4, 4)])
def test_the_ranks_shards_put_together_are_the_checkpoint(tmp_path: Path, num_kv_heads: int, tp_size: int) -> None:
    save_reference(tmp_path, num_key_value_heads=num_kv_heads, attention_bias=True, mlp_bias=True)
    tensors = load_file(tmp_path / "model.safetensors")
    ranks = [parameters(load_ours(tmp_path, parallel=TensorParallel(rank=rank, size=tp_size))) for rank in range(tp_size)]
    heads, kv_heads, replicas = 4 // tp_size, max(num_kv_heads // tp_size, 1), max(tp_size // num_kv_heads, 1)
    for kind in ("weight", "bias"):
        stacked = [
            rank[f"model.layers.1.self_attn.qkv_proj.{kind}"].split([16 * heads, 16 * kv_heads, 16 * kv_heads]) for rank in ranks
        ]
        assert torch.equal(torch.cat([part[0] for part in stacked]), tensors[f"model.layers.1.self_attn.q_proj.{kind}"])
        assert torch.equal(torch.cat([part[1] for part in stacked[::replicas]]), tensors[f"model.layers.1.self_attn.k_proj.{kind}"])
        assert torch.equal(torch.cat([part[2] for part in stacked[::replicas]]), tensors[f"model.layers.1.self_attn.v_proj.{kind}"])
        for rank in range(tp_size):
            assert torch.equal(stacked[rank][1], stacked[rank // replicas * replicas][1])
        gate_up = [rank[f"model.layers.0.mlp.gate_up_proj.{kind}"].chunk(2) for rank in ranks]
        assert torch.equal(torch.cat([part[0] for part in gate_up]), tensors[f"model.layers.0.mlp.gate_proj.{kind}"])
        assert torch.equal(torch.cat([part[1] for part in gate_up]), tensors[f"model.layers.0.mlp.up_proj.{kind}"])
    down = torch.cat([rank["model.layers.0.mlp.down_proj.weight"] for rank in ranks], dim=1)
    assert torch.equal(down, tensors["model.layers.0.mlp.down_proj.weight"])
    assert torch.equal(ranks[0]["model.layers.0.mlp.down_proj.bias"], tensors["model.layers.0.mlp.down_proj.bias"])
    assert all("model.layers.0.mlp.down_proj.bias" not in rank for rank in ranks[1:])
    assert torch.equal(torch.cat([rank["lm_head.weight"] for rank in ranks]), tensors["lm_head.weight"])


_PEAK = """
import re, sys, torch
from pathlib import Path
from modelworker.worker.models import Checkpoint, build_model, load_model_config, load_weights

def peak_bytes():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text()).group(1)) * 1024

directory = Path(sys.argv[1])
model = build_model(load_model_config(directory), dtype=torch.bfloat16)
before = peak_bytes()
loaded = load_weights(model, Checkpoint.open(directory), device=torch.device("cpu"))
print((peak_bytes() - before) / loaded.num_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_about_the_models_own_size_of_memory(smollm2_dir: Path) -> None:
    command = [sys.executable, "-c", _PEAK, str(smollm2_dir)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    # The largest tensor, a fifth of the model, is in memory twice while it is copied.
    assert float(output) < 1.35
