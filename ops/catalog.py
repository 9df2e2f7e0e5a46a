"""Every op with its contract: reference, samples, tolerances, implementations. Tests and benchmarks are loops over this.

To add an op `gelu_and_mul`:

1.  ops/activation.py, or a module of its own that ops/__init__.py imports: the function in plain PyTorch, its `register_op`, and a
    class with `@CustomOp.register("gelu_and_mul")`: a `KernelOp` where it only hands its arguments on.
2.  ops/activation_spec.py: the reference, in fp64 from the formula, and samples.
3.  Here: one `OpSpec`. One of its variants has sizes that are no multiple of 16.
4.  ops/cpu/activation.h and activation.cpp: the kernel, with `template void gelu_and_mul<float>(const void*, Team);` and the same
    for BFloat16; activation_doors.h: the function that takes tensors; doors.cpp: its `DOOR`.
5.  Only where its arguments are others than the registered op's: its fake in ops/cpu/fakes.py, arguments in
    tests/ops/cpu/test_fakes.py, and what makes its C++ form for step 3 (see `packed`).
6.  Only where its class takes others than the op does, or others than the settings when it is made: an entry of `RUNS` in
    tests/support/modelworker_testing/layer_runs.py.

Then `pytest tests/ops -k gelu_and_mul` holds every form against the reference, at this machine's best ISA level, and
`make test-full` at all of them.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from modelworker.ops.activation import silu_and_mul
from modelworker.ops.activation_spec import silu_and_mul_reference, silu_and_mul_sample
from modelworker.ops.attention import paged_attention
from modelworker.ops.attention_spec import attention_variant, paged_attention_reference, paged_attention_sample
from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.embedding import embedding
from modelworker.ops.embedding_spec import embedding_reference, embedding_sample
from modelworker.ops.kv_cache import store_kv
from modelworker.ops.kv_cache_spec import store_kv_reference, store_kv_sample
from modelworker.ops.library import TRITON_LIBRARY
from modelworker.ops.linear import linear, linear_argmax, linear_float32
from modelworker.ops.linear_spec import (
    linear_argmax_reference,
    linear_float32_reference,
    linear_float32_sample,
    linear_reference,
    linear_sample,
    packed,
)
from modelworker.ops.norm import fused_add_rms_norm, rms_norm
from modelworker.ops.norm_spec import (
    fused_add_rms_norm_reference,
    fused_add_rms_norm_sample,
    rms_norm_reference,
    rms_norm_sample,
)
from modelworker.ops.op_spec import OpSpec, Tolerance
from modelworker.ops.rotary import rotary_embedding
from modelworker.ops.rotary_spec import rotary_embedding_reference, rotary_embedding_sample, rotary_variant
from modelworker.ops.rotary_store_kv import rotary_store_kv
from modelworker.ops.rotary_store_kv_spec import rotary_store_kv_reference, rotary_store_kv_sample, rotary_store_kv_variant
from modelworker.ops.sampling import sample_tokens
from modelworker.ops.sampling_spec import sample_tokens_reference, sample_tokens_sample
from modelworker.ops.triton_library import TritonLibrary

# One rounding to bf16 (2^-9 relative, doubled for a neighbour chosen by an error in fp32), absolute where values cancel.
_ROUNDED_ONCE = Tolerance(rtol=2.0**-8, atol=2.0**-10)
_EXACT = Tolerance(rtol=0.0, atol=0.0)
# A hundred products whose sum may cancel, in fp32.
_SUMMED = Tolerance(rtol=1e-5, atol=3e-6)
_HEADS = ({"in_features": 71, "out_features": 300}, {"in_features": 576, "out_features": 49152})


def _kernel(name: str) -> Callable[[CpuLibrary], Callable[..., Any]]:
    """Returns what makes the C++ form of an op that takes the same arguments."""

    def of(library: CpuLibrary) -> Callable[..., Any]:
        kernel: Callable[..., Any] = getattr(library.ops, name)
        return kernel

    return of


CATALOG: Mapping[str, OpSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            OpSpec(
                name="embedding",
                native=embedding,
                cpp=_kernel("embedding"),
                reference=embedding_reference,
                sample=embedding_sample,
                tolerances={torch.float32: _EXACT, torch.bfloat16: _EXACT},
                tolerance_reason="it copies",
                variants=({"num_rows": 31, "size": 77},),
                benchmark_variants=({"num_rows": 49152, "size": 576},),
            ),
            OpSpec(
                name="linear",
                native=linear,
                cpp=packed("linear", with_bias=True),
                reference=linear_reference,
                sample=linear_sample,
                tolerances={torch.float32: _SUMMED, torch.bfloat16: _ROUNDED_ONCE},
                tolerance_reason="a hundred products summed in fp32; bf16 rounds the result once",
                variants=(
                    {"in_features": 71, "out_features": 50, "bias": True},
                    {"in_features": 96, "out_features": 64, "bias": False},
                ),
                benchmark_variants=(
                    {"in_features": 576, "out_features": 3072, "bias": False},
                    {"in_features": 2048, "out_features": 16384, "bias": False},
                ),
            ),
            OpSpec(
                name="linear_float32",
                native=linear_float32,
                cpp=packed("linear_float32", with_bias=False),
                reference=linear_float32_reference,
                sample=linear_float32_sample,
                tolerances={torch.float32: _SUMMED, torch.bfloat16: _SUMMED},
                tolerance_reason="a hundred products summed in fp32, not rounded, whatever the inputs are",
                variants=_HEADS[:1],
                benchmark_variants=_HEADS[1:],
                result_dtypes=(torch.float32,),
            ),
            OpSpec(
                name="linear_argmax",
                native=linear_argmax,
                cpp=packed("linear_argmax", with_bias=False),
                reference=linear_argmax_reference,
                sample=linear_float32_sample,
                tolerances={torch.float32: _SUMMED, torch.bfloat16: _SUMMED},
                tolerance_reason="as linear_float32; an id is within the tolerance only where it is equal",
                variants=_HEADS[:1],
                benchmark_variants=_HEADS[1:],
                result_dtypes=(torch.int64, torch.float32, torch.bool),
            ),
            OpSpec(
                name="rms_norm",
                native=rms_norm,
                cpp=_kernel("rms_norm"),
                reference=rms_norm_reference,
                sample=rms_norm_sample,
                tolerances={torch.float32: Tolerance(rtol=2e-6, atol=1e-6), torch.bfloat16: _ROUNDED_ONCE},
                tolerance_reason="a fp32 sum of a hundred squares and four fp32 operations; bf16 rounds the result once",
                variants=({"hidden_size": 96}, {"hidden_size": 99}),
                benchmark_variants=({"hidden_size": 576}, {"hidden_size": 2048}),
            ),
            OpSpec(
                name="fused_add_rms_norm",
                native=fused_add_rms_norm,
                cpp=_kernel("fused_add_rms_norm"),
                reference=fused_add_rms_norm_reference,
                sample=fused_add_rms_norm_sample,
                tolerances={torch.float32: Tolerance(rtol=2e-6, atol=1e-6), torch.bfloat16: _ROUNDED_ONCE},
                tolerance_reason="as rms_norm: the norm is that of the fp32 sum, before it is rounded into the residual",
                variants=({"hidden_size": 96}, {"hidden_size": 99}),
                benchmark_variants=({"hidden_size": 576}, {"hidden_size": 2048}),
            ),
            OpSpec(
                name="silu_and_mul",
                native=silu_and_mul,
                cpp=_kernel("silu_and_mul"),
                reference=silu_and_mul_reference,
                sample=silu_and_mul_sample,
                tolerances={torch.float32: Tolerance(rtol=2e-6, atol=1e-7), torch.bfloat16: _ROUNDED_ONCE},
                tolerance_reason="one exponential and three operations in fp32; bf16 rounds the result once",
                variants=({"intermediate_size": 80}, {"intermediate_size": 77}),
                benchmark_variants=({"intermediate_size": 1536}, {"intermediate_size": 8192}),
            ),
            OpSpec(
                name="rotary_embedding",
                native=rotary_embedding,
                cpp=_kernel("rotary_embedding"),
                reference=rotary_embedding_reference,
                sample=rotary_embedding_sample,
                tolerances={torch.float32: Tolerance(rtol=2e-6, atol=1e-6), torch.bfloat16: _ROUNDED_ONCE},
                tolerance_reason="two products and a sum in fp32, which may cancel; bf16 rounds the result once",
                variants=(
                    rotary_variant(head_dim=16),
                    rotary_variant(head_dim=20, interleaved=True),
                    rotary_variant(head_dim=24, rotary_dim=8),
                ),
                benchmark_variants=(
                    rotary_variant(head_dim=64, num_heads=9, num_kv_heads=3),
                    rotary_variant(head_dim=64, num_heads=32, num_kv_heads=8),
                ),
            ),
            OpSpec(
                name="rotary_store_kv",
                native=rotary_store_kv,
                cpp=_kernel("rotary_store_kv"),
                reference=rotary_store_kv_reference,
                sample=rotary_store_kv_sample,
                tolerances={
                    torch.float32: Tolerance(rtol=4e-6, atol=4e-6),
                    torch.bfloat16: Tolerance(rtol=2.0**-7, atol=2.0**-6),
                },
                tolerance_reason="a norm and a rotation in fp32; bf16 may be rounded after each, and the rotation cancels",
                variants=(
                    rotary_store_kv_variant(block_size=4, head_dim=16, norms=False),
                    rotary_store_kv_variant(block_size=1, head_dim=20, norms=True, interleaved=True),
                    rotary_store_kv_variant(block_size=16, head_dim=24, norms=True, rotary_dim=8, num_heads=3, num_kv_heads=1),
                ),
                benchmark_variants=(rotary_store_kv_variant(block_size=32, head_dim=64, norms=False, num_heads=9, num_kv_heads=3),),
                splits_graph=True,
            ),
            OpSpec(
                name="store_kv",
                native=store_kv,
                cpp=_kernel("store_kv"),
                reference=store_kv_reference,
                sample=store_kv_sample,
                tolerances={torch.float32: _EXACT, torch.bfloat16: _EXACT},
                tolerance_reason="it copies",
                variants=(
                    {"block_size": 4, "num_kv_heads": 2, "head_dim": 16},
                    {"block_size": 1, "num_kv_heads": 3, "head_dim": 20},
                ),
                benchmark_variants=({"block_size": 32, "num_kv_heads": 3, "head_dim": 64},),
                splits_graph=True,
            ),
            OpSpec(
                name="paged_attention",
                native=paged_attention,
                cpp=_kernel("paged_attention"),
                reference=paged_attention_reference,
                sample=paged_attention_sample,
                tolerances={torch.float32: _SUMMED, torch.bfloat16: Tolerance(rtol=2.0**-8, atol=2.0**-7)},
                tolerance_reason="fp32 sums of a hundred products behind an exponential; in bf16 the weights of values up to 4 may "
                "be rounded (2^-9 of each) before they are multiplied, and the result is rounded once",
                variants=(
                    attention_variant("decode", num_heads=4, num_kv_heads=2, block_size=4),
                    attention_variant("decode", num_heads=9, num_kv_heads=3, block_size=16, head_dim=20, window=5, soft_cap=2.0),
                    attention_variant("prefill", num_heads=4, num_kv_heads=1, block_size=32, head_dim=34),
                    attention_variant("mixed", num_heads=4, num_kv_heads=4, block_size=4, window=7),
                ),
                benchmark_variants=(
                    attention_variant("decode", num_heads=9, num_kv_heads=3, block_size=32, head_dim=64, context_len=1024),
                    attention_variant("prefill", num_heads=9, num_kv_heads=3, block_size=32, head_dim=64),
                ),
                splits_graph=True,
            ),
            OpSpec(
                name="sample_tokens",
                native=sample_tokens,
                reference=sample_tokens_reference,
                sample=sample_tokens_sample,
                tolerances={torch.float32: _EXACT, torch.bfloat16: _EXACT},
                tolerance_reason="a token is right or wrong; no sample's number is so close to a sum of weights that fp32 decides",
                variants=({"vocab_size": 99},),
                benchmark_variants=({"vocab_size": 49152},),
                result_dtypes=(torch.int64, torch.bool),
                gpu_only=True,
            ),
        )
    }
)


OPAQUE_OPS = tuple(spec.name for spec in CATALOG.values() if spec.splits_graph)
"""The names of the ops that a compiler doesn't look into."""

UNFUSED_OPS = (*OPAQUE_OPS, *(spec.name for spec in CATALOG.values() if spec.gpu_only))
"""The names of the ops that a compiler can't fuse: those, and the ones that it doesn't see."""


def op_namespaces(kernels: CpuLibrary | None = None, triton: TritonLibrary | None = None) -> tuple[str, ...]:
    """Returns the namespaces of registered ops that a model may call, those of kernels included."""
    return (
        "modelworker",
        *(() if kernels is None else (kernels.level.namespace,)),
        *(() if triton is None else (TRITON_LIBRARY.ns,)),
    )


def splitting_ops(kernels: CpuLibrary | None = None, triton: TritonLibrary | None = None) -> tuple[str, ...]:
    """Returns the qualified names of the ops at which a compiler splits the model's graph, those of kernels included."""
    return tuple(f"{namespace}::{name}" for namespace in op_namespaces(kernels, triton) for name in OPAQUE_OPS)
