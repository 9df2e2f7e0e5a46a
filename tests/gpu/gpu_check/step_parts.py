"""What steps of random models take, in every way to run them, against the limits measured in the same minutes."""

import logging
from collections.abc import Iterator

import torch

from gpu_check.plan import BLOCK_SIZE, ROUNDS, Plan
from gpu_check.row import Row
from modelworker.worker.cpu_kernels import load_cpu_kernels
from modelworker.worker.engine import Engine
from modelworker.worker.machine import read_machine
from modelworker.worker.machine_limits import LimitProbe
from modelworker.worker.models.config import ModelConfig
from modelworker.worker.models.registry import build_model
from modelworker.worker.plan import free_bytes_of, weights_bytes
from modelworker.worker.progress import LogProgress
from modelworker.worker.result import GraphMode
from modelworker.worker.settings import (
    CacheSettings,
    ExecutionSettings,
    KvCacheSettings,
    ModelSettings,
    StepSettings,
    WorkerSettings,
)
from modelworker.worker.step_bench import StepCase, StepTimes, run_cases
from modelworker_testing.bare_engine import build_bare_engine, model_config_of

# What is left free beside weights and cache: for graphs, the largest step, and the buffers of the limits' measurement.
_RESERVED_BYTES = {"cuda": 12 << 30, "cpu": 1 << 30}


def decodes_and_prefills(plan: Plan, name: str) -> Iterator[Row]:
    """Measures decodes and prefills of a model, as shares of what memory and products allow."""
    engine, probe = _engine(plan, name)
    yield from _started(engine, f"decode {name}")
    for case in plan.decodes:
        results = _measured(engine, probe, case, ROUNDS)
        yield from (_step_row(f"decode {name}", result) for way, result in results.items() if way in ("PIECEWISE", "FULL"))
        yield from _missing(engine, f"decode {name}", case, {"PIECEWISE", "FULL"} - set(results))
    for case in plan.prefills:
        yield from (_step_row(f"prefill {name}", result) for result in _measured(engine, probe, case, ROUNDS).values())


def host_times(plan: Plan, name: str) -> Iterator[Row]:
    """Measures how long the host is busy with a decode of one sequence."""
    engine, probe = _engine(plan, name)
    part = f"host {name}"
    yield from _started(engine, part)
    case = StepCase(num_sequences=1, query_len=1, context_len=plan.contexts[0])
    results = _measured(engine, probe, case, 4 * ROUNDS)
    for way, result in results.items():
        note = f"{_what_host_time_is(engine)}, of {result.step_ms:.3g} ms"
        yield Row(part=part, what=result.case, way=way, value=1000 * result.host_ms, unit="us", note=note)
    yield from _missing(engine, part, case, {"compiled", "PIECEWISE", "FULL"} - set(results))


def _measured(engine: Engine, probe: LimitProbe, case: StepCase, rounds: int) -> dict[str, StepTimes]:
    return {result.way: result for result in run_cases(engine, [case], probe, rounds=rounds)}


def _step_row(part: str, result: StepTimes) -> Row:
    spread = f"{result.min_ms:.3g} .. {result.max_ms:.3g} ms, floor {result.floor_ms:.3g} ms"
    return Row(
        part=part, what=result.case, way=result.way, value=result.step_ms, unit="ms", share=1 / result.times_floor, note=spread
    )


def _started(engine: Engine, part: str) -> Iterator[Row]:
    """Yields what starting came to, and what is not as it should be."""
    execution = engine.description.execution
    modes = [one.mode for one in execution.captured]
    counts = " and ".join(f"{modes.count(mode)} {mode.name}" for mode in (GraphMode.PIECEWISE, GraphMode.FULL))
    yield Row(part=part, what="start", note=f"captured {counts} graphs; attention is {execution.attention}")
    for degradation in engine.description.degradations:
        yield Row(part=part, what="start", way=degradation.reason, status="degraded", note=degradation.message.partition("\n")[0])


def _missing(engine: Engine, part: str, case: StepCase, ways: set[str]) -> Iterator[Row]:
    """Yields why a step can't be measured in some ways."""
    reasons = {mode.name: f"{reason.value}, see start" for mode, reason in engine.runner.dispatcher.disabled.items()}
    for way in sorted(ways):
        yield Row(part=part, what=str(case), way=way, status="not captured", note=reasons.get(way, "no graph fits this step"))


def _what_host_time_is(engine: Engine) -> str:
    execution = engine.description.execution
    if not execution.device.startswith("cuda"):
        return "outside decoder and head"
    if execution.attention == "native":
        return "until all is launched, with a wait for the device in every layer"
    return "until all is launched"


def _engine(plan: Plan, name: str) -> tuple[Engine, LimitProbe]:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = model_config_of(plan.model(name))
    settings = WorkerSettings(
        model=ModelSettings(served_model_name=name),
        kv_cache=KvCacheSettings(block_size=BLOCK_SIZE, num_blocks=_num_blocks(plan, config)),
        step=StepSettings(max_sequences=plan.max_sequences, max_tokens_per_step=max(*plan.prompts, *plan.batches)),
        execution=ExecutionSettings(
            optimization_level=2, decode_graph_sizes=plan.batches, mixed_graph_sizes=tuple(sorted({*plan.batches, *plan.prompts}))
        ),
        cache=CacheSettings(cache_dir=str(plan.cache)),
    )
    kernels = load_cpu_kernels(settings, plan.device, LogProgress())
    engine = build_bare_engine(settings, config=config, dtype=torch.bfloat16, device=plan.device, kernels=kernels)
    return engine, LimitProbe(plan.device, torch.bfloat16, kernels.library)


def _num_blocks(plan: Plan, config: ModelConfig) -> int:
    """Returns blocks for the largest decode, or as many as there is room for: sequences share blocks then."""
    per_sequence = -(-plan.max_model_len // BLOCK_SIZE)
    wanted = max(plan.batches) * per_sequence + 1
    block_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * BLOCK_SIZE * torch.bfloat16.itemsize
    weights = weights_bytes(build_model(config, dtype=torch.bfloat16))
    room = free_bytes_of(plan.device, read_machine()) - weights - _RESERVED_BYTES[plan.device.type]
    return max(min(wanted, room // block_bytes), per_sequence + 1)
