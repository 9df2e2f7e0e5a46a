"""The parts of the check, in order."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from gpu_check.kernel_parts import attention_alone, drawing
from gpu_check.machine_parts import limits, versions
from gpu_check.plan import Plan
from gpu_check.pytest_part import device_tests
from gpu_check.row import Row
from gpu_check.step_parts import decodes_and_prefills, host_times
from gpu_check.transformers_part import compiled_decode

TOTAL_SECONDS = 345


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of the check.

    Attributes:
        budget_seconds: after which it is ended; what it has found until then counts.
        run: yields rows as it finds them.
    """

    budget_seconds: int
    run: Callable[[Plan], Iterator[Row]]


PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "versions": Part(budget_seconds=25, run=versions),
        "limits": Part(budget_seconds=25, run=limits),
        "tests": Part(budget_seconds=90, run=device_tests),
        "steps-1B": Part(budget_seconds=80, run=partial(decodes_and_prefills, name="1B")),
        "steps-8B": Part(budget_seconds=100, run=partial(decodes_and_prefills, name="8B")),
        "attention-8B": Part(budget_seconds=30, run=partial(attention_alone, name="8B")),
        "sampling": Part(budget_seconds=20, run=drawing),
        "host-135M": Part(budget_seconds=60, run=partial(host_times, name="135M")),
        "transformers": Part(budget_seconds=60, run=partial(compiled_decode, name="1B")),
    }
)
