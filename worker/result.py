"""What comes out of a step: `StepResult`, as the engine makes it. numpy only: neither grpc, proto nor torch."""

from dataclasses import dataclass, field
from enum import IntEnum

from modelworker.worker.arrays import BoolArray, Float32Array, Int32Array

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
        counts: [number of sampled tokens], entries of each: 0 where none were asked for, else the sampled token and then the most
            probable ones in falling order, as many as were asked for; fewer where fewer tokens have a probability.
        token_ids: [sum of counts].
        values: [sum of counts], <= 0, finite.
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptLogprobs:
    """Logprobs of tokens that the router sent, given those before them.

    Attributes:
        counts: [num_sequences], entries of each row; 0 where none were asked for and where the row failed.
        token_ids: [sum of counts].
        values: [sum of counts], <= 0.
        ranks: [sum of counts], 1 = most probable, ties ranked by id.
    """

    counts: Int32Array
    token_ids: Int32Array
    values: Float32Array
    ranks: Int32Array

    @property
    def num_bytes(self) -> int:
        """Memory that keeping it takes, roughly."""
        return _OBJECT_BYTES + sum(array.nbytes for array in (self.counts, self.token_ids, self.values, self.ranks))


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
        prompt_logprobs: None when no row asked for them.
        timings: where its time went.
    """

    sampled_counts: Int32Array
    sampled_ids: Int32Array
    logprobs: SampledLogprobs | None
    sequence_errors: tuple[SequenceFailure, ...]
    tainted_block_ids: Int32Array
    graph: GraphExecution
    prompt_logprobs: PromptLogprobs | None = None
    timings: StepTimings = field(default_factory=StepTimings)

    @property
    def num_bytes(self) -> int:
        """Memory that keeping it takes, roughly."""
        arrays = self.sampled_counts.nbytes + self.sampled_ids.nbytes + self.tainted_block_ids.nbytes
        messages = sum(_OBJECT_BYTES + len(failure.message) for failure in self.sequence_errors)
        parts = sum(part.num_bytes for part in (self.logprobs, self.prompt_logprobs) if part)
        return _OBJECT_BYTES + arrays + messages + parts
