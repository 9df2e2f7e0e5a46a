"""The engine: executes one step at a time. Everything here runs on the engine thread."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from modelworker.worker.batch import Int32Array, SequenceErrorCode, SequenceFailure, StepBatch, StepResult, StepTimings
from modelworker.worker.description import WorkerDescription
from modelworker.worker.errors import FatalEngineError
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.sampling import Sampler
from modelworker.worker.step_runner import StepRunner, Way


class Engine:
    """A loaded model with its KV cache, ready to execute steps."""

    def __init__(
        self,
        *,
        model: CausalLM,
        kv_cache: KvCache,
        runner: StepRunner,
        description: WorkerDescription,
        device: torch.device,
    ) -> None:
        self.description = description
        self.model = model
        self.kv_cache = kv_cache
        self.runner = runner
        self.sampler = Sampler(model)
        self._device = device

    def step(self, batch: StepBatch) -> StepResult:
        """Hot path: executes a step and returns its samples. Writes the KV cache in the slots of its tokens, nowhere else.

        Raises:
            FatalEngineError: the device reports a fault, after which its context can't be used any more.
        """
        return self.step_as(batch, Way(self.runner.choose(batch)))

    def step_as(self, batch: StepBatch, way: Way) -> StepResult:
        """Hot path: executes a step in a given way, for checks and measurements; see `step`."""
        try:
            return self._execute(batch, way)
        except torch.AcceleratorError as error:
            raise FatalEngineError(f"{self._device}: {error}") from error

    def _execute(self, batch: StepBatch, way: Way) -> StepResult:
        with torch.inference_mode():
            begun = time.monotonic_ns()
            plan = self.sampler.plan(batch)
            inputs = self.runner.stage(batch, way.choice.key)
            prepared = time.monotonic_ns()
            hidden, execution = self.runner.decode(batch, inputs, way)
            scores = self.sampler.score(batch, plan, hidden)
            forwarded = time.monotonic_ns()
            samples = self.sampler.finish(batch, plan, hidden, scores)
            sampled = time.monotonic_ns()
        return StepResult(
            sampled_counts=samples.counts,
            sampled_ids=samples.token_ids,
            logprobs=samples.logprobs,
            prompt_logprobs=samples.prompt_logprobs,
            sequence_errors=samples.failures,
            tainted_block_ids=_tainted_blocks(batch, samples.failures, self.description.kv_cache.block_size),
            graph=execution,
            timings=StepTimings(prepare_ns=prepared - begun, forward_ns=forwarded - prepared, sample_ns=sampled - forwarded),
        )

    def reset_kv_cache(self) -> None:
        """Fills the KV cache with zeros."""
        self.kv_cache.zero()


def _tainted_blocks(batch: StepBatch, failures: Sequence[SequenceFailure], block_size: int) -> Int32Array:
    """Returns the blocks of failed rows, ascending: those read too, for the fault may have come from there.

    A row that had no token to choose from has no fault in its keys and values.
    """
    used = -(-batch.seq_lens // block_size)
    blocks = [
        batch.block_tables[failure.index, : used[failure.index]]
        for failure in failures
        if failure.code is not SequenceErrorCode.NO_ALLOWED_TOKEN
    ]
    return np.unique(np.concatenate(blocks)) if blocks else np.zeros(0, np.int32)
