"""Small functions as the compiler gets models, and ops at which they are split."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from modelworker.compiler.model_source import ModelSource
from modelworker.compiler.program import StepInput
from modelworker.ops.library import register_op

ROWS: Mapping[str, StepInput] = {"x": StepInput(("num_tokens", 8), torch.float32)}
NAMESPACE = "modelworker_testing"


def small_source(
    function: Callable[..., Any],
    *,
    inputs: Mapping[str, StepInput] = ROWS,
    bound: Mapping[str, Tensor] | None = None,
    sources: tuple[Path, ...] = (Path(__file__),),
    **identity: str,
) -> ModelSource:
    """Makes a source of a function, which is split at the ops of `mixing_ops`."""
    return ModelSource(
        function=function,
        inputs=inputs,
        bound=bound or {},
        splitting_ops=tuple(f"{NAMESPACE}::{name}" for name in ("mix", "halves", "shift")),
        op_namespaces=(NAMESPACE,),
        identity=identity,
        sources=sources,
    )


@contextmanager
def mixing_ops() -> Iterator[None]:
    """Registers the ops, as long as it is open."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    with torch.compiler.config.patch(cache_key_tag=torch.compiler.config.cache_key_tag):
        register_op(mix, mutates_args=("out",), library=library)
        register_op(halves, fake=_halves_fake, library=library)
        register_op(shift, mutates_args=("x",), library=library)
    try:
        yield
    finally:
        library._destroy()


def mix(x: Tensor, out: Tensor, weight: float) -> None:
    """Puts the running sum of x's rows, times a weight, into `out`."""
    out.copy_(x.cumsum(0) * weight)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns half of x, and its negative."""
    return x / 2, -x / 2


def shift(x: Tensor) -> None:
    """Adds 1 to x in place."""
    x.add_(1)


def _halves_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)
