"""What goes into a step: `StepBatch`, as the engine sees it. numpy only: neither grpc, proto nor torch."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from modelworker.worker.arrays import BoolArray, Float32Array, Int32Array, Int64Array, UInt8Array, UInt64Array

FEEDBACK_TOKEN = -1
"""In `token_ids`: the last token that was sampled for the row's sequence."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenLists:
    """Token ids of each row.

    Attributes:
        counts: [num_sequences].
        token_ids: [sum of counts], 0 .. vocab_size - 1.
    """

    counts: Int32Array
    token_ids: Int32Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LogitBias:
    """What is added to single logits of each row.

    Attributes:
        tokens: whose logits; no token twice in a row.
        values: one for each of `tokens.token_ids`, finite.
    """

    tokens: TokenLists
    values: Float32Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GrammarMasks:
    """Masks of allowed tokens.

    Attributes:
        rows: [n], ascending; a row that has masks is named once for each of its sampled positions.
        bits: [n, 4 * ceil(vocab_size / 32)]: bit i % 8 of byte i // 8 is 1 where token i is allowed.
    """

    rows: Int32Array
    bits: UInt8Array


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenHistory:
    """Tokens of the positions 0 .. prompt_len + output_len - 1 of each row.

    Attributes:
        prompt_lens: [num_sequences].
        output_lens: [num_sequences].
        token_ids: [sum of both], for each row its prompt, then its output.
    """

    prompt_lens: Int32Array
    output_lens: Int32Array
    token_ids: Int32Array


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingBatch:
    """Sampling parameters of a step, checked, one entry per row.

    Attributes:
        temperature: [num_sequences], 0 = greedy, else >= 1e-5.
        top_k: [num_sequences], 0 = off, else 1 .. vocab_size.
        top_p: [num_sequences], in (0, 1], 1 = off.
        min_p: [num_sequences], in [0, 1), 0 = off.
        seed: [num_sequences], counts where `has_seed`.
        has_seed: [num_sequences].
        presence: [num_sequences], 0 = off.
        frequency: [num_sequences], 0 = off.
        repetition: [num_sequences], > 0, 1 = off.
        num_logprobs: [num_sequences], -1 = none, 0 = of the chosen token, else of that many most probable ones too.
        processed_logprobs: [num_sequences], True = of the distribution sampled from, False = of the raw logits.
        allowed: the only tokens that may be sampled; a row without entries is unrestricted. None: no row has any.
        banned: tokens that may not be sampled. None: no row has any.
        grammar: None: no row has a mask.
        bias: None: no row has any.
        history: of rows with penalties; None: no row has any.
    """

    temperature: Float32Array
    top_k: Int32Array
    top_p: Float32Array
    min_p: Float32Array
    seed: UInt64Array
    has_seed: BoolArray
    presence: Float32Array
    frequency: Float32Array
    repetition: Float32Array
    num_logprobs: Int32Array
    processed_logprobs: BoolArray
    allowed: TokenLists | None = None
    banned: TokenLists | None = None
    grammar: GrammarMasks | None = None
    bias: LogitBias | None = None
    history: TokenHistory | None = None

    @cached_property
    def has_penalties(self) -> BoolArray:
        """[num_sequences]: whether some penalty is on."""
        is_on: BoolArray = (self.presence != 0) | (self.frequency != 0) | (self.repetition != 1)
        return is_on


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PromptLogprobsBatch:
    """Which rows want the logprobs of their own tokens.

    Attributes:
        wanted: [num_sequences]: of the row's tokens from the second one on.
        next_ids: [num_sequences]: and of this one, which follows the row's last token; -1: none. -1 where not wanted.
    """

    wanted: BoolArray
    next_ids: Int32Array


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
        sequence_ids: [num_sequences] without duplicates, or empty: identities for token feedback.
        query_lens: [num_sequences], >= 1.
        context_lens: [num_sequences], >= 0.
        token_ids: [num_tokens], 0 .. vocab_size - 1. `FEEDBACK_TOKEN` may be the first of a row of 1 + draft_len tokens, in a
            sequenced step with `sequence_ids`, until the engine has put the token there.
        draft_lens: [num_sequences], how many of the row's last tokens are drafts to verify; where not 0, the row samples and has
            one token more than that.
        block_counts: [num_sequences], length of each row's block table.
        block_ids: [sum of block_counts], 1 .. num_blocks - 1.
        sample: [num_sequences].
        sampling: None when every row is plainly greedy: no logprobs, masks, bias or penalties.
        prompt_logprobs: None when no row wants them.
        finished_sequence_ids: whose tokens need not be kept any more; they may come again in `sequence_ids`.
        zero_block_ids: 1 .. num_blocks - 1, filled with zeros before anything else.
        copy_source_ids: [number of copies], 1 .. num_blocks - 1, all read after zeroing and before any destination is written.
        copy_destination_ids: [number of copies], 1 .. num_blocks - 1, without duplicates.
        request: the message's bytes, where steps are recorded; else empty.
    """

    step_id: int
    worker_epoch: int
    router_id: int
    client_tag: int
    arrival_ns: int
    deadline_ns: int | None
    digest: bytes
    traceparent: str
    sequence_ids: UInt64Array
    query_lens: Int32Array
    context_lens: Int32Array
    token_ids: Int32Array
    draft_lens: Int32Array
    block_counts: Int32Array
    block_ids: Int32Array
    sample: BoolArray
    sampling: SamplingBatch | None
    finished_sequence_ids: UInt64Array
    zero_block_ids: Int32Array
    copy_source_ids: Int32Array
    copy_destination_ids: Int32Array
    prompt_logprobs: PromptLogprobsBatch | None = None
    request: bytes = b""

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
