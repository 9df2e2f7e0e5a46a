"""What is compiled: a function, what it reads, and what its code depends on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from modelworker.compiler.program import StepInput


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelSource:
    """A model to compile.

    Attributes:
        function: takes the tensors of `inputs` in order, and returns a tensor or a tuple of tensors.
        inputs: what changes from step to step, by name.
        max_sizes: the largest values of the inputs' named sizes. They are never exceeded. Where that of each size of a piece is
            known, its code is better: it computes addresses in 32 bits, and fuses over all rows.
        bound: every other tensor that the function reads, by name: parameters, buffers, KV caches. Compiled code keeps them: they
            may be written to, but not replaced.
        any_length: names of bound tensors that only splitting ops may read: their first size is no part of the cache's key.
        splitting_ops: qualified names of the ops at which the model is split, e.g. "modelworker::paged_attention".
        op_namespaces: the namespaces of registered ops that the function may call.
        identity: what else decides what the function computes, e.g. the digest of the model's configuration, the implementations of
            its ops. Part of the cache's key, as are the shapes, dtypes and names above.
        sources: files of the code that is traced or that defines ops. Their content is part of the cache's key.
    """

    function: Callable[..., Any]
    inputs: Mapping[str, StepInput]
    bound: Mapping[str, Tensor]
    splitting_ops: tuple[str, ...]
    op_namespaces: tuple[str, ...]
    identity: Mapping[str, str]
    sources: tuple[Path, ...]
    max_sizes: Mapping[str, int] = field(default_factory=dict)
    any_length: frozenset[str] = frozenset()
