"""Chooses the rows of a step and gives them blocks.

Sequences that decode come first, then chunks of prompts, in order of arrival. When no blocks are left, the youngest sequence is
sent back to the queue and recomputed later.

Why blocks can be reused as they are, tainted ones too: a row reads the KV of positions 0 .. context_len + query_len - 1 and of
no other, and each of those slots was written by the sequence itself after it got the block, or copied from or shared with one
that computed the same prompt. What an earlier owner left behind is therefore never read. A block has a new owner only after the
last step that could write it was answered.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from modelworker.worker.client import FEEDBACK_TOKEN, WorkerInfo
from modelworker.worker.scheduler.blocks import BlockPool
from modelworker.worker.scheduler.sequence import Residence, Row, Sequence, SharedPrefix
from modelworker.worker.scheduler.types import SchedulerSettings


@dataclass(eq=False, slots=True)
class Batch:
    """What the next step does.

    Attributes:
        rows: its rows.
        copies: blocks to copy before, (source, destination).
        preempted: sequences that were sent back for it.
    """

    rows: list[Row] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Batcher:
    """The sequences of one worker and their blocks. `waiting` and `running` are both kept in order of arrival."""

    def __init__(self, settings: SchedulerSettings, info: WorkerInfo, *, names_sequences: bool = False) -> None:
        """Starts with nothing.

        Args:
            settings: limits below the worker's own.
            info: the worker.
            names_sequences: whether the worker keeps tokens of each running sequence, of which it has room for a number.
        """
        self._settings = settings
        self._names_sequences = names_sequences
        self._next_sequence_id = 1
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.enter_epoch(info)

    def enter_epoch(self, info: WorkerInfo) -> None:
        """Takes the worker's limits and starts with all blocks free; nothing is running or in flight."""
        settings, limits = self._settings, info.limits
        self._block_size, self._max_model_len = info.kv_cache.block_size, info.model.max_model_len
        most = min(limits.max_sequences, limits.max_feedback_sequences) if self._names_sequences else limits.max_sequences
        self.max_sequences = min(settings.max_sequences or most, most)
        self.max_tokens = min(settings.max_tokens_per_step or limits.max_tokens_per_step, limits.max_tokens_per_step)
        self.prefill_chunk = min(settings.prefill_chunk or self.max_tokens, self.max_tokens)
        num_blocks = info.kv_cache.num_blocks
        if settings.max_blocks is not None:
            num_blocks = min(num_blocks, settings.max_blocks + 1)
        self.blocks = BlockPool(num_blocks, settings.block_order)
        self._prefixes: list[SharedPrefix] = []
        # Of sequences that have left, whose last answers are to come.
        self._lingering: set[Residence] = set()
        self.left: list[int] = []
        """Names under which sequences were known to the worker that have left."""

    # -- coming and going ----------------------------------------------------------------------------------------------------

    def has(self, sequence: Sequence) -> bool:
        """Whether a sequence is waiting or running."""
        return sequence in self.running or sequence in self.waiting

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out; its blocks come back with the last answer to a step that has a row of it."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        if sequence.residence is not None:
            sequence.residence.is_over = True
            self._lingering.add(sequence.residence)
            self.vacate(sequence.residence)
            sequence.residence = None
        self._forget_unused_prefixes()

    def send_back(self, sequence: Sequence) -> None:
        """Puts a running sequence back into the queue, at its place by arrival; it is recomputed from its tokens."""
        self.leave(sequence)
        self.waiting = deque(_by_arrival([*self.waiting, sequence]))

    def vacate(self, residence: Residence) -> None:
        """Gives the blocks of a residence back if it is over and no step can write them any more."""
        if residence.is_over and residence.num_in_flight == 0:
            self._lingering.discard(residence)
            self.blocks.give_back(residence.block_ids)
            residence.block_ids = []
            self.left.append(residence.sequence_id)

    def distrust(self, block_ids: set[int]) -> list[Sequence]:
        """Sends back whoever holds one of the blocks, whose content is not what it should be. Returns them."""
        for prefix in [each for each in self._prefixes if not block_ids.isdisjoint(each.block_ids)]:
            self._forget(prefix)
        lost = [each for each in self.running if each.residence and not block_ids.isdisjoint(each.residence.block_ids)]
        for sequence in lost:
            self.send_back(sequence)
        return lost

    def num_blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks that hold so many tokens."""
        return -(-num_tokens // self._block_size)

    # -- choosing ------------------------------------------------------------------------------------------------------------

    def choose(self, *, may_preempt: bool) -> Batch:
        """Chooses the next step, with blocks for all its tokens. A batch without rows: nothing can be done now.

        Args:
            may_preempt: whether a sequence may be sent back for want of blocks. Not while steps are in flight: their answers may
                bring blocks, and tokens that a sequence would lose.
        """
        batch = Batch()
        chosen: dict[int, Row] = {}
        # Decodes first: a chunk of a long prompt fills what they leave of the step.
        for sequence in sorted(self.running, key=lambda each: each.num_pending > 1):
            if sequence.residence is None or not self._can_go_on(sequence):
                continue
            room = self.max_tokens - _num_tokens(chosen.values())
            while (row := self._row(sequence, sequence.residence, room)) is None:
                if not may_preempt:
                    return Batch()
                victim = self.running[-1]
                chosen.pop(victim.request_id, None)
                self.send_back(victim)
                batch.preempted.append(victim)
                if victim is sequence:
                    break
            else:
                if row.query_len:
                    chosen[sequence.request_id] = row
        if not batch.preempted:
            self._admit(chosen, batch)
        batch.rows = list(chosen.values())
        return batch

    def send(self, batch: Batch) -> None:
        """Notes that a step was sent."""
        for row in batch.rows:
            row.send()
            self._keep_prefix(row)

    def undo(self, batch: Batch) -> None:
        """Notes that a step that was sent was not executed, nor any after it, which were undone before."""
        for row in batch.rows:
            row.undo()
            self.vacate(row.residence)
            if row.sequence.prefix is not None and not row.is_stale:
                # Its prefix may have been computed or copied by this very step.
                self.send_back(row.sequence)
        for prefix in list(self._prefixes):
            self._forget(prefix)

    def _can_go_on(self, sequence: Sequence) -> bool:
        """Whether its next row does not depend on an answer, and its steps in flight won't end it for its length."""
        residence, request = sequence.residence, sequence.request
        if residence is None or residence.has_drafts_in_flight:
            return False
        if residence.num_unknown and sequence.lookup is not None and sequence.lookup.propose(1):
            # The text repeats itself: drafts, which need its last token, gain more than a step that is sent early.
            return False
        num_output = sequence.num_tokens - len(request.prompt_ids)
        return num_output < request.max_tokens and sequence.num_tokens <= self._max_model_len

    def _row(self, sequence: Sequence, residence: Residence, room: int) -> Row | None:
        """Makes a sequence's next row, empty where the step has no room; None: there are not enough blocks."""
        query_len = min(sequence.num_pending, self.prefill_chunk, room)
        start = residence.num_computed
        samples = query_len == sequence.num_pending
        if query_len < 1:
            return Row(sequence, residence, start, [], 0, False)
        token_ids = sequence.token_ids[start : start + query_len]
        token_ids += [FEEDBACK_TOKEN] * (query_len - len(token_ids))
        drafts = self._drafts(sequence, residence, room) if samples else []
        if drafts and self._grow(residence, start + query_len + len(drafts)):
            return Row(sequence, residence, start, token_ids + drafts, len(drafts), samples)
        while not self._grow(residence, start + query_len):
            if not self._prefixes:
                return None
            self._forget(self._prefixes[0])
        return Row(sequence, residence, start, token_ids, 0, samples)

    def _drafts(self, sequence: Sequence, residence: Residence, room: int) -> list[int]:
        if sequence.lookup is None or sequence.num_pending != 1 or residence.num_unknown:
            return []
        # A token is sampled after the last draft as well.
        num_wanted = sequence.request.max_tokens - sequence.num_output - 1
        limit = min(self._settings.num_drafts, num_wanted, room - 1, self._max_model_len - sequence.num_tokens)
        return sequence.lookup.propose(limit) if limit > 0 else []

    def _grow(self, residence: Residence, num_tokens: int) -> bool:
        """Gives a sequence blocks for its first tokens; False when there are not enough."""
        missing = self.num_blocks_for(num_tokens) - len(residence.block_ids)
        if missing > self.blocks.num_free:
            return False
        residence.block_ids += self.blocks.take(max(missing, 0))
        return True

    # -- admission -----------------------------------------------------------------------------------------------------------

    def _admit(self, chosen: dict[int, Row], batch: Batch) -> None:
        """Starts waiting sequences, in order, while the step has room and the blocks suffice for all their tokens."""
        # The worker keeps tokens of those that linger, too.
        limit = min(self.max_sequences - len(self._lingering) if self._names_sequences else self.max_sequences, self.max_tokens)
        while self.waiting and len(self.running) < limit:
            sequence = self.waiting[0]
            room = self.max_tokens - _num_tokens(chosen.values())
            if room < 1 or self._is_being_computed(sequence.prefix):
                return
            if not self.running:
                # Prefixes are held for those who wait, and must not be what they wait for.
                self._make_room(sequence)
            if self._num_missing_blocks(sequence) > 0:
                return
            self.waiting.popleft()
            residence = sequence.residence = Residence(self._next_sequence_id)
            self._next_sequence_id += 1
            self.running = _by_arrival([*self.running, sequence])
            batch.copies += self._fork(sequence, residence)
            row = self._row(sequence, residence, room)
            assert row is not None, "the blocks were counted"
            chosen[sequence.request_id] = row
        self._forget_unused_prefixes()

    # -- shared prompts ------------------------------------------------------------------------------------------------------

    def _num_missing_blocks(self, sequence: Sequence) -> int:
        """Returns how many blocks more than the free ones a waiting sequence needs for its tokens."""
        prefix = sequence.prefix
        num_shared = prefix.num_tokens // self._block_size if prefix is not None and prefix.block_ids else 0
        return self.num_blocks_for(len(sequence.token_ids)) - num_shared - self.blocks.num_free

    def _make_room(self, sequence: Sequence) -> None:
        """Gives up prefixes until a waiting sequence has blocks enough: those of others first."""
        for prefix in sorted(self._prefixes, key=lambda each: each is sequence.prefix):
            if self._num_missing_blocks(sequence) > 0:
                self._forget(prefix)

    def _is_being_computed(self, prefix: SharedPrefix | None) -> bool:
        """Whether a running sequence is about to compute the prefix."""
        if prefix is None or prefix.block_ids:
            return False
        return any(
            each.prefix is prefix and each.residence and each.residence.num_computed < prefix.num_tokens for each in self.running
        )

    def _keep_prefix(self, row: Row) -> None:
        """Holds the blocks of a shared prompt as soon as a step was sent that completes it, for those who wait for it."""
        prefix = row.sequence.prefix
        if prefix is None or prefix.block_ids or row.residence.num_computed < prefix.num_tokens:
            return
        if any(each.prefix is prefix for each in self.waiting):
            prefix.block_ids = row.residence.block_ids[: self.num_blocks_for(prefix.num_tokens)]
            self.blocks.share(prefix.block_ids)
            self._prefixes.append(prefix)

    def _fork(self, sequence: Sequence, residence: Residence) -> list[tuple[int, int]]:
        """Starts a sequence behind its computed prefix. Returns the copy of the block that both go on writing."""
        prefix = sequence.prefix
        if prefix is None or not prefix.block_ids:
            return []
        num_full = prefix.num_tokens // self._block_size
        residence.block_ids = prefix.block_ids[:num_full]
        self.blocks.share(residence.block_ids)
        residence.num_computed = prefix.num_tokens
        if num_full == len(prefix.block_ids):
            return []
        residence.block_ids += self.blocks.take(1)
        return [(prefix.block_ids[num_full], residence.block_ids[num_full])]

    def _forget_unused_prefixes(self) -> None:
        for prefix in [each for each in self._prefixes if not any(waiting.prefix is each for waiting in self.waiting)]:
            self._forget(prefix)

    def _forget(self, prefix: SharedPrefix) -> None:
        self._prefixes.remove(prefix)
        self.blocks.give_back(prefix.block_ids)
        prefix.block_ids = []


def _by_arrival(sequences: Iterable[Sequence]) -> list[Sequence]:
    return sorted(sequences, key=lambda each: each.request_id)


def _num_tokens(rows: Iterable[Row]) -> int:
    return sum(row.query_len for row in rows)
