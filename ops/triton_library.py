"""The Triton kernels, loaded into a process that has a GPU: nothing else needs Triton, which a CPU build of torch comes without."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from modelworker.ops.library import TRITON_LIBRARY


class TritonError(Exception):
    """The Triton kernels can't be loaded."""


@dataclass(frozen=True, slots=True)
class TritonLibrary:
    """The loaded kernels.

    Attributes:
        ops: their torch ops, as attributes; each has the arguments of the op of its name.
        names: of these ops.
        prepare_attention: compiles every form of attention; see `kernels.paged_attention.prepare_paged_attention`.
        attention_workspace_bytes: what attention takes beside its results; see `kernels.geometry.attention_workspace_bytes`.
    """

    ops: Any
    names: tuple[str, ...]
    prepare_attention: Callable[..., None]
    attention_workspace_bytes: Callable[..., int]


def load_triton() -> TritonLibrary:
    """Imports Triton and registers the kernels, unless this process did that before.

    Raises:
        TritonError: Triton is not installed, or can't be imported.
    """
    try:
        forms = importlib.import_module("modelworker.ops.kernels.forms")
    except ImportError as error:
        raise TritonError(f"Triton can't be loaded: {error}") from error
    return TritonLibrary(
        ops=getattr(torch.ops, TRITON_LIBRARY.ns),
        names=tuple(forms.FORMS),
        prepare_attention=forms.prepare_paged_attention,
        attention_workspace_bytes=forms.attention_workspace_bytes,
    )
