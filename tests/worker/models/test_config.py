"""config.json and generation_config.json: what is read, and what is refused by name."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelworker.worker.errors import CheckpointError
from modelworker.worker.models.config import ModelConfig
from modelworker.worker.models.registry import load_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}


def parse(directory: Path, config: Any, generation: Any = None) -> ModelConfig:
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(directory)


def refusal(directory: Path, config: Any, generation: Any = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        parse(directory, config, generation)
    text = str(caught.value)
    assert "\n" not in text
    assert str(directory) in text
    return text


def test_fields_that_a_llama_config_leaves_out_have_the_values_of_its_class(tmp_path: Path) -> None:
    config = parse(tmp_path, LLAMA)
    assert (config.head_dim, config.num_kv_heads, config.rope.theta, config.rope.rope_type) == (16, 2, 10000.0, "default")
    assert not any((config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm, config.tie_word_embeddings))
    assert (config.windows, config.eos_token_ids, config.dtype) == ((0, 0), (), None)


def test_without_num_key_value_heads_there_are_as_many_as_heads(tmp_path: Path) -> None:
    assert parse(tmp_path, {**LLAMA, "num_key_value_heads": None}).num_kv_heads == 4


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 2, 5]}, (2, 5, 7)),
        ({"eos_token_id": [3, 1]}, {"eos_token_id": None}, (1, 3)),
        ({}, {"eos_token_id": 9}, (9,)),
        ({"eos_token_id": None}, {}, ()),
    ],
)
def test_eos_ids_come_from_both_files(tmp_path: Path, config: Any, generation: Any, expected: tuple[int, ...]) -> None:
    assert parse(tmp_path, {**LLAMA, **config}, generation).eos_token_ids == expected


def test_an_eos_id_outside_the_vocabulary_is_left_out_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse(tmp_path, {**LLAMA, "eos_token_id": [2, 101, -1]}).eos_token_ids == (2,)
    assert "101" in caplog.text
    assert "-1" in caplog.text


@pytest.mark.parametrize("value", ["</s>", 1.5, True, [2, "x"]])
def test_an_eos_id_that_is_no_integer_is_refused(tmp_path: Path, value: Any) -> None:
    assert "eos_token_id" in refusal(tmp_path, {**LLAMA, "eos_token_id": value})


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({**MISTRAL}, (4096, 4096)),
        ({**MISTRAL, "sliding_window": None}, (0, 0)),
        ({**MISTRAL, "sliding_window": 8}, (8, 8)),
        ({**MISTRAL, "sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, (8, 8)),
        ({**QWEN2}, (0, 0)),
        ({**QWEN2, "sliding_window": 8}, (0, 0)),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (0, 8)),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8, 8)),
        ({**QWEN2, "use_sliding_window": True, "sliding_window": 8}, (0, 0)),
        (
            {**QWEN2, "use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            (8, 0),
        ),
        ({**LLAMA, "sliding_window": None}, (0, 0)),
        ({**LLAMA, "sliding_window": 8, "use_sliding_window": False}, (0, 0)),
    ],
)
def test_the_window_of_each_layer_is_what_its_architecture_says(tmp_path: Path, config: Any, windows: tuple[int, ...]) -> None:
    assert parse(tmp_path, config).windows == windows


def test_the_digest_changes_with_every_field_and_not_with_spelling_or_order(tmp_path: Path) -> None:
    first = parse(tmp_path, {**LLAMA, "rope_theta": 500.0, "torch_dtype": "bfloat16"})
    again = parse(
        tmp_path,
        {
            "dtype": "bfloat16",
            **dict(reversed(LLAMA.items())),
            "rope_parameters": {"rope_theta": 500, "rope_type": "default"},
            "unknown": 1,
        },
    )
    assert first == again
    for change in ({"rms_norm_eps": 1e-6}, {"vocab_size": 102}, {"rope_theta": 501.0}, {"eos_token_id": 3}, {"mlp_bias": True}):
        assert parse(tmp_path, {**LLAMA, "rope_theta": 500.0, "torch_dtype": "bfloat16", **change}).digest != first.digest


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            ["GemmaForCausalLM", "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3"],
        ),
        ({"architectures": []}, ["architectures", "LlamaForCausalLM"]),
        ({"architectures": None}, ["architectures", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "'fp8'"]),
        ({"quantization_config": {}}, ["quantization_config"]),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, ["compression_config", "compressed-tensors"]),
        ({"num_hidden_layers": 2**20}, ["num_hidden_layers", "4096"]),
        ({"hidden_size": 0}, ["hidden_size", "0"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"hidden_size": 64.0}, ["hidden_size", "64.0"]),
        ({"hidden_size": True}, ["hidden_size", "True"]),
        ({"hidden_size": 66}, ["hidden_size", "66", "num_attention_heads", "4"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "4"]),
        ({"head_dim": 15}, ["head_dim", "15", "even"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
        ({"vocab_size": None}, ["vocab_size", "None"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, ["dtype", "torch_dtype", "contradict"]),
        ({"torch_dtype": "int8"}, ["torch_dtype", "'int8'", "bfloat16"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"sliding_window": 8}, ["sliding_window", "8", "LlamaForCausalLM"]),
        ({"architectures": ["MistralForCausalLM"], "attention_bias": True}, ["attention_bias", "MistralForCausalLM"]),
        ({"architectures": ["Qwen3ForCausalLM"], "mlp_bias": True}, ["mlp_bias", "Qwen3ForCausalLM"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "2"]),
        ({"layer_types": ["full_attention", "chunked_attention"]}, ["layer_types[1]", "chunked_attention"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding_window"]),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
            ["layer_types", "full_attention", "8"],
        ),
    ],
)
def test_a_field_that_cant_be_served_is_refused_by_name(tmp_path: Path, change: dict[str, Any], named: list[str]) -> None:
    text = refusal(tmp_path, {**LLAMA, **change})
    for part in named:
        assert part in text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            ["rope_type", "'longrope'", "default, linear, dynamic, llama3, yarn"],
        ),
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, ["rope_type", "'su'"]),
        ({"rope_scaling": {"type": 7, "factor": 2.0}}, ["rope_type", "7"]),
        ({"rope_scaling": {"type": ["yarn"], "factor": 2.0}}, ["rope_type", "yarn"]),
        ({"rope_scaling": {"factor": 2.0}}, ["rope_type"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "'linear'"]),
        ({"rope_scaling": {"type": "linear"}}, ["factor", "None"]),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, ["factor", "0.5"]),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, ["factor", "'4'"]),
        ({"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 4.0}}, ["linear", "dynamic", "contradict"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}}, ["alpha", "1000.0"]),
        ({"rope_scaling": {"type": "default", "mrope_section": [2, 3, 3]}}, ["mrope_section"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}}, ["low_freq_factor"]),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0}},
            ["high_freq_factor", "low_freq_factor"],
        ),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor", "0.5"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["full_attention", "per layer"]),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_theta": 6.0}, ["rope_theta", "5.0", "6.0"]),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rope_scaling": {"type": "linear", "factor": 4.0}},
            ["rope_scaling", "rope_parameters", "contradict"],
        ),
        (
            {
                "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
                "original_max_position_embeddings": 32,
            },
            ["original_max_position_embeddings", "16", "32"],
        ),
        ({"rope_theta": 0}, ["rope_theta", "0"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, ["head_dim", "2"]),
    ],
)
def test_rope_that_cant_be_served_is_refused_by_name(tmp_path: Path, change: dict[str, Any], named: list[str]) -> None:
    text = refusal(tmp_path, {**LLAMA, **change})
    for part in named:
        assert part in text


def test_a_rope_parameter_of_another_type_is_left_out_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = parse(tmp_path, {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 8.0}})
    assert (config.rope.rope_type, config.rope.factor) == ("default", 1.0)
    assert "factor" in caplog.text


@pytest.mark.parametrize(
    ("rope", "max_model_len", "max_scaled_len"),
    [
        ({"type": "linear", "factor": 4.0}, 64, 256),
        ({"type": "dynamic", "factor": 2.0}, 64, 128),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64, 64),
        ({"type": "yarn", "original_max_position_embeddings": 16}, 64, 64),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 64, 64),
        (None, 64, 64),
    ],
)
def test_the_longest_sequence_follows_from_rope_scaling(tmp_path: Path, rope: Any, max_model_len: int, max_scaled_len: int) -> None:
    config = parse(tmp_path, {**LLAMA, "rope_scaling": rope})
    assert (config.max_model_len, config.max_scaled_len) == (max_model_len, max_scaled_len)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "JSON"),
        ("{", "JSON"),
        ("[]", "list"),
        ("null", "NoneType"),
        ('{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' stands there twice"),
        ("\xff", "JSON"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: str, named: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=named):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    "name", ["hidden_size", "intermediate_size", "num_attention_heads", "head_dim", "vocab_size", "max_position_embeddings"]
)
@pytest.mark.parametrize("value", [2**31, 2**70, -(2**70), 1e400])
def test_a_number_that_nothing_could_be_made_of_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    text = refusal(tmp_path, {**LLAMA, name: value})
    assert name in text


def test_a_rope_factor_beyond_all_reason_is_refused_by_name(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 1e308, "original_max_position_embeddings": 64}
    assert "factor" in refusal(tmp_path, {**LLAMA, "rope_scaling": scaling})


def test_a_missing_directory_or_config_is_refused_naming_the_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: is not a directory"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"config\.json: is missing"):
        load_model_config(tmp_path)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 2**40)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["yarn", "llama3", "silu"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_NAMES = [
    *LLAMA,
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "head_dim",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "eos_token_id",
    "dtype",
    "torch_dtype",
    "attention_bias",
    "partial_rotary_factor",
    "original_max_position_embeddings",
    "quantization_config",
]
_ROPE_NAMES = [
    "type",
    "rope_type",
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "mscale",
    "truncate",
    "rope_theta",
]


@given(
    st.sampled_from([LLAMA, MISTRAL, QWEN2]),
    st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=3),
    st.none() | st.dictionaries(st.sampled_from(_ROPE_NAMES), _VALUES, max_size=4),
)
def test_whatever_a_config_holds_it_is_read_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any], changes: dict[str, Any], rope: dict[str, Any] | None
) -> None:
    directory = tmp_path_factory.getbasetemp() / "any-config"
    directory.mkdir(exist_ok=True)
    values = {**config, **changes}
    if rope is not None:
        values["rope_scaling"] = rope
    refused, parsed = None, None
    try:
        parsed = parse(directory, values)
    except CheckpointError as error:
        refused = str(error)
    if parsed is not None:
        assert parsed.num_layers == len(parsed.windows) > 0
    else:
        assert refused
        assert "\n" not in refused
