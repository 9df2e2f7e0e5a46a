"""Every op with its contract: reference, samples, tolerances, implementations. Tests and benchmarks are loops over this.

An op is added by its module, its reference and samples, and one `OpSpec` here; another implementation by one line in its spec.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from modelworker.ops.activation import silu_and_mul
from modelworker.ops.activation_spec import silu_and_mul_reference, silu_and_mul_sample
from modelworker.ops.attention import paged_attention
from modelworker.ops.attention_spec import attention_variant, paged_attention_reference, paged_attention_sample
from modelworker.ops.kv_cache import store_kv
from modelworker.ops.kv_cache_spec import store_kv_reference, store_kv_sample
from modelworker.ops.norm import fused_add_rms_norm, rms_norm
from modelworker.ops.norm_spec import (
    fused_add_rms_norm_reference,
    fused_add_rms_norm_sample,
    rms_norm_reference,
    rms_norm_sample,
)
from modelworker.ops.op_spec import Implementation, OpSpec, Tolerance
from modelworker.ops.rotary import rotary_embedding
from modelworker.ops.rotary_spec import rotary_embedding_reference, rotary_embedding_sample, rotary_variant

# One rounding to bf16 (2^-9 relative, doubled for a neighbour chosen by an error in fp32), absolute where values cancel.
_ROUNDED_ONCE = Tolerance(rtol=2.0**-8, atol=2.0**-10)
_EXACT = Tolerance(rtol=0.0, atol=0.0)

CATALOG: Mapping[str, OpSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            OpSpec(
                name="rms_norm",
                implementations=(Implementation(name="native", run=rms_norm),),
                reference=rms_norm_reference,
                sample=rms_norm_sample,
                tolerances={torch.float32: Tolerance(rtol=2e-6, atol=1e-6), torch.bfloat16: _ROUNDED_ONCE},
                tolerance_reason="a fp32 sum of a hundred squares and four fp32 operations; bf16 rounds the result once",
                variants=({"hidden_size": 96},),
                benchmark_variants=({"hidden_size": 576}, {"hidden_size": 2048}),
            ),
            OpSpec(
                name="fused_add_rms_norm",
                implementations=(Implementation(name="native", run=fused_add_rms_norm),),
                reference=fused_add_rms_norm_reference,
                sample=fused_add_rms_norm_sample,
                tolerances={torch.float32: Tolerance(rtol=2e-6, atol=1e-6), torch.bfloat16: _ROUNDED_ONCE},
                tolerance_reason="as rms_norm: the norm is that of the fp32 sum, before it is rounded into the residual",
                variants=({"hidden_size": 96},),
                benchmark_variants=({"hidden_size": 576}, {"hidden_size": 2048}),
            ),
            OpSpec(
                name="silu_and_mul",
                implementations=(Implementation(name="native", run=silu_and_mul),),
                reference=silu_and_mul_reference,
                sample=silu_and_mul_sample,
                tolerances={torch.float32: Tolerance(rtol=2e-6, atol=1e-7), torch.bfloat16: _ROUNDED_ONCE},
                tolerance_reason="one exponential and three operations in fp32; bf16 rounds the result once",
                variants=({"intermediate_size": 80},),
                benchmark_variants=({"intermediate_size": 1536}, {"intermediate_size": 8192}),
            ),
            OpSpec(
                name="rotary_embedding",
                implementations=(Implementation(name="native", run=rotary_embedding),),
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
                name="store_kv",
                implementations=(Implementation(name="native", run=store_kv),),
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
                implementations=(Implementation(name="native", run=paged_attention),),
                reference=paged_attention_reference,
                sample=paged_attention_sample,
                tolerances={torch.float32: Tolerance(rtol=1e-5, atol=3e-6), torch.bfloat16: _ROUNDED_ONCE},
                tolerance_reason="fp32 sums of a hundred products behind an exponential; bf16 rounds the result once",
                variants=(
                    attention_variant("decode", num_heads=4, num_kv_heads=2, block_size=4),
                    attention_variant("decode", num_heads=9, num_kv_heads=3, block_size=16, window=5, soft_cap=2.0),
                    attention_variant("prefill", num_heads=4, num_kv_heads=1, block_size=32),
                    attention_variant("mixed", num_heads=4, num_kv_heads=4, block_size=4, window=7),
                ),
                benchmark_variants=(
                    attention_variant("decode", num_heads=9, num_kv_heads=3, block_size=32, head_dim=64, context_len=1024),
                    attention_variant("prefill", num_heads=9, num_kv_heads=3, block_size=32, head_dim=64),
                ),
                splits_graph=True,
            ),
        )
    }
)


def splitting_ops() -> tuple[str, ...]:
    """Returns the qualified names of the ops at which a compiler splits the model's graph."""
    return tuple(f"modelworker::{spec.name}" for spec in CATALOG.values() if spec.splits_graph)
