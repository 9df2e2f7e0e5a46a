"""A request under way: its tokens, its time in the KV cache, and its row of a step."""

from dataclasses import dataclass, field

from modelworker.worker.scheduler.drafts import PromptLookup
from modelworker.worker.scheduler.types import Request


@dataclass(eq=False, slots=True)
class SharedPrefix:
    """A prompt that several sequences continue: the KV of all its tokens but the last, computed once.

    The last token is computed by each sequence, which samples its own first token from it.

    Attributes:
        num_tokens: tokens in it.
        block_ids: blocks with their KV, held until no sequence waits for them; empty while they are not computed.
    """

    num_tokens: int
    block_ids: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Residence:
    """A sequence's time in the KV cache. One that was sent back and comes again has another.

    Attributes:
        sequence_id: the sequence's name for the worker in this time.
        block_ids: in order of the positions.
        num_computed: tokens whose KV is in them once all steps that were sent are executed.
        num_unknown: tokens that those steps sample and that are not known here yet.
        num_in_flight: those steps, as far as they have a row of it.
        has_drafts_in_flight: whether the next position depends on an answer.
        is_over: whether the sequence has left: the blocks are given back with the last answer.
    """

    sequence_id: int
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_unknown: int = 0
    num_in_flight: int = 0
    has_drafts_in_flight: bool = False
    is_over: bool = False


@dataclass(eq=False, slots=True)
class Sequence:
    """A request under way.

    Attributes:
        request_id: its number, by arrival.
        request: what was asked for.
        token_ids: prompt and output, as far as they are known.
        residence: None: it waits.
        prefix: what it shares with others, None: nothing.
        lookup: makes drafts; None: there are none.
        num_losses: how often it lost its KV since its last token.
    """

    request_id: int
    request: Request
    token_ids: list[int]
    residence: Residence | None = None
    prefix: SharedPrefix | None = None
    lookup: PromptLookup | None = None
    num_losses: int = 0

    @property
    def num_tokens(self) -> int:
        """All tokens, those included that are not known yet."""
        return len(self.token_ids) + (0 if self.residence is None else self.residence.num_unknown)

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is not computed yet; 1: the sequence decodes."""
        return self.num_tokens - (0 if self.residence is None else self.residence.num_computed)

    @property
    def num_output(self) -> int:
        """Known tokens after the prompt."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    @property
    def output_ids(self) -> tuple[int, ...]:
        """The known tokens after the prompt."""
        return tuple(self.token_ids[len(self.request.prompt_ids) :])

    def append(self, token_id: int) -> None:
        """Takes a sampled token."""
        self.token_ids.append(token_id)
        self.num_losses = 0
        if self.lookup is not None:
            self.lookup.extend((token_id,))


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence's part in a step.

    Attributes:
        sequence: whose.
        residence: the sequence's when the row was chosen.
        start: position of the first token.
        token_ids: `FEEDBACK_TOKEN` first where the token is not known here.
        num_drafts: how many at the end are guesses.
        samples: whether it gets the sequence's next token.
    """

    sequence: Sequence
    residence: Residence
    start: int
    token_ids: list[int]
    num_drafts: int
    samples: bool

    @property
    def query_len(self) -> int:
        """New tokens."""
        return len(self.token_ids)

    @property
    def is_stale(self) -> bool:
        """Whether the sequence has left since: what the step gives is not for it."""
        return self.residence.is_over

    def send(self) -> None:
        """Notes that a step with this row was sent."""
        residence = self.residence
        residence.num_computed = self.start + self.query_len
        residence.num_unknown += self.samples
        residence.num_in_flight += 1
        residence.has_drafts_in_flight = self.num_drafts > 0

    def undo(self) -> None:
        """Notes that the step was not executed, nor any after it."""
        residence = self.residence
        residence.num_computed = self.start
        residence.num_unknown -= self.samples
        residence.num_in_flight -= 1
        residence.has_drafts_in_flight = False

    def settle(self, num_sampled: int) -> None:
        """Notes that the step was executed; drafts that were not accepted are not computed."""
        residence = self.residence
        residence.num_unknown -= self.samples
        residence.num_in_flight -= 1
        if self.num_drafts:
            residence.num_computed = self.start + num_sampled
            residence.has_drafts_in_flight = False
