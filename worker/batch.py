"""The step as the engine sees it: `StepBatch` in, `StepResult` out. numpy only: neither grpc, proto nor torch."""

from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
IndexArray = npt.NDArray[np.intp]
UInt64Array = npt.NDArray[np.uint64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

# An object with its attributes and the headers of its arrays: a round figure for the bound of answers that are kept.
_OBJECT_BYTES = 1024


class GraphMode(IntEnum):
    """How a step ran. The numbers are those of the protocol."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2


class SequenceErrorCode(IntEnum):
    """Why a row failed at run time. The numbers are those of the protocol."""

    NON_FINITE_LOGITS = 1
    NO_ALLOWED_TOKEN = 2
    FEEDBACK_SOURCE_FAILED = 3
    NON_FINITE_HIDDEN_STATE = 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SamplingBatch:
    """Sampling parameters of a step, checked, one entry per row.

    Attributes:
        temperature: [num_sequences], 0 = greedy, else >= 1e-5.
        top_k: [num_sequences], 0 = off, else 1 .. vocab_size.
        top_p: [num_sequences], in (0, 1], 1 = off.
        min_p: [num_sequences], in [0, 1), 0 = off.
        seed: [num_sequences], counts where `has_seed`.
        has_seed: [num_sequences].
        num_logprobs: [num_sequences], -1 = none, 0 = of the chosen token.
        processed_logprobs: [num_sequences], True = of the distribution sampled from, False = of the raw logits.
    """

    temperature: Float32Array
    top_k: Int32Array
    top_p: Float32Array
    min_p: Float32Array
    seed: UInt64Array
    has_seed: BoolArray
    num_logprobs: Int32Array
    processed_logprobs: BoolArray


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBatch:
    """One step, checked: everything in it is in range, and no two tokens are written to one slot.

    Attributes:
        step_id: > 0 for a sequenced step, 0 for an unsequenced one.
        worker_epoch: the epoch that the step expects; 0 = any (unsequenced steps only).
        router_id: who sends it; 0 = unsaid (unsequenced steps only).
        client_tag: echoed in the answer.
        arrival_ns: `time.monotonic_ns()` when the request arrived.
        deadline_ns: `time.monotonic_ns()` after which the step must not start, or None.
        digest: of a sequenced step's content, for safe retries; empty for an unsequenced one.
        traceparent: W3C trace context, or "".
        request: its bytes, where steps are recorded; else empty.
        query_lens: [num_sequences], >= 1.
        context_lens: [num_sequences], >= 0.
        token_ids: [num_tokens], 0 .. vocab_size - 1.
        block_counts: [num_sequences], length of each row's block table.
        block_ids: [sum of block_counts], 1 .. num_blocks - 1.
        sample: [num_sequences].
        sampling: None when every row is greedy and none wants logprobs.
    """

    step_id: int
    worker_epoch: int
    router_id: int
    client_tag: int
    arrival_ns: int
    deadline_ns: int | None
    digest: bytes
    traceparent: str
    request: bytes = b""
    query_lens: Int32Array
    context_lens: Int32Array
    token_ids: Int32Array
    block_counts: Int32Array
    block_ids: Int32Array
    sample: BoolArray
    sampling: SamplingBatch | None

    @property
    def is_sequenced(self) -> bool:
        """Whether the step has a place in the epoch's order."""
        return self.step_id > 0

    @property
    def num_sequences(self) -> int:
        """Number of rows."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """Number of new tokens of all rows."""
        return len(self.token_ids)

    @cached_property
    def seq_lens(self) -> Int32Array:
        """[num_sequences]: tokens of each sequence in the KV cache after this step."""
        return self.context_lens + self.query_lens

    @cached_property
    def query_starts(self) -> Int32Array:
        """[num_sequences + 1]: where each row's tokens start in the flat arrays; the last entry is num_tokens."""
        starts = np.zeros(self.num_sequences + 1, np.int32)
        np.cumsum(self.query_lens, out=starts[1:])
        return starts

    @cached_property
    def rows(self) -> Int32Array:
        """[num_tokens]: the row that each token belongs to."""
        return np.repeat(np.arange(self.num_sequences, dtype=np.int32), self.query_lens)

    @cached_property
    def positions(self) -> Int32Array:
        """[num_tokens]: position of each token in its sequence."""
        offsets = self.context_lens - self.query_starts[:-1]
        return np.arange(self.num_tokens, dtype=np.int32) + np.repeat(offsets, self.query_lens)

    @cached_property
    def block_tables(self) -> Int32Array:
        """[num_sequences, max of block_counts (at least 1)]: block ids, 0 (the null block) past each row's end."""
        width = max(int(self.block_counts.max(initial=0)), 1)
        tables = np.zeros((self.num_sequences, width), np.int32)
        tables[np.arange(width) < self.block_counts[:, None]] = self.block_ids
        return tables

    def slots(self, block_size: int) -> Int64Array:
        """[num_tokens]: where each new token's keys and values go, block id * block_size + offset in the block."""
        positions = self.positions
        return self.block_tables[self.rows, positions // block_size].astype(np.int64) * block_size + positions % block_size


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceFailure:
    """A row that failed at run time."""

    index: int
    code: SequenceErrorCode
    message: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampledLogprobs:
    """Logprobs of the sampled tokens.

    Attributes:
        processed: [num_sequences], which distribution each row's values describe.
        counts: [number of sampled tokens], entries of each sampled token (0 where none were asked for).
        token_ids: [sum of counts].
        values: [sum of counts], <= 0.
        ranks: [sum of counts], 1 = most probable, ties ranked by id.
    """

    processed: BoolArray
    counts: Int32Array
    token_ids: Int32Array
    values: Float32Array
    ranks: Int32Array

    @property
    def num_bytes(self) -> int:
        """Memory that keeping it takes, roughly."""
        arrays = (self.processed, self.counts, self.token_ids, self.values, self.ranks)
        return _OBJECT_BYTES + sum(array.nbytes for array in arrays)


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphExecution:
    """How a step ran, and why not better ("" where the best mode ran)."""

    mode: GraphMode
    padded_tokens: int
    padded_sequences: int
    compiled: bool
    fallback_reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimings:
    """Where the time of a step went, in nanoseconds."""

    queue_ns: int = 0
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    total_ns: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepResult:
    """What a step produced.

    Attributes:
        sampled_counts: [num_sequences], tokens sampled for each row.
        sampled_ids: [sum of sampled_counts].
        logprobs: None when no row that samples asked for them.
        sequence_errors: rows that failed.
        tainted_block_ids: ascending, blocks whose content can't be trusted.
        graph: how the step ran.
        timings: where its time went.
    """

    sampled_counts: Int32Array
    sampled_ids: Int32Array
    logprobs: SampledLogprobs | None
    sequence_errors: tuple[SequenceFailure, ...]
    tainted_block_ids: Int32Array
    graph: GraphExecution
    timings: StepTimings = field(default_factory=StepTimings)

    @property
    def num_bytes(self) -> int:
        """Memory that keeping it takes, roughly."""
        arrays = self.sampled_counts.nbytes + self.sampled_ids.nbytes + self.tainted_block_ids.nbytes
        messages = sum(_OBJECT_BYTES + len(failure.message) for failure in self.sequence_errors)
        return _OBJECT_BYTES + arrays + messages + (self.logprobs.num_bytes if self.logprobs else 0)
