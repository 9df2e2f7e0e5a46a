"""What the catalog says of an op."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.triton_library import TritonLibrary

RETURNED = "returned"
"""The name of an op's result among what its reference computes."""


def returned_at(index: int) -> str:
    """The name of one of several results."""
    return f"{RETURNED}[{index}]"


TOKEN_COUNTS = (0, 1, 3, 17, 256)
PADDINGS = (0, 5)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleShape:
    """Which sample of an op's inputs is made.

    Attributes:
        num_tokens: rows.
        dtype: of the activations.
        padding: NaN elements in front of and behind each row, and NaN rows behind the last: what lies around the real values in a
            merged projection or a padded buffer.
        variant: arguments of the op's own, e.g. the window of attention.
        draw: another one is a sample of other values, in tensors of the same shapes and strides.
    """

    num_tokens: int
    dtype: torch.dtype
    padding: int = 0
    variant: Mapping[str, Any] = field(default_factory=dict)
    draw: int = 0

    def __str__(self) -> str:
        variant = "".join(f"-{name}={value}" for name, value in self.variant.items())
        return f"{self.num_tokens}-{str(self.dtype).removeprefix('torch.')}-padding={self.padding}{variant}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """How far a result may be from the reference: |result - reference| <= atol + rtol |reference|."""

    rtol: float
    atol: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """One way to compute an op.

    Attributes:
        name: "native", "c++" or "triton".
        run: takes the op's arguments; a registered op, or a plain function.
        devices: on which it runs.
    """

    name: str
    run: Callable[..., Any]
    devices: tuple[str, ...] = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSpec:
    """The contract of an op: everything that its tests and benchmarks are made of.

    Attributes:
        name: of the registered op, `torch.ops.modelworker.<name>`.
        native: the op in plain PyTorch.
        cpp: makes the C++ form of a library of kernels; None: there is none.
        reference: takes the op's arguments, changes none, and returns what each argument that the op writes to must hold
            afterwards, by its name, and the result under `RETURNED`. Written from the formula, in fp64 so that it judges fp32, too.
        sample: makes the op's arguments. What the op must not read is NaN.
        tolerances: by the dtype of the activations.
        tolerance_reason: why these.
        variants: of the samples.
        benchmark_variants: the sizes of real models, for benchmarks.
        result_dtypes: of what the op returns, one by one, where it isn't that of the activations.
        splits_graph: whether a compiler splits the model's graph at this op.
        gpu_only: whether the worker runs it on GPUs alone, behind the model, where no compiler sees it. It has no C++ form.
    """

    name: str
    native: Callable[..., Any]
    reference: Callable[..., Mapping[str, Tensor]]
    sample: Callable[[SampleShape], tuple[Any, ...]]
    tolerances: Mapping[torch.dtype, Tolerance]
    tolerance_reason: str
    variants: tuple[Mapping[str, Any], ...]
    benchmark_variants: tuple[Mapping[str, Any], ...]
    cpp: Callable[[CpuLibrary], Callable[..., Any]] | None = None
    result_dtypes: tuple[torch.dtype, ...] = ()
    splits_graph: bool = False
    gpu_only: bool = False

    def implementations(self, kernels: CpuLibrary | None = None, triton: TritonLibrary | None = None) -> tuple[Implementation, ...]:
        """Returns every way to compute the op; the C++ and Triton forms are those of libraries of kernels."""
        found = [Implementation(name="native", run=self.native)]
        if self.cpp is not None and kernels is not None:
            found.append(Implementation(name="c++", run=self.cpp(kernels), devices=("cpu",)))
        if triton is not None and self.name in triton.names:
            found.append(Implementation(name="triton", run=getattr(triton.ops, self.name).default, devices=("cuda",)))
        return tuple(found)

    def shapes(self) -> Iterator[SampleShape]:
        """Yields the samples to test: every number of tokens, dtype, padding and variant."""
        for num_tokens, dtype, padding, variant in product(TOKEN_COUNTS, self.tolerances, PADDINGS, self.variants):
            yield SampleShape(num_tokens=num_tokens, dtype=dtype, padding=padding, variant=variant)


def random_rows(shape: SampleShape, *sizes: int, seed: int, scale: float = 1.0) -> Tensor:
    """Makes [num_tokens, *sizes] of random numbers, a view of a larger tensor of NaN where the sample is padded."""
    return padded(random(shape, shape.num_tokens, *sizes, seed=seed, scale=scale), shape.padding)


def random(shape: SampleShape, *sizes: int, seed: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """Makes a tensor of random numbers, the same for the same seed and draw, by default in the dtype of the activations."""
    return (torch.randn(sizes, generator=generator(shape, seed)) * scale).to(dtype or shape.dtype)


def generator(shape: SampleShape, seed: int) -> torch.Generator:
    """Makes what random numbers come from; each tensor of a sample has a seed of its own."""
    return torch.Generator().manual_seed(100_000 * shape.draw + seed)


def padded(values: Tensor, padding: int) -> Tensor:
    """Returns the values as a view of a larger tensor of NaN: `padding` before and behind in dimension 1, and behind the rows."""
    if padding == 0:
        return values
    wider = values.new_full((values.shape[0] + padding, values.shape[1] + 2 * padding, *values.shape[2:]), float("nan"))
    view = wider[: values.shape[0], padding : padding + values.shape[1]]
    view.copy_(values)
    return view
