"""The engine of a worker whose steps are recorded."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from modelworker.worker.arrays import UInt64Array
from modelworker.worker.batch import StepBatch
from modelworker.worker.description import Degradation
from modelworker.worker.errors import OverloadedError, PreconditionError
from modelworker.worker.executor import StepEngine
from modelworker.worker.recording.recorder import STEPS_RECORDED, StepRecorder
from modelworker.worker.result import StepResult

_log = logging.getLogger(__name__)


class RepeatableEngine(StepEngine, Protocol):
    """An engine whose steps can be made to repeat themselves: what else decides them is given to it."""

    def seed_open_rows(self, number: int) -> None:
        """Makes the seeds of rows without one, of the steps that follow, a function of a number."""

    def set_time(self, time_ns: int) -> None:
        """Makes a moment of a monotonic clock the present of what follows."""


class RecordingEngine:
    """An engine whose steps are recorded.

    Args:
        engine: executes them.
        recorder: takes them.
        folder: where it writes.
        clock_ns: monotonic.
    """

    def __init__(
        self, engine: RepeatableEngine, recorder: StepRecorder, folder: str, *, clock_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._engine = engine
        self._clock_ns = clock_ns
        self._recorder = recorder
        self._seeds = np.random.default_rng()
        warning = Degradation(
            reason=STEPS_RECORDED, message=f"every executed step is written into {folder}: prompts and tokens are in it"
        )
        described = engine.description
        self.description = replace(described, degradations=(*described.degradations, warning))
        _log.warning("degraded: %s: %s", warning.reason, warning.message)

    def step(self, batch: StepBatch) -> StepResult:
        """Hot path: executes a step and hands it to the recorder."""
        seed, time_ns = int(self._seeds.integers(0, 2**64, dtype=np.uint64)), self._clock_ns()
        self._engine.seed_open_rows(seed)
        self._engine.set_time(time_ns)
        try:
            result = self._engine.step(batch)
        except (PreconditionError, OverloadedError):
            raise  # Nothing was executed.
        except Exception:  # what the executor takes for a fault is recorded as one
            self._recorder.step(batch, None, seed=seed, time_ns=time_ns)
            raise
        self._recorder.step(batch, result, seed=seed, time_ns=time_ns)
        return result

    def release_sequences(self, sequence_ids: UInt64Array) -> int:
        """Forgets the sampled tokens of sequences. Returns how many of them were known."""
        time_ns = self._clock_ns()
        self._engine.set_time(time_ns)
        num_released = self._engine.release_sequences(sequence_ids)
        self._recorder.release(sequence_ids, time_ns=time_ns)
        return num_released

    def reset_kv_cache(self) -> None:
        """Fills the KV cache with zeros; another epoch begins."""
        self._engine.reset_kv_cache()
        self._recorder.new_epoch()
