"""How much was compiled: for the worker's models, and by the compilers of this process at all."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class ProcessCompilations:
    """What the compilers of this process have done since it started, for whomever, child processes that work for them included.

    `torch._dynamo.reset` makes torch forget the first two.

    Attributes:
        dynamo: functions that Dynamo has traced.
        inductor: graphs that Inductor has compiled.
        triton: kernels that Triton has compiled, as far as it is watched, see `watch_triton`.
    """

    dynamo: int = 0
    inductor: int = 0
    triton: int = 0

    def __sub__(self, other: "ProcessCompilations") -> "ProcessCompilations":
        """Returns what came between."""
        return ProcessCompilations(*(getattr(self, field.name) - getattr(other, field.name) for field in fields(self)))


class CompileCounters:
    """Counts what compiling models takes. Events are named integers; a label, where there is one, follows the name.

    `pieces`: in all models; `compiled`: pieces that were compiled; `cache_hits`; `cache_misses:REASON`; `cache_store_failures`;
    `pass_matches:PASS`: how often a graph pass changed something.
    """

    def __init__(self) -> None:
        self._values: dict[str, int] = {}
        self._triton = 0

    def increment(self, name: str, amount: int = 1, *, label: str = "") -> None:
        """Adds to a counter, which starts at 0."""
        key = f"{name}:{label}" if label else name
        self._values[key] = self._values.get(key, 0) + amount

    def snapshot(self) -> dict[str, int]:
        """Returns all counters by name, those of this process's compilers among them."""
        process = self.process_compilations()
        return {**self._values, **{f"process_{field.name}": getattr(process, field.name) for field in fields(process)}}

    def process_compilations(self) -> ProcessCompilations:
        """Returns what the compilers of this process have done so far. Loads none of them: what is not loaded has done nothing."""
        utils: Any = sys.modules.get("torch._dynamo.utils")
        if utils is None:
            return ProcessCompilations(triton=self._triton)
        times, requests = utils.compilation_time_metrics, utils.counters["inductor"]
        # Kernels of Inductor are compiled in child processes, which Triton's listener does not hear.
        in_children = requests["async_compile_cache_miss"] - requests["async_compile_cache_hit"]
        return ProcessCompilations(
            dynamo=len(times.get("_compile.compile_inner", ())),
            inductor=len(times.get("compile_fx_inner", ())),
            triton=in_children + self._triton,
        )

    def watch_triton(self) -> None:
        """Counts from now on what Triton compiles in this process. Only for a process that uses Triton: it loads it.

        Triton tells one listener; one that is there already is told as before.
        """
        knobs: Any = sys.modules["triton"].knobs
        earlier: Callable[..., None] | None = knobs.compilation.listener

        def listen(**event: Any) -> None:
            self._triton += not event["cache_hit"]
            if earlier is not None:
                earlier(**event)

        knobs.compilation.listener = listen

    @contextlib.contextmanager
    def expect(self, **amounts: int) -> Iterator[None]:
        """Checks what is counted inside of a `with` block.

        Args:
            amounts: by the names of `snapshot`; a counter that is not named may change.

        Raises:
            AssertionError: a counter changes by another amount.
        """
        before = self.snapshot()
        yield
        after = self.snapshot()
        found = {name: after.get(name, 0) - before.get(name, 0) for name in amounts}
        if found != amounts:
            raise AssertionError(f"expected {amounts}, counted {found}; all counters: {after}")
