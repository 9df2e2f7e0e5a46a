"""Captures the decoder: which programs there are on this device, and what came of capturing them."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelworker.graphs.backend import GraphBackend
from modelworker.graphs.cpu_backend import CpuGraphBackend
from modelworker.graphs.cuda_backend import CudaGraphBackend
from modelworker.graphs.dispatch import Dispatcher, Reason
from modelworker.graphs.full import FullGraphs
from modelworker.graphs.graph_set import CaptureReport, GraphMemoryError, GraphSet, Program
from modelworker.graphs.piecewise import PiecewiseGraphs, Stage
from modelworker.graphs.settings import CaptureMode, GraphSettings, RuntimeMode
from modelworker.graphs.sizes import gaps
from modelworker.ops.cpu.recorder import Recorder
from modelworker.ops.custom_op import recorded_forms
from modelworker.worker.compiled_decoder import CompiledDecoder
from modelworker.worker.cpu_kernels import CpuKernels
from modelworker.worker.description import Degradation
from modelworker.worker.errors import SettingsError
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.progress import Progress
from modelworker.worker.step_buffers import RunDecoder, StepBuffers, StepInputs
from modelworker.worker.step_runner import StepRunner
from modelworker.worker.uncapturable import Uncapturable, full_obstacle, piecewise_obstacle

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured:
    """A decoder that is ready to run.

    Attributes:
        runner: runs it.
        num_bytes: memory that all graphs together take.
        findings: for people.
        degradations: modes that could not be captured.
    """

    runner: StepRunner
    num_bytes: int
    findings: tuple[str, ...]
    degradations: tuple[Degradation, ...]


def plain_decoder(model: CausalLM, kv_cache: KvCache) -> RunDecoder:
    """Returns the decoder as the model's modules compute it, one op after the other."""

    def run(*tensors: Tensor) -> Sequence[Tensor]:
        inputs = StepInputs(*tensors)
        return (model(inputs.token_ids, inputs.positions, inputs.attention, kv_cache.layers),)

    return run


def graphs_of_device(
    settings: GraphSettings, device: torch.device, kernels: CpuKernels
) -> tuple[GraphSettings, tuple[Degradation, ...]]:
    """Takes away what this device can't capture.

    A CPU captures its own kernels: without them there is nothing to record.
    """
    if settings.mode is CaptureMode.NONE or device.type != "cpu" or kernels.library is not None:
        return settings, ()
    message = f"graphs are lists of C++ kernels, and there are none ({kernels.missing}): steps run without graphs"
    return replace(settings, mode=CaptureMode.NONE, decode_sizes=None, mixed_sizes=None), (
        Degradation(reason="no_graphs", message=message),
    )


def capture_decoder(
    settings: GraphSettings,
    *,
    asked: GraphSettings,
    lacks_kernels: bool,
    model: CausalLM,
    kv_cache: KvCache,
    buffers: StepBuffers,
    compiled: CompiledDecoder | None,
    device: torch.device,
    kernels: CpuKernels,
    progress: Progress,
) -> Captured:
    """Captures every size of every mode.

    Args:
        settings: what is captured.
        asked: what was to be captured, had everything been there.
        lacks_kernels: nothing is, because there are no kernels to make graphs of.
        model: with its weights.
        kv_cache: whose addresses go into the graphs.
        buffers: whose addresses go into the graphs.
        compiled: the decoder in pieces; None: it is not compiled.
        device: where all of them are.
        kernels: of the CPU.
        progress: receives one unit for each size.

    Raises:
        SettingsError: graphs don't fit into the memory that is left.
    """
    plain = plain_decoder(model, kv_cache)
    why_none = Reason.DISABLED
    if asked.mode is not CaptureMode.NONE:
        why_none = Reason.NO_KERNELS if lacks_kernels else Reason.NOT_COMPILED
    dispatcher = Dispatcher(settings, why_none=why_none)
    backend = _backend(device, kernels)
    obstacle = full_obstacle(model, device)
    graphs = None if backend is None else GraphSet(backend=backend, programs=_programs(settings, plain, compiled, device, obstacle))
    runner = StepRunner(
        buffers=buffers,
        block_size=kv_cache.geometry.block_size,
        dispatcher=dispatcher,
        graphs=graphs,
        without_graph=plain if compiled is None else compiled.run,
        plain=plain,
        compiled_modes=_compiled_modes(compiled, device),
    )
    if graphs is None or not dispatcher.keys:
        return Captured(runner=runner, num_bytes=0, findings=(), degradations=())
    with progress.stage("capturing graphs", total=len(dispatcher.keys), unit="graphs") as advance, recorded_forms(model):
        report = _capture(graphs, runner, advance)
    findings = [f"{len(report.captured)} graphs were captured in {report.seconds:.1f} s"]
    for gap in gaps(settings):
        _logger.log(logging.WARNING if gap.is_chosen else logging.INFO, "%s", gap)
        findings.append(str(gap))
    failures = tuple(Degradation(reason="capture_failed", message=str(failure)) for failure in report.failures)
    return Captured(runner=runner, num_bytes=report.num_bytes, findings=tuple(findings), degradations=failures)


def _capture(graphs: GraphSet, runner: StepRunner, advance: Callable[[int], None]) -> CaptureReport:
    try:
        return graphs.capture(runner.dispatcher, inputs_for=runner.stage_blank, progress=lambda _key: advance(1))
    except GraphMemoryError as error:
        raise SettingsError(
            f"{error}: lower --kv-cache-memory (or --kv-cache-fraction), --max-sequences, or the sizes in --decode-graph-sizes and "
            "--mixed-graph-sizes"
        ) from error


def _backend(device: torch.device, kernels: CpuKernels) -> GraphBackend | None:
    if device.type == "cuda":
        return CudaGraphBackend(device)
    return CpuGraphBackend(Recorder(kernels.library)) if kernels.library is not None else None


def _programs(
    settings: GraphSettings, plain: RunDecoder, compiled: CompiledDecoder | None, device: torch.device, obstacle: str
) -> dict[RuntimeMode, Program]:
    modes = {settings.mode.decode_mode, settings.mode.mixed_mode}
    programs: dict[RuntimeMode, Program] = {}
    if RuntimeMode.FULL in modes:
        # Generated code can't be recorded on a CPU, whose kernels are.
        run = plain if compiled is None or device.type == "cpu" else compiled.run
        programs[RuntimeMode.FULL] = Uncapturable(run, obstacle) if obstacle else FullGraphs(run)
    if RuntimeMode.PIECEWISE in modes and compiled is not None:
        obstacle = piecewise_obstacle(compiled)
        programs[RuntimeMode.PIECEWISE] = (
            Uncapturable(compiled.run, obstacle) if obstacle else _piecewise(compiled, records=device.type == "cpu")
        )
    return programs


def _piecewise(compiled: CompiledDecoder, *, records: bool) -> PiecewiseGraphs:
    stages = [
        Stage(name=stage.name, run=stage.run, arguments=stage.inputs, results=stage.outputs, is_piece=stage.is_piece)
        for stage in (compiled.plain_stages if records else compiled.stages)
    ]
    return PiecewiseGraphs(stages, num_inputs=len(StepInputs._fields), bound=compiled.bound, outputs=compiled.outputs)


def _compiled_modes(compiled: CompiledDecoder | None, device: torch.device) -> frozenset[RuntimeMode]:
    if compiled is None or not compiled.has_generated_code:
        return frozenset()
    return frozenset({RuntimeMode.NONE} if device.type == "cpu" else RuntimeMode)
