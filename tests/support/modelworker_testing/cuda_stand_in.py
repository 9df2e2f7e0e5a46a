"""A stand-in for a GPU, as far as a compiler asks for one: properties of the device, and the target of code.

With it Inductor generates and Triton compiles code for fake CUDA tensors on a machine without a GPU. That shows which kernels there
are, and that they compile; not that they run.
"""

import contextlib
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from torch import fx
from torch._dynamo import device_interface
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._triton import has_triton
from triton.backends.compiler import GPUTarget

from modelworker.compiler import inductor
from modelworker.compiler.assemble import UniquePiece
from modelworker.compiler.counters import CompileCounters
from modelworker.compiler.model_source import ModelSource
from modelworker.compiler.pipeline import compile_pieces
from modelworker.compiler.program import Program
from modelworker.compiler.settings import CompileSettings

_CUDA = torch.device("cuda", 0)


class _Properties:
    name = "stand-in for an H200"
    multi_processor_count = 132
    regs_per_multiprocessor = 65536
    max_threads_per_multi_processor = 2048
    max_threads_per_block = 1024
    warp_size = 32
    total_memory = 143 * 2**30
    L2_cache_size = 60 * 2**20
    gcnArchName = ""  # noqa: N815
    shared_memory_per_block = 49152
    shared_memory_per_block_optin = 232448
    shared_memory_per_multiprocessor = 233472

    def __init__(self, capability: tuple[int, int]) -> None:
        self.major, self.minor = capability


class _Driver:
    def __init__(self, capability: tuple[int, int]) -> None:
        self._target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_device_interface(self) -> Any:
        return torch.cuda


class _Generated(BaseException):
    """Carries generated code out of Inductor before it would be loaded. No `except Exception` catches it."""


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What a compiled kernel needs of a GPU.

    Attributes:
        name: of the kernel.
        registers: of a thread.
        spilled_bytes: of a thread, written because there are not enough registers.
        shared_bytes: of a block.
    """

    name: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


@contextlib.contextmanager
def cuda_stand_in(capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Makes Inductor and Triton believe that there is a GPU, as long as it is open."""
    properties = _Properties(capability)
    answers: dict[str, Any] = {
        "get_device_properties": properties,
        "get_compute_capability": capability[0] * 10 + capability[1],
        "is_available": True,
        "current_device": 0,
        "synchronize": None,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "is_bf16_supported": True,
    }
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, answer: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, return_value=answer))

        for name, answer in answers.items():
            replace(device_interface.CudaInterface, name, answer)
        replace(device_interface.CudaInterface.Worker, "get_device_properties", properties)
        replace(device_interface.CudaInterface.Worker, "current_device", 0)
        replace(torch.cuda, "get_device_properties", properties)
        replace(torch.cuda, "get_device_capability", capability)
        replace(torch.cuda, "current_device", 0)
        replace(triton_helpers, "set_driver_to_gpu", None)
        # Kernels are compiled here and are Triton's own objects, which know their code.
        launchers = ("use_static_triton_launcher", "use_static_cuda_launcher")
        options = {"compile_threads": 1, **{name: False for name in launchers if hasattr(config, name)}}
        stack.enter_context(config.patch(options))
        stack.enter_context(mock.patch.object(triton.runtime.driver, "_active", _Driver(capability)))
        # torch remembers whether it could use Triton.
        has_triton.cache_clear()
        stack.callback(has_triton.cache_clear)
        yield


def generated_cuda_source(program: Program, piece: UniquePiece, source: ModelSource) -> str:
    """Takes a piece through the compiler's own way and returns the module that Inductor generates for CUDA, which is not loaded."""
    generate = GraphLowering.codegen

    def stop_after_codegen(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise _Generated(getattr(generate(self, *args, **kwargs)[0], "value"))  # noqa: B009

    inner = inductor.compile_fx_inner

    def compile_for_cuda(graph: fx.GraphModule, inputs: list[Any], **options: Any) -> Any:
        _move_to_cuda(graph, inputs)
        return inner(graph, inputs, **options)

    with (
        mock.patch.object(GraphLowering, "codegen", stop_after_codegen),
        mock.patch.object(inductor, "compile_fx_inner", compile_for_cuda),
    ):
        try:
            compile_pieces(source, program, [piece], CompileSettings(), (), CompileCounters(), lambda done, total: None)
        except _Generated as generated:
            return str(generated.args[0])
    raise AssertionError("Inductor generated nothing")


def _move_to_cuda(graph: fx.GraphModule, inputs: list[Any]) -> None:
    """Makes the fake tensors of a graph CUDA's. Without CUDA torch can't trace in-place ops on such, so they are traced before."""
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        for tensor in value if isinstance(value, tuple | list) else (value,):
            _move(tensor)
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": _CUDA}
    for tensor in inputs:
        _move(tensor)


def _move(value: Any) -> None:
    if isinstance(value, FakeTensor):
        value.fake_device = _CUDA


def triton_kernels(source: str) -> dict[str, str]:
    """Returns the kernels of a generated module: their names and source."""
    return dict(re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", source, re.DOTALL))


def library_calls(source: str) -> list[str]:
    """Returns the kernels of libraries that a generated module calls, in order."""
    return re.findall(r"extern_kernels\.(\w+)\(", source)


def compile_kernel(name: str, source: str, capability: tuple[int, int] = (9, 0)) -> KernelResources:
    """Compiles a kernel of a generated module for the GPU that the stand-in stands for, in its first configuration."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        compiled = kernel._precompile_config(kernel.configs[0]).kernel
        ptx = Path(directory) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        return _resources(name, ptx, compiled.metadata.shared)


def _resources(name: str, ptx: Path, shared_bytes: int) -> KernelResources:
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    target = re.search(r"\.target (sm_\w+)", ptx.read_text())
    assert target is not None
    command = [assembler, "-v", f"--gpu-name={target[1]}", ptx, "-o", ptx.with_suffix(".cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
    assert registers is not None
    assert spilled is not None
    return KernelResources(name, int(registers[1]), int(spilled[1]), shared_bytes)
