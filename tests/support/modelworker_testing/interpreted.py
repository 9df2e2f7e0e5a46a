"""What tests under Triton's interpreter have in common."""

import dataclasses

import torch

from modelworker.ops.catalog import CATALOG
from modelworker.ops.op_spec import OpSpec, Tolerance


def interpreted_spec(name: str) -> OpSpec:
    """Returns an op's spec with twice the tolerance in bf16, which the interpreter truncates to, where a GPU rounds."""
    spec = CATALOG[name]
    rounded = spec.tolerances[torch.bfloat16]
    truncated = Tolerance(rtol=2 * rounded.rtol, atol=2 * rounded.atol)
    return dataclasses.replace(spec, tolerances={**spec.tolerances, torch.bfloat16: truncated})
