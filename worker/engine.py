"""The engine: executes one step at a time. Everything here runs on the engine thread."""

import time
from collections.abc import Sequence

import numpy as np
import torch

from modelworker.worker.arrays import Int32Array, UInt64Array
from modelworker.worker.batch import StepBatch
from modelworker.worker.description import WorkerDescription
from modelworker.worker.errors import FatalEngineError
from modelworker.worker.feedback import FeedbackTable, ResolvedStep
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.result import SequenceErrorCode, SequenceFailure, StepResult, StepTimings
from modelworker.worker.sampling import Sampler
from modelworker.worker.step_buffers import NO_SLOT, StepInputs
from modelworker.worker.step_runner import StepRunner, Way


class Engine:
    """A loaded model with its KV cache, ready to execute steps."""

    def __init__(
        self,
        *,
        model: CausalLM,
        kv_cache: KvCache,
        runner: StepRunner,
        feedback: FeedbackTable,
        description: WorkerDescription,
        device: torch.device,
    ) -> None:
        self.description = description
        self.model = model
        self.kv_cache = kv_cache
        self.runner = runner
        self.feedback = feedback
        self.sampler = Sampler(model, feedback.tokens_before)
        self._device = device

    def step(self, batch: StepBatch) -> StepResult:
        """Hot path: executes a step and returns its samples.

        Writes the KV cache in the blocks that the step zeroes or copies to and in the slots of its tokens, nowhere else.

        Raises:
            PreconditionError: FEEDBACK_MISMATCH; nothing was changed.
            OverloadedError: no room for more sequences in the feedback table; nothing was changed.
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
            step = self.feedback.resolve(batch)
            batch = step.batch
            plan = self.sampler.plan(batch, step.failed_sources)
            self.kv_cache.zero_blocks(batch.zero_block_ids)
            self.kv_cache.copy_blocks(batch.copy_source_ids, batch.copy_destination_ids)
            inputs = self.runner.stage(batch, way.choice.key)
            if step.failed_sources.size:
                self._withhold(step, inputs)
            prepared = time.monotonic_ns()
            hidden, execution = self.runner.decode(batch, inputs, way)
            scores = self.sampler.score(batch, plan, hidden)
            forwarded = time.monotonic_ns()
            samples = self.sampler.finish(batch, plan, hidden, scores)
            sampled = time.monotonic_ns()
        result = StepResult(
            sampled_counts=samples.counts,
            sampled_ids=samples.token_ids,
            logprobs=samples.logprobs,
            prompt_logprobs=samples.prompt_logprobs,
            sequence_errors=samples.failures,
            tainted_block_ids=_tainted_blocks(batch, samples.failures, self.description.kv_cache.block_size),
            graph=execution,
            timings=StepTimings(prepare_ns=prepared - begun, forward_ns=forwarded - prepared, sample_ns=sampled - forwarded),
        )
        self.feedback.record(step, result)
        return result

    def reset_kv_cache(self) -> None:
        """Fills the KV cache with zeros, and forgets the sampled tokens of all sequences."""
        self.kv_cache.zero()
        self.feedback.clear()

    def release_sequences(self, sequence_ids: UInt64Array) -> int:
        """Forgets the sampled tokens of sequences. Returns how many of them were known."""
        return self.feedback.release(sequence_ids)

    def seed_open_rows(self, number: int) -> None:
        """Makes the seeds of rows without one, of the steps that follow, a function of a number (of 64 bits)."""
        self.sampler.seed_open_rows(number)

    def set_time(self, time_ns: int) -> None:
        """Makes a moment of a monotonic clock the present of what follows: it decides which sampled tokens are idle."""
        self.feedback.set_time(time_ns / 1e9)

    def _withhold(self, step: ResolvedStep, inputs: StepInputs) -> None:
        """Keeps rows whose token is a placeholder from writing keys and values.

        Their slots hold NaN instead, so that a row which reads them fails too, in this step and in later ones.
        """
        tokens = np.flatnonzero(np.isin(step.batch.rows, step.failed_sources))
        self.kv_cache.spoil_slots(step.batch.slots(self.description.kv_cache.block_size)[tokens])
        inputs.slots[torch.from_numpy(tokens).to(inputs.slots.device)] = NO_SLOT


def _tainted_blocks(batch: StepBatch, failures: Sequence[SequenceFailure], block_size: int) -> Int32Array:
    """Returns the blocks of failed rows, ascending: those read too, for the fault may have come from there.

    A row that had no token to choose from has no fault in its keys and values, and one whose token was never sampled only in those
    that it should have written.
    """
    blocks = []
    for failure in failures:
        row = failure.index
        if failure.code is SequenceErrorCode.NO_ALLOWED_TOKEN:
            continue
        is_placeholder = failure.code is SequenceErrorCode.FEEDBACK_SOURCE_FAILED
        first = batch.context_lens[row] // block_size if is_placeholder else 0
        blocks.append(batch.block_tables[row, first : -(-batch.seq_lens[row] // block_size)])
    return np.unique(np.concatenate(blocks)) if blocks else np.zeros(0, np.int32)
