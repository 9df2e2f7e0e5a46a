"""Random checkpoints of every architecture, saved by transformers and run by both."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from modelworker.ops.op_settings import OpSettings
from modelworker.worker.models import AttentionMetadata, Checkpoint, build_model, load_model_config, load_weights
from modelworker_testing.kernels import kernel_ops
from modelworker_testing.paged_runs import PagedCache, load_ours, our_logits, random_prompt, run_ours
from modelworker_testing.tiny_models import ARCHITECTURES, make_reference, reference_logits, save_reference

# Both compute in fp32 but sum in another order; the logits are of the order of 1 to 10.
CLOSE = {"atol": 2e-4, "rtol": 2e-4}

ROPE_TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 500.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0},
    "yarn with every option": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 1000.0,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    "yarn with an attention factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 1000.0,
        "attention_factor": 1.3,
    },
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, every bias": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama, attention biases": ("LlamaForCausalLM", {"attention_bias": True}),
    "llama, tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama, one KV head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama, as many KV heads as heads": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama, head_dim 24": ("LlamaForCausalLM", {"head_dim": 24}),
    "llama, head_dim 20 from 3 heads": (
        "LlamaForCausalLM",
        {"hidden_size": 60, "head_dim": None, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "llama, head_dim 2": ("LlamaForCausalLM", {"head_dim": 2}),
    "mistral, no window": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral, window 5": ("MistralForCausalLM", {"sliding_window": 5}),
    "mistral, head_dim 20": ("MistralForCausalLM", {"sliding_window": None, "head_dim": 20}),
    "qwen2": ("Qwen2ForCausalLM", {"head_dim": None}),
    "qwen2, tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True, "head_dim": None}),
    "qwen2, window in the second layer": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1, "head_dim": None},
    ),
    "qwen2, window that is off": ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 6, "head_dim": None}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3, biases and head_dim 24": ("Qwen3ForCausalLM", {"attention_bias": True, "head_dim": 24}),
    "qwen3, window in the first layer by layer_types": (
        "Qwen3ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


@pytest.fixture(params=["native", "c++"], scope="module")
def ops(request: pytest.FixtureRequest) -> OpSettings:
    return kernel_ops() if request.param == "c++" else OpSettings()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_logits_of_every_position_are_those_of_transformers(
    tmp_path: Path, variant: str, chunk: int | None, ops: OpSettings
) -> None:
    architecture, config = VARIANTS[variant]
    reference = save_reference(tmp_path, architecture, **config)
    prompts = [random_prompt(length) for length in (1, 23, 8, 40)]
    for prompt, logits in zip(prompts, our_logits(load_ours(tmp_path, ops=ops), prompts, chunk=chunk), strict=True):
        torch.testing.assert_close(logits, reference_logits(reference, prompt), **CLOSE)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("rope", ROPE_TYPES)
def test_every_rope_type_is_that_of_transformers_up_to_four_times_the_original_length(
    tmp_path: Path, rope: str, architecture: str, ops: OpSettings
) -> None:
    config: dict[str, Any] = {"sliding_window": None} if architecture == "MistralForCausalLM" else {}
    save_reference(tmp_path, architecture, max_position_embeddings=16, rope_parameters=dict(ROPE_TYPES[rope]), **config)
    prompts = [random_prompt(length) for length in (64, 15, 16, 17, 40)]
    for prompt, logits in zip(prompts, our_logits(load_ours(tmp_path, max_model_len=64, ops=ops), prompts), strict=True):
        # A new model each time: transformers keeps dynamic frequencies from one forward to the next.
        reference = make_reference(architecture, max_position_embeddings=16, rope_parameters=dict(ROPE_TYPES[rope]), **config)
        torch.testing.assert_close(logits, reference_logits(reference, prompt), **CLOSE)


def test_dynamic_rope_over_several_steps_is_that_of_transformers_with_its_cache(tmp_path: Path) -> None:
    reference = save_reference(tmp_path, max_position_embeddings=16, rope_parameters=dict(ROPE_TYPES["dynamic"]))
    prompt = random_prompt(50)
    ours = our_logits(load_ours(tmp_path, max_model_len=64), [prompt], chunk=5)[0]
    expected, cache = [], None
    for piece in prompt.split(5):
        with torch.inference_mode():
            output = reference(piece[None], cache=cache, use_cache=True)
        cache = output.cache
        expected.append(output.logits[0])
    torch.testing.assert_close(ours, torch.cat(expected), **CLOSE)


def test_dynamic_rope_of_a_sequence_does_not_depend_on_the_others_in_the_step(tmp_path: Path) -> None:
    save_reference(tmp_path, max_position_embeddings=16, rope_parameters=dict(ROPE_TYPES["dynamic"]))
    model = load_ours(tmp_path, max_model_len=64)
    prompts = [random_prompt(length) for length in (10, 64, 30)]
    together = our_logits(model, prompts)
    for prompt, logits in zip(prompts, together, strict=True):
        torch.testing.assert_close(our_logits(model, [prompt])[0], logits, **CLOSE)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 19, 20, 21])
def test_a_sliding_window_of_n_sees_the_token_itself_and_n_minus_1_before_it(tmp_path: Path, window: int, ops: OpSettings) -> None:
    reference = save_reference(tmp_path, "MistralForCausalLM", sliding_window=window)
    prompt = random_prompt(20)
    for chunk in (None, 1, 3):
        logits = our_logits(load_ours(tmp_path, ops=ops), [prompt], chunk=chunk)[0]
        torch.testing.assert_close(logits, reference_logits(reference, prompt), **CLOSE)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path, architecture: str) -> None:
    config: dict[str, Any] = {"sliding_window": None} if architecture == "MistralForCausalLM" else {}
    reference = make_reference(architecture, **config)
    reference.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    prompt = random_prompt(30)
    torch.testing.assert_close(our_logits(load_ours(tmp_path), [prompt])[0], reference_logits(reference, prompt), **CLOSE)


def _rewrite(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for name, value in changes.items():
        if value is None:
            config.pop(name, None)
        else:
            config[name] = value
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("rope", ["llama3", "yarn", "default"])
def test_the_spellings_of_a_configuration_are_one_model(tmp_path: Path, rope: str) -> None:
    parameters = dict(ROPE_TYPES[rope])
    reference = save_reference(tmp_path, rope_parameters=dict(parameters))
    prompt = random_prompt(60)
    expected = reference_logits(reference, prompt)
    theta = parameters.pop("rope_theta")
    rope_type = parameters.pop("rope_type")
    spellings = [
        {"rope_parameters": {**parameters, "rope_type": rope_type, "rope_theta": theta}, "dtype": "float32"},
        {
            "rope_scaling": None if rope == "default" else {**parameters, "rope_type": rope_type},
            "rope_theta": theta,
            "torch_dtype": "float32",
        },
        {"rope_scaling": {**parameters, "type": rope_type}, "rope_theta": theta, "torch_dtype": "float32"},
    ]
    digests = set()
    for spelling in spellings:
        _rewrite(tmp_path, rope_parameters=None, rope_scaling=None, rope_theta=None, dtype=None, torch_dtype=None)
        _rewrite(tmp_path, **spelling)
        digests.add(load_model_config(tmp_path).digest)
        torch.testing.assert_close(our_logits(load_ours(tmp_path), [prompt])[0], expected, **CLOSE)
    assert len(digests) == 1


@pytest.mark.parametrize("variant", ["llama, every bias", "mistral, window 5", "qwen2", "qwen3"])
def test_in_bfloat16_the_distance_to_fp32_is_no_larger_than_that_of_transformers(tmp_path: Path, variant: str) -> None:
    architecture, config = VARIANTS[variant]
    reference = make_reference(architecture, num_hidden_layers=4, **config)
    half = copy.deepcopy(reference).to(torch.bfloat16)
    half.save_pretrained(tmp_path)
    # The reference computes in fp32 with the weights that are in the file.
    reference.load_state_dict(half.state_dict())
    ours = load_ours(tmp_path, dtype=torch.bfloat16)
    distances = torch.zeros(2, 2, dtype=torch.float64)
    for seed in range(16):
        prompt = random_prompt(64, seed)
        hidden = run_ours(ours, [prompt])[0]
        with torch.inference_mode():
            exact = reference(prompt[None], output_hidden_states=True)
            theirs = half(prompt[None], output_hidden_states=True)
            logits = ours.compute_logits(hidden)
        assert logits.dtype == torch.float32
        for row, (exact_part, our_part, their_part) in enumerate(
            ((exact.hidden_states[-1], hidden, theirs.hidden_states[-1]), (exact.logits, logits, theirs.logits))
        ):
            distances[row, 0] += (our_part - exact_part[0]).double().square().sum()
            distances[row, 1] += (their_part[0] - exact_part[0]).double().square().sum()
    (our_hidden, their_hidden), (our_logit, their_logit) = distances.sqrt().tolist()
    assert our_hidden <= 1.25 * their_hidden
    assert our_logit <= 1.0 * their_logit


def test_logits_of_a_bfloat16_model_are_the_sums_in_fp32_and_not_rounded(tmp_path: Path) -> None:
    make_reference(vocab_size=5000).to(torch.bfloat16).save_pretrained(tmp_path)
    model = load_ours(tmp_path, dtype=torch.bfloat16)
    hidden = torch.randn(3, 64).to(torch.bfloat16)
    with torch.inference_mode():
        logits = model.compute_logits(hidden)
    weight = model.get_parameter("lm_head.weight")
    torch.testing.assert_close(logits, (hidden.double() @ weight.double().t()).float(), atol=1e-5, rtol=1e-5)
    assert (logits != logits.to(torch.bfloat16).float()).float().mean() > 0.9


@pytest.mark.parametrize("rope", ["default", "dynamic"])
def test_a_step_without_tokens_gives_no_logits(tmp_path: Path, rope: str) -> None:
    save_reference(tmp_path, rope_parameters=dict(ROPE_TYPES[rope]))
    model = load_ours(tmp_path)
    empty = torch.zeros(0, dtype=torch.int32)
    attention = AttentionMetadata(torch.zeros(1, dtype=torch.int32), empty, torch.zeros(0, 1, dtype=torch.int32), empty.long())
    caches = [(torch.zeros(1, 2, 4, 16), torch.zeros(1, 2, 4, 16))] * 2
    with torch.inference_mode():
        assert model.compute_logits(model(empty, empty, attention, caches)).shape == (0, 101)


@pytest.mark.parametrize("rope", ["default", "dynamic"])
def test_the_forward_is_traced_as_one_graph_for_any_number_of_tokens(tmp_path: Path, rope: str) -> None:
    save_reference(tmp_path, "Qwen3ForCausalLM", rope_parameters=dict(ROPE_TYPES[rope]))
    model = load_ours(tmp_path)
    graphs = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=keep, fullgraph=True, dynamic=True)
    cache = PagedCache(model.config, num_kv_heads=2, num_sequences=3, max_len=32, dtype=torch.float32)
    for query_lens in ((5, 9, 1), (30, 2, 7), (1, 1, 1)):
        positions, attention = cache.step((0, 0, 0), query_lens)
        token_ids = random_prompt(sum(query_lens)).to(torch.int32)
        with torch.inference_mode():
            expected = model(token_ids, positions, attention, cache.caches)
            torch.testing.assert_close(compiled(token_ids, positions, attention, cache.caches), expected, **CLOSE)
    assert len(graphs) == 1


def test_the_model_on_meta_has_every_shape_and_no_memory(tmp_path: Path) -> None:
    save_reference(tmp_path)
    model = build_model(load_model_config(tmp_path), dtype=torch.bfloat16)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    loaded = load_weights(model, Checkpoint.open(tmp_path), device=torch.device("cpu"))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert loaded.num_parameters == sum(parameter.numel() for parameter in model.parameters())
