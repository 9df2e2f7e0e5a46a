"""The CUDA code of the pieces, generated and compiled for sm_90 on a machine without a GPU.

It holds the number of kernels and matrix products of every unique piece, so that a fusion that is lost shows up, and that no kernel
needs more registers than there are. A piece's graph is functionalized as one of a CPU; from there on its tensors are CUDA's.
"""

import dataclasses
import importlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from modelworker.compiler.counters import CompileCounters
from modelworker.compiler.model_source import ModelSource
from modelworker.compiler.settings import CompileSettings
from modelworker.compiler.triton_files import collect_triton_files, triton_directory
from modelworker.ops.catalog import OPAQUE_OPS
from modelworker.ops.op_settings import OpSettings, choose_custom_ops
from modelworker.ops.report import switchable_ops
from modelworker.ops.triton_library import load_triton
from modelworker.worker.compiled_decoder import decoder_source
from modelworker.worker.kv_cache import KvCache, KvCacheGeometry
from modelworker.worker.models import build_model, load_model_config
from modelworker.worker.step_buffers import StepBuffers
from modelworker_testing.checkpoints import TINY

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

# Two layers have the unique pieces of any number of layers.
SMOLLM2_135M = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "num_hidden_layers": 2,
}
LLAMA_1B = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "num_hidden_layers": 2,
}

# Before the first attention: embedding and norm; the rotation of queries, of keys. Between: addition and norm, activation, addition
# and norm, the rotations. After the last: without them.
KERNELS_AND_PRODUCTS = [(3, 1), (5, 4), (3, 3)]
# Where the rotations are part of the cache update.
WITH_KERNELS = [(1, 1), (3, 4), (3, 3)]


@dataclass(frozen=True)
class CudaPiece:
    """Generated code: its kernels by name, and the library kernels that it calls."""

    kernels: dict[str, str]
    products: list[str]


@pytest.fixture(scope="module")
def stand_in() -> Iterator[Any]:
    """The stand-in for a GPU; loading it loads Inductor and Triton, which tests that are left out need not wait for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = importlib.import_module("modelworker_testing.cuda_stand_in")
    with module.cuda_stand_in():
        yield module


def source_of(shape: dict[str, Any], directory: Path, *, has_kernels: bool = False) -> ModelSource:
    """The decoder, as the worker has it compiled for a GPU, with native ops or the kernels that are the default there.

    Its weights are not filled: they are never read.
    """
    (directory / "config.json").write_text(json.dumps({**TINY, **shape}))
    config = load_model_config(directory)
    triton = load_triton() if has_kernels else None
    opaque = OPAQUE_OPS if has_kernels else ()
    custom_ops = choose_custom_ops((), known=switchable_ops(), opaque=opaque, platform="cuda", compiles=True, backend="inductor")
    ops = OpSettings(platform="cuda", custom_ops=custom_ops, compiles=True, triton=triton)
    model = build_model(config, dtype=torch.bfloat16, ops=ops).to_empty(device="cpu")
    geometry = KvCacheGeometry(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=16,
        dtype=torch.bfloat16,
    )
    device = torch.device("cpu")
    buffers = StepBuffers(max_tokens=8192, max_sequences=256, max_blocks=512, device=device)
    return decoder_source(model, KvCache(geometry, 2, device), buffers, device=device, kernels=None, triton=triton, identity={})


def cuda_pieces(source: ModelSource, stand_in: Any) -> list[CudaPiece]:
    """Takes every unique piece through our backend as far as its CUDA code."""
    pipeline = importlib.import_module("modelworker.compiler.pipeline")
    program, pieces = pipeline.cut_model(source, CompileSettings())
    assert len(program.stages) == 7
    generated = []
    for piece in pieces:
        code = stand_in.generated_cuda_source(program, piece, source)
        generated.append(CudaPiece(stand_in.triton_kernels(code), stand_in.library_calls(code)))
    return generated


@pytest.mark.parametrize("shape", [SMOLLM2_135M, LLAMA_1B], ids=["135M", "1B"])
def test_every_piece_has_the_kernels_that_fusion_leaves_and_they_fit_into_registers(
    shape: dict[str, Any], tmp_path: Path, stand_in: Any
) -> None:
    pieces = cuda_pieces(source_of(shape, tmp_path), stand_in)
    assert [(len(piece.kernels), len(piece.products)) for piece in pieces] == KERNELS_AND_PRODUCTS
    assert {product for piece in pieces for product in piece.products} == {"mm"}
    for piece in pieces:
        for name, kernel in piece.kernels.items():
            resources = stand_in.compile_kernel(name, kernel)
            assert resources.spilled_bytes == 0, resources
            # 2048 threads on a multiprocessor of 65536 registers.
            assert resources.registers <= 64, resources
            assert resources.shared_bytes <= 16384, resources


def test_with_the_kernels_of_the_gpu_pieces_keep_only_what_they_fuse(tmp_path: Path, stand_in: Any) -> None:
    """Rotation is the cache update's kernel; norms and activations stay with the products around them."""
    pieces = cuda_pieces(source_of(LLAMA_1B, tmp_path, has_kernels=True), stand_in)
    assert [(len(piece.kernels), len(piece.products)) for piece in pieces] == WITH_KERNELS


def test_without_bounds_of_sizes_norms_are_not_fused(tmp_path: Path, stand_in: Any) -> None:
    """What the bounds are for: each norm is then a reduction, and a kernel that uses its result."""
    source = dataclasses.replace(source_of(SMOLLM2_135M, tmp_path), max_sizes={})
    pieces = cuda_pieces(source, stand_in)
    assert [len(piece.kernels) for piece in pieces] > [kernels for kernels, _ in KERNELS_AND_PRODUCTS]
    assert [len(piece.products) for piece in pieces] == [products for _, products in KERNELS_AND_PRODUCTS]


def test_kernels_that_were_kept_are_found_by_triton_in_another_place(
    tmp_path: Path, stand_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, kernel = next(iter(cuda_pieces(source_of(SMOLLM2_135M, tmp_path), stand_in)[2].kernels.items()))
    monkeypatch.setattr("triton.knobs.compilation.listener", None)
    counters = CompileCounters()
    counters.watch_triton()

    def compiled_in(files: dict[str, bytes]) -> int:
        before = counters.process_compilations()
        with triton_directory(files) as directory:
            stand_in.compile_kernel(name, kernel)
            kept.update(collect_triton_files(directory))
            assert not any(str(directory).encode() in content for path, content in kept.items() if path.endswith(".json"))
        return (counters.process_compilations() - before).triton

    kept: dict[str, bytes] = {}
    assert compiled_in({}) == 1
    assert compiled_in(dict(kept)) == 0
    assert compiled_in({}) == 1
