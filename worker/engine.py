"""The engine: executes one step at a time. Everything here runs on the engine thread."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from modelworker.worker.batch import (
    BoolArray,
    GraphExecution,
    GraphMode,
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
from modelworker.worker.models.causal_lm import AttentionMetadata, CausalLM
from modelworker.worker.sampling import Samples, greedy_samples, sample


@dataclass(frozen=True, slots=True, eq=False)
class _StagedStep:
    """A step on the device."""

    token_ids: Tensor
    positions: Tensor
    attention: AttentionMetadata


class Engine:
    """A loaded model with its KV cache, ready to execute steps."""

    def __init__(self, *, model: CausalLM, kv_cache: KvCache, description: WorkerDescription, device: torch.device) -> None:
        self.description = description
        self.model = model
        self.kv_cache = kv_cache
        self._device = device
        # Seeds of the rows whose seed the router leaves open.
        self._open_seeds = np.random.default_rng()

    def step(self, batch: StepBatch) -> StepResult:
        """Hot path: executes a step and returns its samples. Writes the KV cache in the slots of its tokens, nowhere else.

        Raises:
            FatalEngineError: the device reports a fault, after which its context can't be used any more.
        """
        try:
            return self._execute(batch)
        except torch.AcceleratorError as error:
            raise FatalEngineError(f"{self._device}: {error}") from error

    def _execute(self, batch: StepBatch) -> StepResult:
        with torch.inference_mode():
            begun = time.monotonic_ns()
            staged = self._stage(batch)
            prepared = time.monotonic_ns()
            hidden = self.model(staged.token_ids, staged.positions, staged.attention, self.kv_cache.layers)
            sampled_rows = np.flatnonzero(batch.sample)
            last_states = hidden[batch.query_starts[1:][sampled_rows] - 1]
            if batch.sampling is None:
                token_ids, _, finite = self.model.greedy(last_states)
                forwarded = time.monotonic_ns()
                samples = greedy_samples(token_ids, finite)
            else:
                logits = self.model.compute_logits(last_states)
                forwarded = time.monotonic_ns()
                parameters = _parameters_of(batch.sampling, sampled_rows)
                samples = sample(logits, parameters, self._seeds(parameters), batch.seq_lens[sampled_rows])
            hidden_finite = self._finite_rows(batch, hidden)
            sampled = time.monotonic_ns()
        result = _assemble(batch, sampled_rows, samples, hidden_finite, self.description.kv_cache.block_size)
        timings = StepTimings(prepare_ns=prepared - begun, forward_ns=forwarded - prepared, sample_ns=sampled - forwarded)
        return dataclasses.replace(result, timings=timings)

    def reset_kv_cache(self) -> None:
        """Fills the KV cache with zeros."""
        self.kv_cache.zero()

    def _stage(self, batch: StepBatch) -> _StagedStep:
        slots = batch.slots(self.description.kv_cache.block_size)

        def to_device(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

        return _StagedStep(
            to_device(batch.token_ids),
            to_device(batch.positions),
            AttentionMetadata(
                query_starts=to_device(batch.query_starts),
                seq_lens=to_device(batch.seq_lens),
                block_tables=to_device(batch.block_tables),
                slots=to_device(slots),
            ),
        )

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
    batch: StepBatch, sampled_rows: IndexArray, samples: Samples, hidden_finite: BoolArray, block_size: int
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
        graph=GraphExecution(
            mode=GraphMode.NONE,
            padded_tokens=batch.num_tokens,
            padded_sequences=batch.num_sequences,
            compiled=False,
            fallback_reason="disabled",
        ),
    )


def _failure(row: int, sampled: bool) -> SequenceFailure:
    if sampled:
        message = f"row {row}: the logits contain NaN or infinity, so no token was sampled"
        return SequenceFailure(index=row, code=SequenceErrorCode.NON_FINITE_LOGITS, message=message)
    message = f"row {row}: the hidden states contain NaN or infinity"
    return SequenceFailure(index=row, code=SequenceErrorCode.NON_FINITE_HIDDEN_STATE, message=message)


def _tainted_blocks(batch: StepBatch, rows: Sequence[int], block_size: int) -> Int32Array:
    """Returns the blocks of failed rows, ascending: those read too, for the fault may have come from there."""
    used = -(-batch.seq_lens // block_size)
    blocks = [batch.block_tables[row, : used[row]] for row in rows]
    return np.unique(np.concatenate(blocks)) if blocks else np.zeros(0, np.int32)


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
