"""Measures steps: each way to run them side by side, against what the machine can do at most."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from modelworker.graphs.dispatch import Choice, Reason
from modelworker.graphs.settings import RuntimeMode
from modelworker.worker.batch import StepBatch
from modelworker.worker.check_batch import CheckRow, make_check_batch
from modelworker.worker.description import WorkerDescription
from modelworker.worker.engine import Engine
from modelworker.worker.machine_limits import LimitProbe, MachineLimits
from modelworker.worker.step_runner import PLAIN_WAY, Way
from modelworker.worker.terminal import format_table

_WARM_UP_STEPS = 2
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCase:
    """A step to measure: equal sequences, and a prompt's chunk beside them.

    Attributes:
        num_sequences: of the step, without the chunk.
        query_len: new tokens of each.
        context_len: tokens of each in the cache before.
        chunk: new tokens of one sequence more, which has none in the cache; 0: there is none.
    """

    num_sequences: int
    query_len: int
    context_len: int
    chunk: int = 0

    def __str__(self) -> str:
        if self.context_len == 0:
            return f"prefill {self.num_sequences * self.query_len}"
        beside = f"prefill {self.chunk} + " if self.chunk else ""
        return f"{beside}decode {self.num_sequences} x {self.query_len}, context {self.context_len}"

    @property
    def rows(self) -> list[tuple[int, int]]:
        """Query length and context length of each row."""
        chunk = [(self.chunk, 0)] if self.chunk else []
        return [(self.query_len, self.context_len)] * self.num_sequences + chunk


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Times of one case run in one way, in milliseconds.

    Attributes:
        case: what was run.
        way: "eager", "compiled", "PIECEWISE" or "FULL".
        step_ms: of the whole step in the engine, median.
        min_ms: likewise, the shortest.
        max_ms: likewise, the longest.
        kernel_ms: of decoder and head, median; on a GPU, what the step takes after all is launched.
        host_ms: of all the rest, median; on a GPU, until all is launched.
        floor_ms: what the machine can't beat.
    """

    case: str
    way: str
    step_ms: float
    min_ms: float
    max_ms: float
    kernel_ms: float
    host_ms: float
    floor_ms: float

    @property
    def times_floor(self) -> float:
        """The step's time in units of the floor."""
        return self.step_ms / self.floor_ms


def run_cases(
    engine: Engine, cases: Sequence[StepCase], probe: LimitProbe, *, rounds: int, advance: Callable[[int], None] = lambda _: None
) -> Iterator[StepTimes]:
    """Measures every case in every way that there is: rounds in which all ways take turns, with a measurement of the limits each.

    Yields:
        the results, case by case.
    """
    for case in cases:
        batch = make_batch(case, engine.description)
        ways = dict(ways_to_run(engine, batch))
        for way, _ in itertools.product(ways.values(), range(_WARM_UP_STEPS)):
            engine.step_as(batch, way)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        floors = []
        for _ in range(rounds):
            floors.append(_floor_ms(case, engine, probe.measure()))
            for name, way in ways.items():
                times[name].append(_time(engine, batch, way))
            advance(1)
        for name, measured in times.items():
            yield _result(str(case), name, measured, statistics.median(floors))


def format_times(results: Sequence[StepTimes]) -> str:
    """Lays results out for people."""
    rows = [
        (
            result.case,
            result.way,
            f"{result.step_ms:.2f}",
            f"{result.min_ms:.2f} .. {result.max_ms:.2f}",
            f"{result.kernel_ms:.2f}",
            f"{result.host_ms:.3f}",
            f"{result.floor_ms:.2f}",
            f"{result.times_floor:.2f}",
        )
        for result in results
    ]
    return format_table(rows, header=("step", "way", "ms", "min .. max", "kernels", "host", "floor", "x floor"))


def as_record(result: StepTimes) -> dict[str, object]:
    """Returns a result for programs."""
    return {**{name: _rounded(value) for name, value in asdict(result).items()}, "times_floor": _rounded(result.times_floor)}


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def ways_to_run(engine: Engine, batch: StepBatch) -> Iterator[tuple[str, Way]]:
    """Yields the ways that there are to run a step, by name."""
    yield "eager", PLAIN_WAY
    runner = engine.runner
    # What was taken out of service would run plain modules under another name.
    if RuntimeMode.NONE in runner.compiled_modes:
        yield "compiled", Way(Choice(None, Reason.NONE))
    for mode in (RuntimeMode.PIECEWISE, RuntimeMode.FULL):
        choice = runner.choose_mode(batch, mode)
        if choice is not None:
            yield mode.name, Way(choice)


def _time(engine: Engine, batch: StepBatch, way: Way) -> tuple[float, float]:
    """Returns the milliseconds of a step, and those of them in decoder and head."""
    begun = time.perf_counter_ns()
    result = engine.step_as(batch, way)
    step_ns, timings = time.perf_counter_ns() - begun, result.timings
    if engine.description.execution.device.startswith("cuda"):
        # The host launches everything, and waits for tokens only then.
        return step_ns / 1e6, (step_ns - timings.prepare_ns - timings.forward_ns) / 1e6
    return step_ns / 1e6, timings.forward_ns / 1e6


def _result(case: str, way: str, measured: list[tuple[float, float]], floor_ms: float) -> StepTimes:
    steps = [step for step, _ in measured]
    return StepTimes(
        case=case,
        way=way,
        step_ms=statistics.median(steps),
        min_ms=min(steps),
        max_ms=max(steps),
        kernel_ms=statistics.median(kernels for _, kernels in measured),
        host_ms=statistics.median(step - kernels for step, kernels in measured),
        floor_ms=floor_ms,
    )


def make_batch(case: StepCase, description: WorkerDescription) -> StepBatch:
    """Makes a greedy step of random tokens. Where blocks are few, sequences share those that they only read."""
    block_size = description.kv_cache.block_size
    num_written = sum(_num_written_blocks(query_len, context_len, block_size) for query_len, context_len in case.rows)
    random = np.random.default_rng(0)
    free = iter(range(1, num_written + 1))
    shared = itertools.cycle(range(num_written + 1, description.kv_cache.num_blocks))
    rows = []
    for query_len, context_len in case.rows:
        read = list(itertools.islice(shared, context_len // block_size))
        written = list(itertools.islice(free, _num_written_blocks(query_len, context_len, block_size)))
        tokens = random.integers(0, description.model.vocab_size, query_len).astype(np.int32)
        # A decode of several tokens is one of drafts.
        draft_len = query_len - 1 if context_len else 0
        blocks = np.array(read + written, np.int32)
        rows.append(CheckRow(token_ids=tokens, context_len=context_len, blocks=blocks, draft_len=draft_len))
    return make_check_batch(rows)


def obstacle(case: StepCase, description: WorkerDescription) -> str:
    """Says why a worker can't run a case; "" if it can."""
    block_size, limits = description.kv_cache.block_size, description.limits
    num_tokens = sum(query_len for query_len, _ in case.rows)
    longest = max(query_len + context_len for query_len, context_len in case.rows)
    # At least one block is left to read.
    needed = 1 + sum(_num_written_blocks(query_len, context_len, block_size) for query_len, context_len in case.rows)
    for found, most, what in (
        (len(case.rows), limits.max_sequences, "sequences"),
        (num_tokens, limits.max_tokens_per_step, "tokens in a step"),
        (longest, description.model.max_model_len, "tokens of a sequence"),
        (needed, description.kv_cache.num_blocks - 1, "KV cache blocks"),
    ):
        if found > most:
            return f"it needs {found} {what}, the worker has {most}"
    return ""


def _num_written_blocks(query_len: int, context_len: int, block_size: int) -> int:
    return -(-(context_len + query_len) // block_size) - context_len // block_size


def _floor_ms(case: StepCase, engine: Engine, limits: MachineLimits) -> float:
    """The longer of reading every weight and every cached key and value once, and computing every product."""
    model = engine.description.model
    weights = list(engine.model.weights_read())
    weight_bytes, num_weights = sum(weight.nbytes for weight in weights), sum(weight.numel() for weight in weights)
    cached = sum(query_len + context_len for query_len, context_len in case.rows)
    kv_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * _BYTES[model.dtype] * cached
    num_tokens = sum(query_len for query_len, _ in case.rows)
    # Only the last token of a sequence goes through the head.
    head = model.vocab_size * model.hidden_size
    products = (num_weights - head) * num_tokens + head * len(case.rows)
    # Queries and keys, and weights and values, of every token that a query sees.
    seen = sum(query_len * (context_len + (query_len + 1) / 2) for query_len, context_len in case.rows)
    attention = 2 * model.num_layers * model.num_heads * model.head_dim * seen
    seconds = max(
        (weight_bytes + kv_bytes) / limits.read_bytes_per_second, 2 * (products + attention) / limits.operations_per_second
    )
    return 1000 * seconds
