"""A step as a router sees it: numpy arrays to `ExecuteStepRequest`, and `ExecuteStepResponse` back to numpy arrays."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.batch import Float32Array, GraphMode, Int32Array, SequenceErrorCode, StepTimings
from modelworker.worker.client.packing import BoolsLike, FloatsLike, IntegersLike, Values, packed
from modelworker.worker.client.step_tokens import StepTokens, add_tokens

FEEDBACK_TOKEN = -1
"""A row's first token id may be this: the last token that was sampled for its sequence, which the worker still has."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSampling:
    """Sampling parameters of a step: each None (neutral for every row) or [num_sequences]; the .proto has the ranges.

    With `seed` and without `has_seed`, every row is seeded.
    """

    temperature: FloatsLike | None = None
    top_k: IntegersLike | None = None
    top_p: FloatsLike | None = None
    min_p: FloatsLike | None = None
    seed: IntegersLike | None = None
    has_seed: BoolsLike | None = None
    presence: FloatsLike | None = None
    frequency: FloatsLike | None = None
    repetition: FloatsLike | None = None
    num_logprobs: IntegersLike | None = None
    logprobs_mode: IntegersLike | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockCopies:
    """KV cache blocks to copy before the forward pass: all sources are read before any destination is written.

    Attributes:
        source_ids: [number of copies].
        destination_ids: [number of copies], without duplicates.
    """

    source_ids: IntegersLike
    destination_ids: IntegersLike


def build_step(
    *,
    query_lens: IntegersLike,
    context_lens: IntegersLike,
    token_ids: IntegersLike,
    block_counts: IntegersLike,
    block_ids: IntegersLike,
    sample: BoolsLike | None = None,
    sampling: StepSampling | None = None,
    tokens: StepTokens | None = None,
    draft_lens: IntegersLike | None = None,
    prompt_logprobs: BoolsLike | None = None,
    next_prompt_ids: IntegersLike | None = None,
    sequence_ids: IntegersLike | None = None,
    finished_sequence_ids: IntegersLike | None = None,
    zero_block_ids: IntegersLike | None = None,
    block_copies: BlockCopies | None = None,
    worker_epoch: int = 0,
    router_id: int = 0,
    step_id: int = 0,
    client_tag: int = 0,
    timeout_ms: int = 0,
    traceparent: str = "",
) -> pb.ExecuteStepRequest:
    """Builds the request of one step from arrays.

    Arrays are framed as packed fields and parsed at once: 65,536 block ids take 34 us this way and 4,100 us by
    `extend(array.tolist())`.

    Args:
        query_lens: [num_sequences], new tokens of each sequence.
        context_lens: [num_sequences], tokens of each sequence already in the KV cache.
        token_ids: [sum of query_lens], the new tokens, row after row; `FEEDBACK_TOKEN` where the worker has it.
        block_counts: [num_sequences], length of each row's block table.
        block_ids: [sum of block_counts], the block tables, row after row.
        sample: [num_sequences], whether to sample after the row's last token; None: every row samples.
        sampling: None: every row is greedy.
        tokens: what the step says of single tokens.
        draft_lens: [num_sequences], how many of each row's last tokens are drafts to verify.
        prompt_logprobs: [num_sequences], whether to return the logprobs of the row's tokens from the second one on.
        next_prompt_ids: [num_sequences], and of the prompt token that follows them; -1: none.
        sequence_ids: [num_sequences], identities for token feedback.
        finished_sequence_ids: sequences whose tokens the worker need not keep any more.
        zero_block_ids: blocks to fill with zeros before anything else.
        block_copies: blocks to copy after that.
        worker_epoch: see the .proto, as for the rest; a fenced session sets epoch, router and step id itself.
        router_id: who owns the KV cache.
        step_id: place in the epoch's order, 0: unsequenced.
        client_tag: echoed in the answer.
        timeout_ms: after which the step must not start any more, 0: never.
        traceparent: W3C trace context.

    Raises:
        ValueError: a value does not fit its field's type.
    """
    request = pb.ExecuteStepRequest(
        worker_epoch=worker_epoch,
        router_id=router_id,
        step_id=step_id,
        client_tag=client_tag,
        timeout_ms=timeout_ms,
        traceparent=traceparent,
    )
    fields: dict[str, tuple[Values | None, str]] = {
        "sequence_ids": (sequence_ids, "<u8"),
        "query_lens": (query_lens, "<i4"),
        "context_lens": (context_lens, "<i4"),
        "token_ids": (token_ids, "<i4"),
        "block_counts": (block_counts, "<i4"),
        "block_ids": (block_ids, "<i4"),
        "sample": (sample, "?"),
        "zero_block_ids": (zero_block_ids, "<i4"),
        "finished_sequence_ids": (finished_sequence_ids, "<u8"),
        "draft_lens": (draft_lens, "<i4"),
        "prompt_logprobs": (prompt_logprobs, "?"),
        "next_prompt_ids": (next_prompt_ids, "<i4"),
    }
    request.MergeFromString(packed(pb.ExecuteStepRequest, fields))
    if block_copies is not None:
        pairs: dict[str, tuple[Values | None, str]] = {
            "source_ids": (block_copies.source_ids, "<i4"),
            "destination_ids": (block_copies.destination_ids, "<i4"),
        }
        request.block_copies.MergeFromString(packed(pb.BlockCopies, pairs))
    if sampling is not None:
        request.sampling.MergeFromString(packed(pb.SamplingParams, _sampling_fields(sampling)))
    if tokens is not None:
        add_tokens(request, tokens)
    return request


def _sampling_fields(sampling: StepSampling) -> dict[str, tuple[Values | None, str]]:
    has_seed = sampling.has_seed
    if has_seed is None and sampling.seed is not None:
        has_seed = [True] * len(sampling.seed)
    return {
        "temperature": (sampling.temperature, "<f4"),
        "top_k": (sampling.top_k, "<i4"),
        "top_p": (sampling.top_p, "<f4"),
        "min_p": (sampling.min_p, "<f4"),
        "seed": (sampling.seed, "<u8"),
        "has_seed": (has_seed, "?"),
        "presence": (sampling.presence, "<f4"),
        "frequency": (sampling.frequency, "<f4"),
        "repetition": (sampling.repetition, "<f4"),
        "num_logprobs": (sampling.num_logprobs, "<i4"),
        # An enum is a varint: one byte, as a bool is, for the values that it has.
        "logprobs_mode": (sampling.logprobs_mode, "<u1"),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class RowError:
    """A row that failed at run time: its index in the step, why, and a text for people."""

    index: int
    code: SequenceErrorCode
    message: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepLogprobs:
    """Logprobs of the sampled tokens of a step.

    Attributes:
        modes: [num_sequences], 1 where values describe the distribution sampled from, 0 where they describe the raw logits.
        counts: [number of sampled tokens], entries of each: 0, or the chosen token and then the most probable ones.
        token_ids: [sum of counts].
        values: [sum of counts].
        ranks: [sum of counts], 1 = most probable.
    """

    modes: Int32Array
    counts: Int32Array
    token_ids: Int32Array
    values: Float32Array
    ranks: Int32Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepPromptLogprobs:
    """Logprobs of tokens that were sent, given those before them.

    Attributes:
        counts: [num_sequences], entries of each row.
        token_ids: [sum of counts].
        values: [sum of counts].
        ranks: [sum of counts], 1 = most probable.
    """

    counts: Int32Array
    token_ids: Int32Array
    values: Float32Array
    ranks: Int32Array


@dataclass(frozen=True, kw_only=True, eq=False)
class StepAnswer:
    """What a step produced.

    Attributes:
        worker_epoch: epoch in which it was executed.
        step_id: as in the request.
        client_tag: as in the request.
        sampled_counts: [num_sequences], tokens sampled for each row.
        sampled_ids: [sum of sampled_counts].
        logprobs: None where no row asked for them.
        prompt_logprobs: None where no row asked for them.
        row_errors: rows that failed.
        tainted_block_ids: blocks whose content can't be trusted.
        mode: how the step ran.
        padded_tokens: number of tokens that it was padded to.
        padded_sequences: number of sequences that it was padded to.
        compiled: whether compiled code ran.
        fallback_reason: why no better mode ran, "" where the best one did.
        timings: where the time went on the worker.
    """

    worker_epoch: int
    step_id: int
    client_tag: int
    sampled_counts: Int32Array
    sampled_ids: Int32Array
    logprobs: StepLogprobs | None
    prompt_logprobs: StepPromptLogprobs | None
    row_errors: tuple[RowError, ...]
    tainted_block_ids: Int32Array
    mode: GraphMode
    padded_tokens: int
    padded_sequences: int
    compiled: bool
    fallback_reason: str
    timings: StepTimings

    @cached_property
    def tokens_of_rows(self) -> list[list[int]]:
        """The sampled tokens of each row."""
        flat = iter(self.sampled_ids.tolist())
        return [[next(flat) for _ in range(count)] for count in self.sampled_counts.tolist()]

    def logprobs_of_tokens(self) -> Iterator[tuple[Int32Array, Float32Array, Int32Array]]:
        """Yields token ids, values and ranks for each sampled token, in their order; empty arrays where none were asked for."""
        if self.logprobs is None:
            empty = np.empty(0, np.int32)
            yield from ((empty, np.empty(0, np.float32), empty) for _ in range(len(self.sampled_ids)))
            return
        ends = np.cumsum(self.logprobs.counts).tolist()
        for start, end in zip([0, *ends], ends, strict=False):
            yield self.logprobs.token_ids[start:end], self.logprobs.values[start:end], self.logprobs.ranks[start:end]


def decode_answer(response: pb.ExecuteStepResponse) -> StepAnswer:
    """Turns the message into arrays."""
    logprobs, prompt, graph, timings = response.logprobs, response.prompt_logprobs, response.graph, response.timings_ns
    return StepAnswer(
        worker_epoch=response.worker_epoch,
        step_id=response.step_id,
        client_tag=response.client_tag,
        sampled_counts=np.array(response.sampled_counts, np.int32),
        sampled_ids=np.array(response.sampled_ids, np.int32),
        logprobs=StepLogprobs(
            modes=np.array(logprobs.modes, np.int32),
            counts=np.array(logprobs.counts, np.int32),
            token_ids=np.array(logprobs.token_ids, np.int32),
            values=np.array(logprobs.values, np.float32),
            ranks=np.array(logprobs.ranks, np.int32),
        )
        if response.HasField("logprobs")
        else None,
        prompt_logprobs=StepPromptLogprobs(
            counts=np.array(prompt.counts, np.int32),
            token_ids=np.array(prompt.token_ids, np.int32),
            values=np.array(prompt.values, np.float32),
            ranks=np.array(prompt.ranks, np.int32),
        )
        if response.HasField("prompt_logprobs")
        else None,
        row_errors=tuple(
            RowError(index=each.index, code=SequenceErrorCode(each.code), message=each.message) for each in response.sequence_errors
        ),
        tainted_block_ids=np.array(response.tainted_block_ids, np.int32),
        mode=GraphMode(graph.mode),
        padded_tokens=graph.padded_tokens,
        padded_sequences=graph.padded_sequences,
        compiled=graph.compiled,
        fallback_reason=graph.fallback_reason,
        timings=StepTimings(
            queue_ns=timings.queue,
            prepare_ns=timings.prepare,
            forward_ns=timings.forward,
            sample_ns=timings.sample,
            total_ns=timings.total,
        ),
    )
