"""The decoder in compiled pieces, with attention between them."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from modelworker.compiler.cache import ArtifactCache
from modelworker.compiler.compile import compile_model
from modelworker.compiler.counters import CompileCounters
from modelworker.compiler.model import CompiledModel, Piece, SplittingOp
from modelworker.compiler.model_source import ModelSource
from modelworker.compiler.program import StepInput
from modelworker.compiler.settings import CompileSettings
from modelworker.ops.catalog import op_namespaces, splitting_ops
from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.triton_library import TritonLibrary
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.progress import Progress
from modelworker.worker.step_buffers import RunDecoder, StepBuffers, StepInputs

_FIRST_PARTIES = ("torch", "modelworker", "builtins", "abc", "typing")
_FOLDERS_TRACED = ("ops", "worker/models")
_FILES_TRACED = ("worker/compiled_decoder.py", "worker/step_buffers.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledDecoder:
    """A decoder that was traced once and split at attention.

    Attributes:
        run: computes a step without graphs.
        stages: with the code that `run` uses. Tensors pass between them in numbered slots: the first hold the step's inputs, those
            that follow `bound`.
        plain_stages: the same stages, whose pieces call their ops one by one, so that a recorder sees them.
        bound: what is the same in every step: weights, tables and the KV cache.
        outputs: slots that hold at the end what the decoder returns.
        has_generated_code: whether pieces run code that a compiler made.
    """

    run: RunDecoder
    stages: tuple[Piece | SplittingOp, ...]
    plain_stages: tuple[Piece | SplittingOp, ...]
    bound: tuple[Tensor, ...]
    outputs: tuple[int, ...]
    has_generated_code: bool


def decoder_source(
    model: CausalLM,
    kv_cache: KvCache,
    buffers: StepBuffers,
    *,
    device: torch.device,
    kernels: CpuLibrary | None,
    triton: TritonLibrary | None,
    identity: Mapping[str, str],
) -> ModelSource:
    """Describes the decoder to the compiler.

    Args:
        model: with its weights.
        kv_cache: that it writes to.
        buffers: of its inputs, whose sizes no step exceeds.
        device: where it computes.
        kernels: of the CPU.
        triton: kernels of the GPU; None: there are none.
        identity: what decides, beside shapes and dtypes, what it computes.
    """

    def decode(*tensors: Tensor) -> Tensor:
        inputs = StepInputs(*tensors)
        return model(inputs.token_ids, inputs.positions, inputs.attention, kv_cache.layers)  # type: ignore[no-any-return]

    def step_input(dtype: torch.dtype, *shape: int | str) -> StepInput:
        return StepInput(shape, dtype, device)

    inputs = {
        "token_ids": step_input(torch.int32, "num_tokens"),
        "positions": step_input(torch.int32, "num_tokens"),
        "slots": step_input(torch.int64, "num_tokens"),
        "query_starts": step_input(torch.int32, "num_sequences + 1"),
        "seq_lens": step_input(torch.int32, "num_sequences"),
        "block_tables": step_input(torch.int32, "num_sequences", buffers.max_blocks),
    }
    return ModelSource(
        function=decode,
        inputs=inputs,
        max_sizes={
            "num_tokens": buffers.max_tokens,
            "num_sequences": buffers.max_sequences,
            "num_sequences + 1": buffers.max_sequences + 1,
        },
        bound=_bound_tensors(model, kv_cache),
        splitting_ops=splitting_ops(kernels, triton),
        op_namespaces=op_namespaces(kernels, triton),
        identity=identity,
        sources=_traced_files(model),
        # How many blocks there are follows from the memory that is free at this start.
        any_length=frozenset(_cache_tensors(kv_cache)),
    )


def compile_decoder(
    source: ModelSource,
    settings: CompileSettings,
    *,
    counters: CompileCounters,
    cache: ArtifactCache | None,
    progress: Progress,
) -> CompiledDecoder:
    """Compiles a decoder, or loads what was compiled before.

    Raises:
        CompileError: it can't be compiled.
    """
    if settings.partition == "inductor":
        # The code of the one piece that there is reads the cache.
        source = replace(source, any_length=frozenset())
    with progress.stage("compiling") as advance:
        compiled = compile_model(source, settings, counters=counters, cache=cache, advance=lambda _done, _total: advance(1))
    return CompiledDecoder(
        run=_run_of(compiled),
        stages=compiled.stages,
        plain_stages=compiled.plain().stages,
        bound=compiled.bound,
        outputs=compiled.program.outputs,
        has_generated_code=settings.backend != "eager",
    )


def _run_of(model: CompiledModel) -> RunDecoder:
    def run(*inputs: Tensor) -> Sequence[Tensor]:
        hidden_states = model(*inputs)
        assert isinstance(hidden_states, Tensor), "the decoder returns one tensor"
        return (hidden_states,)

    return run


def _bound_tensors(model: nn.Module, kv_cache: KvCache) -> dict[str, Tensor]:
    bound: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {**bound, **_cache_tensors(kv_cache)}


def _cache_tensors(kv_cache: KvCache) -> dict[str, Tensor]:
    return {
        f"kv_cache.{layer}.{name}": tensor
        for layer, (keys, values) in enumerate(kv_cache.layers)
        for name, tensor in (("keys", keys), ("values", values))
    }


def _traced_files(model: nn.Module) -> tuple[Path, ...]:
    """The code that is traced, or that defines ops, that of plug-ins included."""
    root = Path(__file__).resolve().parent.parent
    files = [path for folder in _FOLDERS_TRACED for path in (root / folder).rglob("*") if path.suffix in (".py", ".cpp", ".h")]
    files += [root / name for name in _FILES_TRACED]
    classes = {base for module in model.modules() for base in type(module).__mro__}
    others = {base for base in classes if base.__module__.partition(".")[0] not in _FIRST_PARTIES}
    packages = {Path(inspect.getfile(base)).parent if "." in base.__module__ else Path(inspect.getfile(base)) for base in others}
    foreign = (path for package in packages for path in ([package] if package.is_file() else package.rglob("*.py")))
    return tuple(sorted({*files, *foreign}))
