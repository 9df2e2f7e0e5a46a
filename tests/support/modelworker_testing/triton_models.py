"""Models that run the ops of CUDA on tensors of the host, to see what they launch, and the committed table of what that needs.

python -m modelworker_testing.triton_models     (with PYTHONPATH=tests/support; writes the table anew)
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias
from unittest import mock

import numpy as np
import torch
import triton

from modelworker.ops.attention import PagedAttention
from modelworker.ops.op_settings import OpSettings
from modelworker.ops.triton_library import load_triton
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.models.registry import build_model
from modelworker.worker.sampling.tensors import to_device_together
from modelworker.worker.step_buffers import StepBuffers
from modelworker_testing.bare_engine import fill_randomly, model_config_of
from modelworker_testing.triton_launches import Launches, Resources, recorded_launches, resources

Table: TypeAlias = dict[str, dict[str, list[Resources]]]
"""What each form of each kernel needs, by case."""

ROOT: Final = Path(__file__).resolve().parents[3]
TABLES: Final = ROOT / "tests" / "data" / "triton_resources.json"
BLOCK_SIZE: Final = 32
CAPABILITIES: Final = (80, 90, 100)
# Shapes that are compiled for one capability only: their tiles are those of head_dim 128, with columns of heads left out.
FOR_90_ONLY: Final = ("StableLM-3B", "Phi-3-mini", "Qwen3-8B")

_COMMON: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "num_hidden_layers": 1,
        "vocab_size": 128,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }
)


def _shape(hidden: int, intermediate: int, heads: int, kv_heads: int, head_dim: int, **others: Any) -> Mapping[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "head_dim": head_dim}
    return {**_COMMON, **sizes, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **others}


SHAPES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "SmolLM2-135M": _shape(576, 1536, 9, 3, 64),
        "Llama-3.2-1B": _shape(2048, 8192, 32, 8, 64),
        "Llama-3.1-8B": _shape(4096, 14336, 32, 8, 128),
        "Qwen3-0.6B": _shape(1024, 3072, 16, 8, 128, architectures=["Qwen3ForCausalLM"], model_type="qwen3"),
        "Mistral-7B": _shape(
            4096, 14336, 32, 8, 128, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=1024
        ),
        "StableLM-3B": _shape(2560, 6912, 32, 32, 80),
        "Phi-3-mini": _shape(
            3072, 8192, 32, 32, 96, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=2047
        ),
        "Qwen3-8B": _shape(4096, 12288, 32, 8, 128, architectures=["Qwen3ForCausalLM"], model_type="qwen3"),
    }
)
"""One layer of each, as a decoder of ours whose heads, sizes and window are those of the model, with a small vocabulary."""


VOCAB_SIZES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "SmolLM2-135M": 49152,
        "Llama-3.2-1B": 128256,
        "Llama-3.1-8B": 128256,
        "Qwen3-0.6B": 151936,
        "Mistral-7B": 32768,
        "StableLM-3B": 50304,
        "Phi-3-mini": 32064,
        "Qwen3-8B": 151936,
    }
)
"""Of the logits that tokens are drawn from."""


class LaunchingModel:
    """A model whose ops are those of CUDA with all kernels, but for one that is switched off by name, and steps for it."""

    def __init__(
        self, fields: Mapping[str, Any], *, dtype: torch.dtype, max_tokens: int, max_sequences: int, without: str = ""
    ) -> None:
        config = model_config_of(fields)
        custom_ops = ("all", f"-{without}") if without else ("all",)
        ops = OpSettings(platform="cuda", custom_ops=custom_ops, triton=load_triton())
        host = torch.device("cpu")
        with torch.no_grad():
            self.model: CausalLM = build_model(config, dtype=dtype, max_model_len=config.max_model_len, ops=ops)
            fill_randomly(self.model, host)
        sizes = (2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        self.caches = [(torch.zeros(sizes, dtype=dtype), torch.zeros(sizes, dtype=dtype)) for _ in config.windows]
        max_blocks = -(-config.max_model_len // BLOCK_SIZE)
        self.buffers = StepBuffers(max_tokens=max_tokens, max_sequences=max_sequences, max_blocks=max_blocks, device=host)

    @torch.inference_mode()
    def prepare(self) -> None:
        """Makes every form of attention, as start-up does."""
        for module in self.model.modules():
            if isinstance(module, PagedAttention):
                module.prepare(*self.caches[0])

    @torch.inference_mode()
    def step(self, num_tokens: int, num_sequences: int) -> None:
        """Runs the decoder over a step of these sizes. Nothing computes but products."""
        inputs = self.buffers.inputs(num_tokens, num_sequences)
        self.model(inputs.token_ids, inputs.positions, inputs.attention, self.caches)


@contextlib.contextmanager
def kept_kernels() -> Iterator[None]:
    """Lets Triton keep what it compiles in the build folder."""
    with mock.patch.object(triton.knobs.cache, "dir", str(ROOT / "build" / "triton")):
        yield


def launches_of(name: str, capability: int, dtype: torch.dtype = torch.bfloat16) -> Launches:
    """Returns what start-up and steps of a model launch, compiled for a capability: every form of every kernel."""
    sizes = {"dtype": dtype, "max_tokens": 3, "max_sequences": 1}
    model = LaunchingModel(SHAPES[name], **sizes)
    unfused = LaunchingModel(SHAPES[name], **sizes, without="rotary_store_kv")
    with kept_kernels(), recorded_launches(capability) as found:
        model.prepare()
        model.step(3, 1)
        unfused.step(3, 1)
        sample(VOCAB_SIZES[name])
    return found


def sample(vocab_size: int, num_rows: int = 1) -> None:
    """Draws tokens from rows of logits, with parameters laid out as the worker's sampling does it."""
    logits, numbers, integers = torch.zeros(num_rows, vocab_size), np.ones(num_rows, np.float32), np.zeros(num_rows, np.int64)
    arguments = (numbers, integers.astype(np.int32), numbers, numbers, integers, integers)
    load_triton().ops.sample_tokens(logits, *to_device_together(arguments, logits.device))


def resources_of(launches: Launches) -> dict[str, list[Resources]]:
    """Returns what each form needs, by its kernel and constants; several have the same where pointers are aligned differently."""
    forms = {id(launch.compiled): launch for launch in launches.launches}
    table: dict[str, list[Resources]] = {}
    for launch in forms.values():
        constants = " ".join(f"{name}={value}" for name, value in sorted(launch.constants.items()))
        table.setdefault(f"{launch.kernel} {constants}", []).append(resources(launch.compiled))
    return {name: sorted(found, key=lambda one: one.registers) for name, found in sorted(table.items())}


def read_tables() -> dict[str, Table]:
    """Returns the committed tables, by the version of Triton: another one's compiler needs other registers."""
    return {
        version: {
            case: {form: [Resources(*one) for one in found] for form, found in forms.items()} for case, forms in table.items()
        }
        for version, table in json.loads(TABLES.read_text()).items()
    }


def cases() -> Iterator[tuple[str, int, torch.dtype]]:
    """Yields the models with every capability, some with one, and one that computes in fp32."""
    for capability in CAPABILITIES:
        yield from ((name, capability, torch.bfloat16) for name in SHAPES if capability == 90 or name not in FOR_90_ONLY)
        yield "Llama-3.1-8B", capability, torch.float32


def case_name(name: str, capability: int, dtype: torch.dtype) -> str:
    """Returns the name that a case has in the table."""
    return f"{name} {str(dtype).removeprefix('torch.')} sm_{capability}"


def main() -> None:
    """Writes the table of the installed Triton, registers, spilled bytes, shared bytes of every form, beside those of others."""
    table = {}
    for case in cases():
        found = resources_of(launches_of(*case))
        table[case_name(*case)] = {
            form: [[one.registers, one.spilled_bytes, one.shared_bytes] for one in forms] for form, forms in found.items()
        }
        print(case_name(*case), sum(map(len, found.values())), "forms", flush=True)
    tables = json.loads(TABLES.read_text())
    TABLES.write_text(json.dumps({**tables, triton.__version__: table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
