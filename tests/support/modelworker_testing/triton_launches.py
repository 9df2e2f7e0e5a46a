"""What launchers of Triton kernels would launch, compiled for a GPU that need not be there.

The launchers run as they are, on tensors of the host: arguments are specialised, forms are compiled and kept as on a GPU. Only the
launch itself is left out.
"""

import contextlib
import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Resources:
    """What a program of a compiled kernel needs.

    Attributes:
        registers: of a thread.
        spilled_bytes: of a thread, written to memory because there are not enough registers.
        shared_bytes: of the program.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch.

    Attributes:
        kernel: its name.
        grid: of programs.
        compiled: the form that it launches.
        constants: the arguments that a form is compiled for.
    """

    kernel: str
    grid: tuple[int, ...]
    compiled: Any
    constants: dict[str, Any]


@dataclass(slots=True)
class Launches:
    """Everything launched since it was made.

    Attributes:
        launches: in order.
        num_compiled: forms that had to be compiled.
    """

    launches: list[Launch] = field(default_factory=list)
    num_compiled: int = 0


class _Driver:
    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> Any:
        # Triton keeps the forms of each device apart, and each stand-in is one that has none yet.
        return self

    def get_current_stream(self, device: Any) -> int:
        return 0


@contextlib.contextmanager
def recorded_launches(capability: int = 90) -> Iterator[Launches]:
    """Compiles what is launched for a compute capability, major x 10 + minor, and notes it."""
    found = Launches()
    run = JITFunction.run

    @functools.wraps(run)
    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = run(self, *args, grid=grid, warmup=True, **options)
        constants = {name: value for name, value in options.items() if name.isupper() or name in ("num_warps", "num_stages")}
        found.launches.append(Launch(self.fn.__name__, tuple(grid), compiled, constants))
        return compiled

    def count(**event: Any) -> None:
        found.num_compiled += 1

    with (
        mock.patch.object(triton.runtime.driver, "_active", _Driver(capability)),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(triton.knobs.runtime, "jit_post_compile_hook", count),
    ):
        yield found


def resources(compiled: Any) -> Resources:
    """Asks the assembler what a compiled form needs."""
    with tempfile.TemporaryDirectory() as directory:
        ptx = Path(directory) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        target = re.search(r"\.target (sm_\w+)", compiled.asm["ptx"])
        assert target is not None
        assembler = _TOOLS / ("ptxas-blackwell" if target[1].startswith("sm_1") else "ptxas")
        command = [assembler, "-v", f"--gpu-name={target[1]}", ptx, "-o", ptx.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None
    assert spilled is not None
    return Resources(int(registers[1]), int(spilled[1]), compiled.metadata.shared)
