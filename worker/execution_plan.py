"""What is compiled and captured, as the settings ask for it and the machine allows it."""

from dataclasses import dataclass, replace
from typing import Literal

from modelworker.graphs.settings import CaptureMode, GraphSettings, GraphSettingsError, RuntimeMode
from modelworker.worker.compiler_passes import disabled_passes
from modelworker.worker.errors import SettingsError
from modelworker.worker.settings import ExecutionSettings, StepSettings

# At 64 rows the ladder pads 7 at most. With them a decode of SmolLM2-135M takes 5 % longer on 2 cores, and ever less beyond.
_EXACT_UP_TO = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionPlan:
    """How steps are to run.

    Attributes:
        optimization_level: 0 .. 3.
        compiler: who makes the code of a piece; "eager": nobody.
        partition: who divides the model into pieces.
        disabled_passes: graph passes of the compiler that are not run.
        graphs: what is captured.
    """

    optimization_level: int
    compiler: Literal["inductor", "eager"]
    partition: Literal["fx", "inductor"]
    disabled_passes: tuple[str, ...]
    graphs: GraphSettings

    @property
    def compiles(self) -> bool:
        """Whether pieces of the model are compiled."""
        return self.optimization_level > 0

    def without_compiler(self) -> "ExecutionPlan":
        """Returns what is left where the model can't be compiled: plain modules, and FULL graphs where there should be some."""
        mode = self.graphs.mode
        if RuntimeMode.PIECEWISE in (mode.decode_mode, mode.mixed_mode):
            mode = CaptureMode.FULL_DECODE_ONLY if mode.decode_mode is RuntimeMode.FULL else CaptureMode.NONE
        sizes = self.graphs.decode_sizes if mode.decode_mode is RuntimeMode.FULL else None
        mixed_sizes = self.graphs.mixed_sizes if mode.mixed_mode is RuntimeMode.FULL else None
        graphs = replace(self.graphs, mode=mode, decode_sizes=sizes, mixed_sizes=mixed_sizes)
        return replace(self, optimization_level=0, graphs=graphs)


def plan_execution(settings: ExecutionSettings, step: StepSettings) -> ExecutionPlan:
    """Resolves what was left open, and refuses contradictions.

    A level fills only what is unset: level 0 with --graph-mode FULL captures whole steps of plain modules.

    Raises:
        SettingsError: there are some.
    """
    level = settings.optimization_level
    if settings.enforce_eager:
        if settings.graph_mode not in (None, CaptureMode.NONE):
            raise SettingsError(f"--enforce-eager captures nothing, but --graph-mode {settings.graph_mode} asks for graphs")
        level = 0
    _refuse_what_nothing_compiles(settings, level)
    mode = _graph_mode(settings, level)
    try:
        graphs = GraphSettings(
            max_sequences=step.max_sequences,
            max_tokens_per_step=step.max_tokens_per_step,
            mode=mode,
            decode_query_lens=settings.decode_query_lens,
            decode_sizes=settings.decode_graph_sizes,
            mixed_sizes=settings.mixed_graph_sizes,
            exact_up_to=_EXACT_UP_TO if level == 3 else 0,
        )
    except GraphSettingsError as error:
        raise SettingsError(str(error)) from error
    return ExecutionPlan(
        optimization_level=level,
        compiler="eager" if settings.compiler == "eager" else "inductor",
        partition="inductor" if settings.graph_partition == "inductor" else "fx",
        disabled_passes=disabled_passes(settings.compiler_passes),
        graphs=graphs,
    )


def _graph_mode(settings: ExecutionSettings, level: int) -> CaptureMode:
    is_partitioned = settings.graph_partition == "inductor"
    default = CaptureMode.NONE
    if level >= 2:
        default = CaptureMode.FULL_DECODE_ONLY if is_partitioned else CaptureMode.FULL_AND_PIECEWISE
    mode = CaptureMode(settings.graph_mode) if settings.graph_mode is not None else default
    if RuntimeMode.PIECEWISE in (mode.decode_mode, mode.mixed_mode):
        if level == 0:
            raise SettingsError(f"--graph-mode {mode} needs compiled pieces, but optimization level 0 compiles nothing")
        if is_partitioned:
            raise SettingsError(
                f"--graph-mode {mode} captures the pieces between attention, but --graph-partition inductor leaves the division to "
                "the compiler: take FULL_DECODE_ONLY, FULL or NONE"
            )
    return mode


def _refuse_what_nothing_compiles(settings: ExecutionSettings, level: int) -> None:
    given = "--compiler-passes" if settings.compiler_passes else ""
    given = "--graph-partition inductor" if settings.graph_partition == "inductor" else given
    if given and level == 0:
        raise SettingsError(f"{given} is about compiling, but optimization level 0 compiles nothing")
    if given and settings.compiler == "eager":
        raise SettingsError(f"{given} is about compiling, but --compiler eager compiles nothing")
