"""Every op that has a Triton form. Importing this module registers the forms as `torch.ops.modelworker_triton.<name>`.

Under the interpreter they run on tensors of the host, so they are registered for these, too.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from modelworker.ops.kernels.embedding import launch_embedding
from modelworker.ops.kernels.fused_add_rms_norm import launch_fused_add_rms_norm
from modelworker.ops.kernels.geometry import attention_workspace_bytes
from modelworker.ops.kernels.paged_attention import PagedAttentionLauncher, prepare_paged_attention
from modelworker.ops.kernels.rms_norm import launch_rms_norm
from modelworker.ops.kernels.rotary_store_kv import launch_rotary_embedding, launch_rotary_store_kv
from modelworker.ops.kernels.sample_tokens import launch_sample_tokens
from modelworker.ops.kernels.silu_and_mul import launch_silu_and_mul
from modelworker.ops.kernels.store_kv import launch_store_kv
from modelworker.ops.library import TRITON_LIBRARY, register_form

__all__ = ["FORMS", "attention_workspace_bytes", "prepare_paged_attention"]

FORMS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "embedding": launch_embedding,
        "fused_add_rms_norm": launch_fused_add_rms_norm,
        "paged_attention": PagedAttentionLauncher().launch,
        "rms_norm": launch_rms_norm,
        "rotary_embedding": launch_rotary_embedding,
        "rotary_store_kv": launch_rotary_store_kv,
        "sample_tokens": launch_sample_tokens,
        "silu_and_mul": launch_silu_and_mul,
        "store_kv": launch_store_kv,
    }
)
"""What launches each, by the op's name."""

for _name, _launch in FORMS.items():
    register_form(_launch, name=_name, library=TRITON_LIBRARY)
