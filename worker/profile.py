"""Where the time of a step goes: op by op, in any way to run it.

What torch dispatches, torch's profiler sees; kernels on a GPU as well, those of graphs included. A recorded list of the CPU is one
call, in which it sees nothing: while steps are measured, lists are replayed kernel by kernel, and the time of each op is put into
the trace. Measuring takes time of its own; the undisturbed step stands beside it in the profile.
"""

import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.profiler import ProfilerActivity, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from modelworker.graphs.cpu_backend import CpuReplay
from modelworker.ops.cpu.kernel_list import TimedRun
from modelworker.ops.cpu.recorder import RecordedStep
from modelworker.worker.batch import StepBatch
from modelworker.worker.engine import Engine
from modelworker.worker.machine_limits import MachineLimits
from modelworker.worker.profile_table import HOST, HOST_AND_GENERATED, OpTime, Weight, WeightUse, op_times
from modelworker.worker.result import GraphExecution
from modelworker.worker.step_runner import PLAIN_WAY, Way
from modelworker.worker.trace_events import REPLAY, STEP, Event, annotations, complete_events, recorded_event

_WARM_UP_STEPS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """Where the time of a step went.

    Attributes:
        execution: how it ran.
        step_ms: undisturbed, median.
        prepare_ms: of it, until inputs are staged.
        forward_ms: of it, decoder and head; on a GPU, until all is launched.
        sample_ms: of it, until tokens are on the host.
        measured_ms: while it was measured, mean.
        ops: all of `measured_ms`, longest first.
        trace: of the measured steps, in Chrome's format.
    """

    execution: GraphExecution
    step_ms: float
    prepare_ms: float
    forward_ms: float
    sample_ms: float
    measured_ms: float
    ops: Sequence[OpTime]
    trace: Mapping[str, Any]


class _TimedReplay(NamedTuple):
    begin_ns: int
    run: Sequence[TimedRun]


def profile_step(engine: Engine, batch: StepBatch, way: Way, limits: MachineLimits, *, num_steps: int) -> StepProfile:
    """Runs a step again and again, first undisturbed, then measured.

    Args:
        engine: its KV cache holds garbage afterwards.
        batch: the step.
        way: how it is run.
        limits: of the machine.
        num_steps: how often, each.
    """
    weights = _find_weights(engine, batch)
    for _ in range(_WARM_UP_STEPS):
        result = engine.step_as(batch, way)
    times, timings = [], []
    for _ in range(num_steps):
        begun = time.perf_counter()
        timings.append(engine.step_as(batch, way).timings)
        times.append(time.perf_counter() - begun)
    trace = _trace_steps(engine, batch, way, num_steps)
    events = list(complete_events(trace))
    measured_ms = (
        sum(event["dur"] for event in events if event["name"] == STEP and event["cat"] == "user_annotation") / 1e3 / num_steps
    )
    return StepProfile(
        execution=result.graph,
        step_ms=1e3 * statistics.median(times),
        prepare_ms=statistics.median(each.prepare_ns for each in timings) / 1e6,
        forward_ms=statistics.median(each.forward_ns for each in timings) / 1e6,
        sample_ms=statistics.median(each.sample_ns for each in timings) / 1e6,
        measured_ms=measured_ms,
        ops=op_times(events, weights, limits, num_steps, measured_ms, host=HOST_AND_GENERATED if result.graph.compiled else HOST),
        trace=trace,
    )


def _trace_steps(engine: Engine, batch: StepBatch, way: Way, num_steps: int) -> Mapping[str, Any]:
    is_cuda = engine.description.execution.device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    replays: list[_TimedReplay] = []
    with ExitStack() as measuring:
        if way.choice.key is not None and engine.runner.graphs is not None:
            for replay in engine.runner.graphs.replays(way.choice.key):
                if isinstance(replay, CpuReplay) and isinstance(replay.recorded, RecordedStep):
                    measuring.enter_context(replay.replaced(partial(_replay_timed, replay.recorded, replays)))
        engine.step_as(batch, way)
        replays.clear()
        with torch.profiler.profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
            for _ in range(num_steps):
                with record_function(STEP):
                    engine.step_as(batch, way)
    trace = _exported(profiler)
    trace["traceEvents"] += _recorded_events(trace, replays)
    return trace


def _replay_timed(recorded: RecordedStep[Any], replays: list[_TimedReplay]) -> None:
    with record_function(REPLAY):
        begin_ns = time.monotonic_ns()
        replays.append(_TimedReplay(begin_ns, recorded.replay_timed()))


def _exported(profiler: torch.profiler.profile) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_bytes())
        return trace


def _recorded_events(trace: Mapping[str, Any], replays: Sequence[_TimedReplay]) -> list[Event]:
    return [
        recorded_event(
            event, timed.call.name, timed.call.shapes, (timed.begin_ns - begin_ns) / 1e3, (timed.end_ns - begin_ns) / 1e3
        )
        for event, (begin_ns, run) in zip(annotations(complete_events(trace), REPLAY), replays, strict=True)
        for part in run
        for timed in part.timed_calls()
    ]


# -- weights --


def _find_weights(engine: Engine, batch: StepBatch) -> dict[WeightUse, Weight]:
    """Finds, by a plain step, which arguments of which ops are weights that they read as a whole."""
    names = {parameter.data_ptr(): name for name, parameter in engine.model.named_parameters()}
    noting = _NotingWeights({weight.data_ptr(): weight for weight in engine.model.weights_read() if weight.dim() > 1})
    with noting:
        engine.step_as(batch, PLAIN_WAY)
    return {
        use: Weight(
            names=tuple(sorted({_without_number(names[weight.data_ptr()]) for weight in found})),
            num_bytes=found[0].nbytes,
            numel=found[0].numel(),
        )
        for use, found in noting.found.items()
    }


class _NotingWeights(TorchDispatchMode):
    """Notes which ops get which weights."""

    def __init__(self, weights: Mapping[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[WeightUse, list[Tensor]] = defaultdict(list)
        self._weights = weights

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A look-up reads a row of them, and a view nothing.
        if "embedding" not in func._schema.name and not func.is_view:
            for position, arg in enumerate(args):
                if isinstance(arg, Tensor) and (weight := self._weights.get(arg.data_ptr())) is not None:
                    self.found[WeightUse(func._schema.name, position, tuple(arg.shape))].append(weight)
        return func(*args, **(kwargs or {}))


def _without_number(name: str) -> str:
    """Makes one short name of those of all layers."""
    return ".".join("*" if part.isdecimal() else part for part in name.removeprefix("model.").removesuffix(".weight").split("."))
