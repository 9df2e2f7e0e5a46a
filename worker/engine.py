"""The engine: executes one step at a time. Everything here runs on the engine thread."""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from modelworker.worker.batch import (
    BoolArray,
    GraphExecution,
    IndexArray,
    Int32Array,
    SampledLogprobs,
    SamplingBatch,
    SequenceErrorCode,
    SequenceFailure,
    StepBatch,
    StepResult,
    StepTimings,
    UInt64Array,
)
from modelworker.worker.description import WorkerDescription
from modelworker.worker.errors import FatalEngineError
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.sampling import Samples, greedy_samples, sample
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
        self._device = device
        # Seeds of the rows whose seed the router leaves open.
        self._open_seeds = np.random.default_rng()

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
            inputs = self.runner.stage(batch, way.choice.key)
            sampled_rows = np.flatnonzero(batch.sample)
            # The usual decode: a row is a token, and each one samples.
            is_plain_decode = batch.num_tokens == batch.num_sequences == len(sampled_rows)
            prepared = time.monotonic_ns()
            hidden, execution = self.runner.decode(batch, inputs, way)
            last_states = hidden if is_plain_decode else hidden[batch.query_starts[1:][sampled_rows] - 1]
            if batch.sampling is None:
                token_ids, _, finite = self.model.greedy(last_states)
                forwarded = time.monotonic_ns()
                samples = greedy_samples(token_ids, finite)
            else:
                logits = self.model.compute_logits(last_states)
                forwarded = time.monotonic_ns()
                parameters = _parameters_of(batch.sampling, sampled_rows)
                samples = sample(logits, parameters, self._seeds(parameters), batch.seq_lens[sampled_rows])
            # What is not finite in the state that a token was sampled from isn't finite in its logits either.
            hidden_finite = np.ones(len(sampled_rows), np.bool_) if is_plain_decode else self._finite_rows(batch, hidden)
            sampled = time.monotonic_ns()
        result = _assemble(batch, sampled_rows, samples, hidden_finite, execution, self.description.kv_cache.block_size)
        timings = StepTimings(prepare_ns=prepared - begun, forward_ns=forwarded - prepared, sample_ns=sampled - forwarded)
        return dataclasses.replace(result, timings=timings)

    def reset_kv_cache(self) -> None:
        """Fills the KV cache with zeros."""
        self.kv_cache.zero()

    def _seeds(self, parameters: SamplingBatch) -> UInt64Array:
        open_seeds = self._open_seeds.integers(0, 2**64, size=len(parameters.seed), dtype=np.uint64)
        return np.where(parameters.has_seed, parameters.seed, open_seeds)

    def _finite_rows(self, batch: StepBatch, hidden: Tensor) -> BoolArray:
        """Returns whether all hidden states of each row are finite: a token's NaN is in its keys and values too."""
        if batch.num_sequences == 0:
            return np.ones(0, np.bool_)
        finite = torch.isfinite(hidden).all(-1).numpy(force=True)
        return np.logical_and.reduceat(finite, batch.query_starts[:-1])


def _parameters_of(sampling: SamplingBatch, rows: IndexArray) -> SamplingBatch:
    return SamplingBatch(**{field.name: getattr(sampling, field.name)[rows] for field in dataclasses.fields(SamplingBatch)})


def _assemble(
    batch: StepBatch,
    sampled_rows: IndexArray,
    samples: Samples,
    hidden_finite: BoolArray,
    execution: GraphExecution,
    block_size: int,
) -> StepResult:
    """Puts the samples of the sampling rows into the order of all rows, failed rows apart."""
    finite = hidden_finite.copy()
    finite[sampled_rows] &= samples.finite
    failures = tuple(_failure(int(row), bool(batch.sample[row])) for row in np.flatnonzero(~finite))
    succeeded = finite[sampled_rows]
    counts = np.zeros(batch.num_sequences, np.int32)
    counts[sampled_rows] = succeeded
    return StepResult(
        sampled_counts=counts,
        sampled_ids=samples.token_ids[succeeded],
        logprobs=_assemble_logprobs(batch, sampled_rows, samples, succeeded),
        sequence_errors=failures,
        tainted_block_ids=_tainted_blocks(batch, [failure.index for failure in failures], block_size),
        graph=execution,
    )


def _failure(row: int, sampled: bool) -> SequenceFailure:
    if sampled:
        message = f"row {row}: the logits contain NaN or infinity, so no token was sampled"
        return SequenceFailure(index=row, code=SequenceErrorCode.NON_FINITE_LOGITS, message=message)
    message = f"row {row}: the hidden states contain NaN or infinity"
    return SequenceFailure(index=row, code=SequenceErrorCode.NON_FINITE_HIDDEN_STATE, message=message)


def _tainted_blocks(batch: StepBatch, rows: Sequence[int], block_size: int) -> Int32Array:
    """Returns the blocks of failed rows, ascending: those read too, for the fault may have come from there."""
    if not rows:
        return np.zeros(0, np.int32)
    used = -(-batch.seq_lens // block_size)
    return np.unique(np.concatenate([batch.block_tables[row, : used[row]] for row in rows]))


def _assemble_logprobs(
    batch: StepBatch, sampled_rows: IndexArray, samples: Samples, succeeded: BoolArray
) -> SampledLogprobs | None:
    if batch.sampling is None or samples.logprobs is None or samples.ranks is None:
        return None
    wanted = batch.sampling.num_logprobs[sampled_rows] >= 0
    listed = wanted & succeeded
    return SampledLogprobs(
        processed=batch.sampling.processed_logprobs,
        counts=wanted[succeeded].astype(np.int32),
        token_ids=samples.token_ids[listed],
        values=samples.logprobs[listed],
        ranks=samples.ranks[listed],
    )
