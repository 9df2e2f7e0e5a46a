"""Settings of the compiler."""

from dataclasses import dataclass, field
from typing import Literal

Backend = Literal["inductor", "eager"]
Partition = Literal["fx", "inductor"]

PASS_NAMES = ("no_op_elimination", "read_past_scatter", "convert_before_cat")
"""The graph passes that are run unless they are disabled, in order; `passes` has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileSettings:
    """How a model is compiled.

    Attributes:
        backend: what runs a piece: code that Inductor generates, or the piece's own ops ("eager"), which compiles nothing.
        partition: who splits the graph: we do, before Inductor sees it ("fx"), or Inductor does, after its passes.
        autotune: whether Inductor measures alternatives of its kernels; costs start-up time.
        disabled_passes: names of our graph passes that are not run.
        inductor_options: further settings of `torch._inductor.config`, in its own spelling, as (name, value).
    """

    backend: Backend = "inductor"
    partition: Partition = "fx"
    autotune: bool = False
    disabled_passes: tuple[str, ...] = ()
    inductor_options: tuple[tuple[str, bool | int | str], ...] = field(default=())


def compile_settings_of(
    optimization_level: int, *, backend: Backend = "inductor", partition: Partition = "fx", disabled_passes: tuple[str, ...] = ()
) -> CompileSettings | None:
    """Returns what an optimization level compiles: nothing at 0, pieces at 1 and 2, pieces of measured kernels at 3.

    Levels 1 and 2 differ in what is done with the pieces, not in how they are compiled.

    Raises:
        ValueError: there is no such level.
    """
    if optimization_level not in range(4):
        raise ValueError(f"expected an optimization level of 0 .. 3, found {optimization_level}")
    if optimization_level == 0:
        return None
    return CompileSettings(backend=backend, partition=partition, autotune=optimization_level == 3, disabled_passes=disabled_passes)
