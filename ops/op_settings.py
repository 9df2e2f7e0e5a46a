"""What decides which implementation of an op is used: `custom_ops`, the platform, and whether a compiler fuses native code."""

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.triton_library import TritonLibrary

Platform = Literal["cpu", "cuda"]

_GLOBAL = ("all", "none")


class OpSettingsError(ValueError):
    """`custom_ops` contradicts itself or names something that there is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSettings:
    """The settings of all ops of a model, handed to each when it is made.

    Attributes:
        platform: where the model runs.
        custom_ops: exactly one of "all" and "none", and any number of "+name" and "-name".
        compiles: whether compilation is on.
        backend: of the compiler; "eager" traces without generating code.
        records: whether steps are recorded as flat lists of the platform's kernels, also where compiled pieces run native code.
        opaque_ops: whether attention and the cache update go through torch's dispatcher, as ops that a compiler doesn't look into;
            without it the same Python functions are called directly.
        kernels: the C++ kernels of this CPU; None: there are none.
        no_kernels_reason: why there are none.
        triton: the Triton kernels; None: there are none.
        no_triton_reason: why there are none.
    """

    platform: Platform = "cpu"
    custom_ops: tuple[str, ...] = ("all",)
    compiles: bool = False
    backend: str = "inductor"
    records: bool = False
    opaque_ops: bool = True
    kernels: CpuLibrary | None = None
    no_kernels_reason: str = "the C++ kernels are not loaded"
    triton: TritonLibrary | None = None
    no_triton_reason: str = "the Triton kernels are not loaded"

    def __post_init__(self) -> None:
        """Refuses contradictions.

        Raises:
            OpSettingsError: there are some.
        """
        _check_form(self.custom_ops)
        if len(set(self.custom_ops) & set(_GLOBAL)) != 1:
            raise OpSettingsError(f"expected one of all and none, found {_join(self.custom_ops)}")

    @property
    def enables_all(self) -> bool:
        """Whether ops that are not named are enabled."""
        return "all" in self.custom_ops

    @property
    def kernels_obstacle(self) -> str:
        """Why C++ kernels can't be used; "" where they can."""
        return "" if self.kernels is not None else self.no_kernels_reason

    @property
    def triton_obstacle(self) -> str:
        """Why Triton kernels can't be used; "" where they can."""
        return "" if self.triton is not None else self.no_triton_reason

    @property
    def global_setting(self) -> str:
        """What holds for ops that are not named: "all" or "none"."""
        return "all" if self.enables_all else "none"


def choose_custom_ops(
    wanted: Iterable[str], *, known: Collection[str], opaque: Collection[str], platform: Platform, compiles: bool, backend: str
) -> tuple[str, ...]:
    """Checks what was asked for, and adds "all" or "none" where neither was.

    "none" is the default under Inductor on CUDA, which fuses native code better than it can join kernels of ours; but ops that it
    doesn't look into are enabled, for it can't fuse them either. Elsewhere "all" is the default: a kernel for the CPU can be
    recorded, which generated code can not.

    Args:
        wanted: "all", "none", "+name", "-name".
        known: the names of the ops that can be switched.
        opaque: those among them that a compiler doesn't look into, or doesn't see.
        platform: where the model runs.
        compiles: whether compilation is on.
        backend: of the compiler.

    Raises:
        OpSettingsError: it contradicts itself, or names an op that there is not.
    """
    items = tuple(wanted)
    _check_form(items)
    for item in items:
        if item not in _GLOBAL and item[1:] not in known:
            near = difflib.get_close_matches(item[1:], known, n=3, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(sorted(known)) or 'none'}"
            raise OpSettingsError(f"{item}: no op has the name {item[1:]!r}; {hint}")
    if set(items) & set(_GLOBAL):
        return items
    fuses_native_code = platform == "cuda" and compiles and backend == "inductor"
    if not fuses_native_code:
        return ("all", *items)
    named = {item[1:] for item in items}
    return ("none", *(f"+{name}" for name in sorted(opaque) if name not in named), *items)


def _check_form(items: tuple[str, ...]) -> None:
    for item in items:
        if item not in _GLOBAL and (item[:1] not in ("+", "-") or len(item) < 2):
            raise OpSettingsError(f"expected all, none, +name or -name, found {item!r}")
    if set(_GLOBAL) <= set(items):
        raise OpSettingsError(f"expected one of all and none, found {_join(items)}")
    for item in items:
        if item.startswith("+") and f"-{item[1:]}" in items:
            raise OpSettingsError(f"{item} and -{item[1:]} contradict each other")


def _join(items: tuple[str, ...]) -> str:
    return ",".join(items) or "nothing"
