"""Engines in the test's own process."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from modelworker.worker.client.step import build_step
from modelworker.worker.counters import Counters
from modelworker.worker.engine import Engine
from modelworker.worker.progress import LogProgress
from modelworker.worker.result import StepResult
from modelworker.worker.settings import (
    CacheSettings,
    DeviceSettings,
    ExecutionSettings,
    KvCacheSettings,
    ModelSettings,
    StepSettings,
    WorkerSettings,
)
from modelworker.worker.startup import build_engine
from modelworker.worker.wire import parse_step
from modelworker_testing.kernels import CACHE_FOLDER


def tiny_settings(model: Path) -> WorkerSettings:
    """The sizes of the tiny model of the tests: block size 4, 32 blocks. Nothing is compiled, for that takes seconds."""
    return WorkerSettings(
        model=ModelSettings(model=str(model)),
        kv_cache=KvCacheSettings(block_size=4, num_blocks=32),
        step=StepSettings(max_sequences=8, max_tokens_per_step=64),
        device=DeviceSettings(device="cpu", threads=1),
        cache=CacheSettings(cache_dir=str(CACHE_FOLDER)),
        execution=ExecutionSettings(optimization_level=0, graph_mode="FULL_DECODE_ONLY"),
    )


def tiny_settings_with(**sections: Any) -> Callable[[Path], WorkerSettings]:
    """Makes settings like `tiny_settings` in which whole sections are others: `execution=ExecutionSettings(...)`."""
    return lambda model: replace(tiny_settings(model), **sections)


@contextlib.contextmanager
def engine_of(
    model: Path, settings: Callable[[Path], WorkerSettings] = tiny_settings, counters: Counters | None = None
) -> Iterator[Engine]:
    """Builds an engine, and leaves torch and the garbage collector as they were."""
    num_threads = torch.get_num_threads()
    try:
        yield build_engine(settings(model), LogProgress(), counters or Counters())
    finally:
        torch.set_num_threads(num_threads)
        gc.unfreeze()


def execute(engine: Engine, *, tables: list[list[int]], **fields: Any) -> StepResult:
    """Runs one step as the server would: built as a request, checked, executed."""
    request = build_step(
        block_counts=[len(table) for table in tables], block_ids=[block for table in tables for block in table], **fields
    )
    return engine.step(parse_step(request, engine.description, arrival_ns=time.monotonic_ns(), deadline_ns=None))
