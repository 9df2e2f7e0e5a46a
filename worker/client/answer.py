"""The answer to a step as a router sees it: `ExecuteStepResponse` to numpy arrays."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.arrays import Float32Array, Int32Array
from modelworker.worker.result import GraphMode, SequenceErrorCode, StepTimings


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
