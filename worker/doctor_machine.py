"""What the doctor checks of the machine and the process. Needs no torch."""

import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from modelworker.worker.address import check_address
from modelworker.worker.errors import SetupError
from modelworker.worker.examination import Found, Status
from modelworker.worker.flags import unknown_variables
from modelworker.worker.machine import choose_threads, read_cpu, read_machine
from modelworker.worker.settings import DeviceSettings, ServerSettings
from modelworker.worker.versions import installed_versions

_REQUIRED = ("torch", "grpcio", "protobuf", "numpy")
_COMPILER_SECONDS = 10.0


def check_packages() -> Found[Mapping[str, str]]:
    """Lists versions.

    Raises:
        SetupError: a package that `serve` needs is not installed.
    """
    versions = installed_versions()
    missing = [name for name in _REQUIRED if name not in versions]
    if missing:
        raise SetupError(f"not installed: {', '.join(missing)}; pip install 'modelworker[worker]'")
    text = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Found(value=versions, text=text if "triton" in versions else f"{text}, no triton")


def check_cpu(root: Path = Path("/")) -> Found[None]:
    """Names the processor and what it can do."""
    cpu = read_cpu(root)
    if not cpu.features:
        return Found(value=None, text=f"{cpu.name}; the system does not say what it can do")
    abilities = {"AVX2": cpu.has_avx2, "AVX-512": cpu.has_avx512, "bfloat16": cpu.has_bfloat16, "AMX": cpu.has_amx}
    if not platform.machine().lower().startswith(("x86", "amd64", "i686")):
        abilities = {"bfloat16": cpu.has_bfloat16}
    text = f"{cpu.name}: " + ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in abilities.items())
    if abilities.get("AVX2", True):
        return Found(value=None, text=text)
    return Found(value=None, text=text, status=Status.WARNING, advice="use a CPU with AVX2, which is many times faster")


def check_threads(settings: DeviceSettings, root: Path = Path("/")) -> Found[int]:
    """Says how many threads compute, and compares that with what the process may use."""
    machine = read_machine(root)
    num_threads, source = choose_threads(settings.threads, machine)
    allowed = min(machine.num_cpus, machine.cpu_quota if machine.cpu_quota is not None else machine.num_cpus)
    text = f"{num_threads}: {source}"
    if num_threads <= allowed:
        return Found(value=num_threads, text=text)
    return Found(
        value=num_threads,
        text=f"{text}, but the process may use {allowed:g} CPUs",
        status=Status.WARNING,
        advice="threads beyond that slow each other down: lower --threads or OMP_NUM_THREADS, or raise the CPU limit",
    )


def check_compiler(environment: Mapping[str, str]) -> Found[None]:
    """Looks for the C++ compiler that torch would use: CXX, else g++."""
    command = shlex.split(environment.get("CXX", "")) or ["g++"]
    path = shutil.which(command[0], path=environment.get("PATH"))
    if path is None:
        return Found(
            value=None,
            text=f"{command[0]} was not found",
            status=Status.WARNING,
            advice="ops can't be compiled for this CPU; plain PyTorch ops need no compiler (on Debian and Ubuntu: install g++)",
        )
    try:
        shown = subprocess.run(
            [path, *command[1:], "--version"], capture_output=True, text=True, timeout=_COMPILER_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Found(
            value=None, text=f"{path} does not run: {error}", status=Status.WARNING, advice="install a C++ compiler that works"
        )
    return Found(value=None, text=f"{path}: {shown.partition(chr(10))[0].strip()}")


def check_port(settings: ServerSettings) -> Found[None]:
    """Opens the port and closes it again.

    Raises:
        SetupError: it can't be opened.
    """
    address = check_address(settings.host, settings.port)
    return Found(value=None, text=f"{address} is free" if settings.port else f"a free one of {settings.host} is chosen at start")


def check_variables(known: frozenset[str], environment: Mapping[str, str]) -> Found[None]:
    """Lists the MODELWORKER_* variables that are set, and those that nothing reads."""
    unknown = unknown_variables(known, environment)
    if not unknown:
        used = sorted(name for name in known if environment.get(name))
        return Found(value=None, text=f"read: {', '.join(used)}" if used else "none is set")
    texts = [f"{name} (did you mean {nearest}?)" if nearest else name for name, nearest in unknown.items()]
    return Found(
        value=None, text=f"not read by anything: {', '.join(texts)}", status=Status.WARNING, advice="correct or remove them"
    )
