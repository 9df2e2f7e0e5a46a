"""Samples a step: before it, what has to be known of its tokens; after it, from hidden states to what the answer says."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from modelworker.worker.batch import (
    BoolArray,
    IndexArray,
    Int32Array,
    PromptLogprobs,
    SampledLogprobs,
    SamplingBatch,
    SequenceErrorCode,
    SequenceFailure,
    StepBatch,
    UInt64Array,
)
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.sampling.choice import Samples, choose, greedy_samples
from modelworker.worker.sampling.history import TokensBefore, TokenStreams, complete_history
from modelworker.worker.sampling.positions import SampledPositions, sampled_positions
from modelworker.worker.sampling.prompt_logprobs import score_prompts
from modelworker.worker.sampling.tensors import to_device
from modelworker.worker.sampling.verification import verify

ROWS_AT_ONCE = 256
"""Of so many positions logits are computed and sampled from at once: that bounds the memory of steps with many drafts."""
_NO_ROWS: IndexArray = np.zeros(0, np.intp)


class SamplingPlan(NamedTuple):
    """What is known of a step's sampling before it runs.

    Attributes:
        positions: where it samples.
        streams: tokens of rows with penalties; None: there are none.
        failed_sources: rows whose first token is a placeholder, because it was never sampled.
    """

    positions: SampledPositions
    streams: TokenStreams | None
    failed_sources: IndexArray


class GreedyScores(NamedTuple):
    """What the head makes of sampled positions whose rows are plainly greedy.

    Attributes:
        token_ids: [n], int64, of the largest logits.
        finite: [n], bool, whether all logits of a position are finite.
    """

    token_ids: Tensor
    finite: Tensor


class LogitScores(NamedTuple):
    """What the head makes of sampled positions, and how they are sampled.

    Attributes:
        states: [n, hidden_size], of which logits are made in parts.
        first_logits: [the first ROWS_AT_ONCE or n, vocab_size], fp32.
        sampling: of the step.
    """

    states: Tensor
    first_logits: Tensor
    sampling: SamplingBatch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampledStep:
    """What a step has sampled.

    Attributes:
        counts: [num_sequences], tokens of each row; 0 where it failed or does not sample.
        token_ids: [sum of counts].
        logprobs: None when no row asked for them.
        prompt_logprobs: None when no row asked for them.
        failures: rows that failed, ascending.
    """

    counts: Int32Array
    token_ids: Int32Array
    logprobs: SampledLogprobs | None
    prompt_logprobs: PromptLogprobs | None
    failures: tuple[SequenceFailure, ...]


class Sampler:
    """Samples steps. Everything here runs on the engine thread.

    Args:
        model: whose head makes logits.
        tokens_before: what the worker has kept of sequences, for the history of penalties.
    """

    def __init__(self, model: CausalLM, tokens_before: TokensBefore) -> None:
        self._model = model
        self._tokens_before = tokens_before
        # Seeds of the rows whose seed the router leaves open.
        self._open_seeds = np.random.default_rng()

    def seed_open_rows(self, number: int) -> None:
        """Makes the seeds of rows without one, of the steps that follow, a function of a number (of 64 bits)."""
        self._open_seeds = np.random.default_rng(number)

    def plan(self, batch: StepBatch, failed_sources: IndexArray = _NO_ROWS) -> SamplingPlan:
        """Hot path: looks at a step before it is executed.

        Args:
            batch: the step.
            failed_sources: rows whose first token is a placeholder, because it was never sampled. They fail.

        Raises:
            PreconditionError: tokens before a sampled position are not known; see `complete_history`.
        """
        return SamplingPlan(sampled_positions(batch), complete_history(batch, self._tokens_before, failed_sources), failed_sources)

    def score(self, batch: StepBatch, plan: SamplingPlan, hidden: Tensor) -> GreedyScores | LogitScores:
        """Hot path: applies the head at the sampled positions to hidden [num_tokens, hidden_size].

        At those behind the first ROWS_AT_ONCE of a step that is not plainly greedy, `finish` does.
        """
        positions = plan.positions
        # The usual decode: every token is a sampled position.
        states = hidden if len(positions) == batch.num_tokens else hidden[to_device(positions.tokens, hidden.device)]
        if batch.sampling is not None:
            return LogitScores(states, self._model.compute_logits(states[:ROWS_AT_ONCE]), batch.sampling)
        if len(states) <= ROWS_AT_ONCE:
            token_ids, _, finite = self._model.greedy(states)
            return GreedyScores(token_ids, finite)
        parts = [self._model.greedy(part) for part in states.split(ROWS_AT_ONCE)]
        return GreedyScores(torch.cat([token_ids for token_ids, _, _ in parts]), torch.cat([finite for _, _, finite in parts]))

    def finish(self, batch: StepBatch, plan: SamplingPlan, hidden: Tensor, scores: GreedyScores | LogitScores) -> SampledStep:
        """Hot path: samples, verifies drafts, and finds rows that failed.

        Args:
            batch: the step.
            plan: what `plan` returned for it.
            hidden: [num_tokens, hidden_size].
            scores: what `score` returned for it.
        """
        positions = plan.positions
        samples = greedy_samples(*scores) if isinstance(scores, GreedyScores) else self._choose(plan, scores)
        if _is_plain(batch, plan, samples):
            return SampledStep(
                counts=np.ones(batch.num_sequences, np.int32),
                token_ids=samples.token_ids,
                logprobs=None,
                prompt_logprobs=None,
                failures=(),
            )
        verdict = verify(batch, positions, samples.token_ids, samples.succeeded)
        prompts = score_prompts(batch, hidden, self._model, part=ROWS_AT_ONCE)
        codes = np.zeros(batch.num_sequences, np.int32)
        codes[positions.rows[verdict.failed]] = SequenceErrorCode.NO_ALLOWED_TOKEN
        # A row of which anything is not finite has no other fault worth telling.
        finite = _finite_rows(batch, positions, hidden)
        finite[positions.rows[verdict.failed]] &= samples.finite[verdict.failed]
        if prompts is not None:
            finite &= prompts.finite
        codes[~finite & batch.sample] = SequenceErrorCode.NON_FINITE_LOGITS
        codes[~finite & ~batch.sample] = SequenceErrorCode.NON_FINITE_HIDDEN_STATE
        codes[plan.failed_sources] = SequenceErrorCode.FEEDBACK_SOURCE_FAILED
        succeeded = codes == 0
        standing = verdict.positions[succeeded[positions.rows[verdict.positions]]]
        return SampledStep(
            counts=np.where(succeeded, verdict.counts, 0),
            token_ids=samples.token_ids[standing],
            logprobs=_logprobs(batch.sampling, samples, standing),
            prompt_logprobs=None if prompts is None else prompts.of_rows(succeeded),
            failures=tuple(_failure(row, SequenceErrorCode(codes[row])) for row in np.flatnonzero(codes).tolist()),
        )

    def _choose(self, plan: SamplingPlan, scores: LogitScores) -> Samples:
        positions, seeds = plan.positions, self._seeds(scores.sampling)
        parts = []
        for start in range(0, max(len(positions), 1), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            logits = self._model.compute_logits(scores.states[part]) if start else scores.first_logits
            parts.append(choose(logits, scores.sampling, positions.part(part), seeds, plan.streams, self._model.sample_tokens))
            del logits  # Before the next ones are made.
        return Samples.joined(parts)

    def _seeds(self, sampling: SamplingBatch) -> UInt64Array:
        """[num_sequences]: the rows' seeds; one is drawn where it is open."""
        open_seeds = self._open_seeds.integers(0, 2**64, size=len(sampling.seed), dtype=np.uint64)
        return np.where(sampling.has_seed, sampling.seed, open_seeds)


def _is_plain(batch: StepBatch, plan: SamplingPlan, samples: Samples) -> bool:
    """Hot path: whether every row has one token, of which one token was sampled, and nothing else is asked for."""
    num_rows = batch.num_sequences
    return (
        len(plan.positions) == batch.num_tokens == num_rows
        and samples.listing is None
        and batch.prompt_logprobs is None
        and not plan.failed_sources.size
        and np.count_nonzero(samples.finite) == np.count_nonzero(samples.allowed) == num_rows
    )


def _finite_rows(batch: StepBatch, positions: SampledPositions, hidden: Tensor) -> BoolArray:
    """[num_sequences]: whether all hidden states of a row are finite: a token's NaN is in its keys and values too.

    What is not finite in the state of a sampled position isn't finite in its logits either; those of drafts are not looked at, for
    what stands behind a rejected one is overwritten before it is read.
    """
    if len(positions) == batch.num_tokens:
        return np.ones(batch.num_sequences, np.bool_)
    finite = torch.isfinite(hidden).all(-1).numpy(force=True)
    finite[positions.tokens[positions.offsets > 0]] = True
    return np.logical_and.reduceat(finite, batch.query_starts[:-1])


def _failure(row: int, code: SequenceErrorCode) -> SequenceFailure:
    messages = {
        SequenceErrorCode.NON_FINITE_LOGITS: "the logits contain NaN or infinity, so no token was sampled",
        SequenceErrorCode.NO_ALLOWED_TOKEN: "allowed ids, banned ids and grammar mask leave no token",
        SequenceErrorCode.FEEDBACK_SOURCE_FAILED: (
            "-1 (feedback) stands for a token that was never sampled, because the row before it failed"
        ),
        SequenceErrorCode.NON_FINITE_HIDDEN_STATE: "the hidden states contain NaN or infinity",
    }
    return SequenceFailure(index=row, code=code, message=f"row {row}: {messages[code]}")


def _logprobs(sampling: SamplingBatch | None, samples: Samples, standing: IndexArray) -> SampledLogprobs | None:
    if sampling is None or samples.listing is None:
        return None
    listing = samples.listing.take(standing)
    told = listing.told
    return SampledLogprobs(
        processed=sampling.processed_logprobs,
        counts=listing.counts,
        token_ids=listing.token_ids[told],
        values=listing.values[told],
        ranks=listing.ranks[told],
    )
