"""What goes into the scheduler and what comes out: requests, settings, events."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

BlockOrder = Literal["ascending", "reversed", "interleaved"]


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


class RequestError(ValueError):
    """A request can't be served by this worker.

    Attributes:
        parameter: the field of `Request`, `Sampling` or `SchedulerSettings`, with an index where it is one of several.
        problem: what was found there, and what is expected.
    """

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter}: {problem}")
        self.parameter = parameter
        self.problem = problem


class WorkerChangedError(Exception):
    """The worker came back with another model: what was generated so far can't be continued."""


class WorkerAnswerError(Exception):
    """The worker's answer contradicts the protocol."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the tokens of one request are chosen; ranges and meaning as in the .proto."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    num_logprobs: int = -1

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far count."""
        return (self.presence, self.frequency, self.repetition) != (0.0, 0.0, 1.0)

    def check(self) -> None:
        """Raises RequestError, naming the parameter, where one is out of range: the worker would refuse the whole step."""
        checks = {
            "temperature": (self.temperature == 0.0 or 1e-5 <= self.temperature < float("inf"), "0 or at least 1e-5"),
            "top_k": (0 <= self.top_k < 2**31, "at least 0"),
            "top_p": (0.0 < self.top_p <= 1.0, "in (0, 1]"),
            "min_p": (0.0 <= self.min_p < 1.0, "in [0, 1)"),
            "seed": (self.seed is None or 0 <= self.seed < 2**64, "an unsigned 64-bit integer"),
            "presence": (-2.0 <= self.presence <= 2.0, "in [-2, 2]"),
            "frequency": (-2.0 <= self.frequency <= 2.0, "in [-2, 2]"),
            "repetition": (0.0 < self.repetition < float("inf"), "above 0"),
            "num_logprobs": (-1 <= self.num_logprobs <= 20, "-1 .. 20"),
        }
        for name, (is_right, expected) in checks.items():
            if not is_right:
                raise RequestError(name, f"found {getattr(self, name)}, expected {expected}")

    def check_capabilities(self, capabilities: Collection[str]) -> None:
        """Raises RequestError where the worker does not implement what is asked for: it would refuse the whole step."""
        if self.num_logprobs >= 0 and "sampling.num_logprobs" not in capabilities:
            raise RequestError("num_logprobs", f"found {self.num_logprobs}, but this worker does not implement it")
        if self.has_penalties and "history" not in capabilities:
            name = "presence" if self.presence else "frequency" if self.frequency else "repetition"
            raise RequestError(name, f"found {getattr(self, name)}, but this worker does not implement penalties")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a user wants: tokens that follow `prompt_ids`.

    Attributes:
        prompt_ids: the prompt, not empty.
        max_tokens: how many tokens to generate at most; the model's maximum length ends a request too.
        sampling: how they are chosen.
        stop_token_ids: tokens that end the request (and are not part of its text); None: the model's end-of-sequence tokens.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_token_ids: frozenset[int] | None = None

    def with_seed_offset(self, offset: int) -> "Request":
        """Returns the same request with another seed, if it has one: otherwise several of it would get the same tokens."""
        seed = self.sampling.seed
        return self if seed is None or offset == 0 else replace(self, sampling=replace(self.sampling, seed=(seed + offset) % 2**64))


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerSettings:
    """How steps are made; a limit that is None is the worker's own.

    Attributes:
        prefill_chunk: largest part of a prompt in a step.
        max_sequences: rows of a step, and sequences with blocks.
        max_tokens_per_step: of all rows.
        max_blocks: KV cache blocks in use.
        block_order: in which they are handed out.
        num_drafts: tokens to guess and have verified with each one that is sampled; 0: none.
    """

    prefill_chunk: int | None = None
    max_sequences: int | None = None
    max_tokens_per_step: int | None = None
    max_blocks: int | None = None
    block_order: BlockOrder = "ascending"
    num_drafts: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Logprobs of one sampled token: its own, its rank, and the most probable tokens with theirs."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenSampled:
    """A request has got a token; `index` counts its output from 0. One that stops the request is no part of its text."""

    request_id: int
    index: int
    token_id: int
    is_stop: bool
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFinished:
    """A request is over. `error` says why where the reason is ERROR."""

    request_id: int
    reason: FinishReason
    output_ids: tuple[int, ...]
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPreempted:
    """A request had to give its blocks back; it continues later, recomputed from its tokens."""

    request_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KvCacheRecomputed:
    """The worker lost its KV cache (restart, reset, fault): everything that was running starts over from its tokens."""

    worker_epoch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepExecuted:
    """A step was executed: what it was, how it ran, and how long it took from here (`round_trip_ms`) and there (`worker_ms`).

    Of `num_drafts` guessed tokens `num_accepted` were right. In a pipeline, the round trip has the wait for the steps before in it.
    """

    step_id: int
    num_tokens: int
    num_sequences: int
    num_decodes: int
    num_drafts: int
    num_accepted: int
    mode: str
    padded_tokens: int
    round_trip_ms: float
    worker_ms: float


Event = TokenSampled | RequestFinished | RequestPreempted | KvCacheRecomputed | StepExecuted
