"""The C++ kernels of this machine: which ISA level, compiled or found, or why there are none."""

import logging
from dataclasses import dataclass

import torch

from modelworker.ops.cpu.build import BuildError, num_sources
from modelworker.ops.cpu.isa import IsaLevel, cpu_flags, usable_levels
from modelworker.ops.cpu.library import CpuLibrary, load_library
from modelworker.worker.description import Degradation
from modelworker.worker.errors import SettingsError
from modelworker.worker.progress import Progress
from modelworker.worker.settings import OpsSettings, WorkerSettings

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuKernels:
    """What start-up found.

    Attributes:
        library: the kernels; None: there are none.
        missing: why there are none.
        degradations: what that means.
    """

    library: CpuLibrary | None = None
    missing: str = "the C++ kernels are not loaded"
    degradations: tuple[Degradation, ...] = ()


def load_cpu_kernels(settings: WorkerSettings, device: torch.device, progress: Progress) -> CpuKernels:
    """Compiles the kernels, unless they are in the cache, and loads them.

    Raises:
        SettingsError: --cpu-isa names a level that this machine doesn't have.
    """
    if device.type != "cpu":
        return CpuKernels(missing=f"the model runs on {device.type}")
    level = choose_isa(settings.ops, usable_levels(cpu_flags()))
    try:
        with progress.stage(f"loading C++ kernels for {level.name}", total=num_sources(), unit="files") as advance:
            library = load_library(level, settings.cache.folder / "cpu-kernels", advance)
    except BuildError as error:
        message = f"{error}: plain PyTorch ops run instead, several times slower"
        return CpuKernels(missing=str(error), degradations=(Degradation(reason="no_cpu_kernels", message=message),))
    _logger.info("C++ kernels for %s", level.name)
    return CpuKernels(library=library)


def choose_isa(settings: OpsSettings, usable: tuple[IsaLevel, ...]) -> IsaLevel:
    """Resolves --cpu-isa: by default the first, which is the best, of the levels that this machine has.

    Raises:
        SettingsError: it names a level that this machine doesn't have.
    """
    if settings.cpu_isa == "auto":
        return usable[0]
    for level in usable:
        if level.name == settings.cpu_isa:
            return level
    raise SettingsError(f"--cpu-isa {settings.cpu_isa}: this machine has {', '.join(level.name for level in usable)}")
