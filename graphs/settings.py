"""What is captured: the mode of each kind of batch, the limits of a batch, and the sizes."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class GraphSettingsError(ValueError):
    """The settings of graphs contradict each other."""


class RuntimeMode(IntEnum):
    """How one step runs, better modes higher."""

    NONE = 0
    """No graph: compiled or plain modules on the unpadded batch."""
    PIECEWISE = 1
    """Captured pieces, with attention between them on the real batch."""
    FULL = 2
    """One captured graph for the whole step."""


class CaptureMode(StrEnum):
    """Which run-time modes are captured: one for uniform decode batches, one for all others."""

    NONE = "NONE"
    PIECEWISE = "PIECEWISE"
    FULL = "FULL"
    FULL_DECODE_ONLY = "FULL_DECODE_ONLY"
    FULL_AND_PIECEWISE = "FULL_AND_PIECEWISE"

    @property
    def decode_mode(self) -> RuntimeMode:
        """The best mode of batches in which every row is decode with the same query length."""
        if self in (CaptureMode.FULL_DECODE_ONLY, CaptureMode.FULL_AND_PIECEWISE):
            return RuntimeMode.FULL
        return RuntimeMode[self]

    @property
    def mixed_mode(self) -> RuntimeMode:
        """The best mode of all other batches."""
        if self is CaptureMode.FULL_DECODE_ONLY:
            return RuntimeMode.NONE
        if self is CaptureMode.FULL_AND_PIECEWISE:
            return RuntimeMode.PIECEWISE
        return RuntimeMode[self]


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSettings:
    """What is captured.

    Attributes:
        max_sequences: the largest number of sequences in a step.
        max_tokens_per_step: the largest number of new tokens in a step.
        mode: what is captured for which kind of batch.
        decode_query_lens: the query lengths that count as decode: 1, and 1 + k where k drafts are verified.
        decode_sizes: numbers of tokens from which the ladder of FULL graphs of each decode query length is made; None: a default.
        mixed_sizes: numbers of tokens of the graphs for any other batch, PIECEWISE or FULL; None: a default.
        exact_up_to: where sizes are not given, every number of tokens (of sequences, in a decode) up to this one gets its graph.
    """

    max_sequences: int
    max_tokens_per_step: int
    mode: CaptureMode = CaptureMode.FULL_AND_PIECEWISE
    decode_query_lens: tuple[int, ...] = (1,)
    decode_sizes: tuple[int, ...] | None = None
    mixed_sizes: tuple[int, ...] | None = None
    exact_up_to: int = 0

    def __post_init__(self) -> None:
        """Refuses contradictions.

        Raises:
            GraphSettingsError: there are some.
        """
        for name, value in (("max_sequences", self.max_sequences), ("max_tokens_per_step", self.max_tokens_per_step)):
            if value < 1:
                raise GraphSettingsError(f"{name} is {value}, and must be at least 1")
        self._check_decode_query_lens()
        if self.decode_sizes is not None:
            if self.mode.decode_mode is not RuntimeMode.FULL:
                raise GraphSettingsError(f"decode sizes are given, but graph mode {self.mode} captures no FULL decode graphs")
            limit = max(self.largest_decode_batch(query_len) for query_len in self.decode_query_lens)
            _check_sizes("decode size", self.decode_sizes, limit, "the largest decode batch")
        if self.mixed_sizes is not None:
            if self.mode.mixed_mode is RuntimeMode.NONE:
                raise GraphSettingsError(f"mixed sizes are given, but graph mode {self.mode} captures no graphs of mixed batches")
            _check_sizes("mixed size", self.mixed_sizes, self.max_tokens_per_step, "max_tokens_per_step")

    def largest_decode_batch(self, query_len: int) -> int:
        """Returns the number of tokens of the largest batch that the limits allow with this query length in every row."""
        return min(self.max_sequences, self.max_tokens_per_step // query_len) * query_len

    def _check_decode_query_lens(self) -> None:
        if not self.decode_query_lens:
            raise GraphSettingsError("no decode query length is given")
        for query_len in self.decode_query_lens:
            if query_len < 1:
                raise GraphSettingsError(f"decode query length {query_len} is below 1")
            if query_len > self.max_tokens_per_step:
                raise GraphSettingsError(
                    f"one sequence of decode query length {query_len} exceeds max_tokens_per_step, {self.max_tokens_per_step}"
                )
        _refuse_duplicates("decode query length", self.decode_query_lens)


def _check_sizes(name: str, sizes: tuple[int, ...], limit: int, limit_name: str) -> None:
    if not sizes:
        raise GraphSettingsError(f"no {name} is given; graph mode NONE captures none")
    for size in sizes:
        if size < 1:
            raise GraphSettingsError(f"{name} {size} is below 1")
        if size > limit:
            raise GraphSettingsError(f"{name} {size} is above {limit_name}, {limit}")
    _refuse_duplicates(name, sizes)


def _refuse_duplicates(name: str, values: Iterable[int]) -> None:
    seen: set[int] = set()
    for value in values:
        if value in seen:
            raise GraphSettingsError(f"{name} {value} is given twice")
        seen.add(value)
