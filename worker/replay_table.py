"""The answers to executed steps that are kept for retries."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class KeptAnswer(Generic[AnswerT]):
    """The answer to an executed step.

    Attributes:
        digest: of the step's request.
        answer: what its caller was told.
        num_bytes: memory that the answer takes.
    """

    digest: bytes
    answer: AnswerT
    num_bytes: int


class ReplayTable(Generic[AnswerT]):
    """The last answers, for retries. The newest one is kept even if it is larger than the bound: it is the likeliest to be lost."""

    def __init__(self, *, max_answers: int, max_bytes: int) -> None:
        self._max_answers = max_answers
        self._max_bytes = max_bytes
        self._kept: OrderedDict[int, KeptAnswer[AnswerT]] = OrderedDict()
        self._num_bytes = 0

    def get(self, step_id: int) -> KeptAnswer[AnswerT] | None:
        """Returns what is kept of a step."""
        return self._kept.get(step_id)

    def keep(self, step_id: int, kept: KeptAnswer[AnswerT]) -> None:
        """Adds an answer and lets go of the oldest ones over the bounds."""
        self._kept[step_id] = kept
        self._num_bytes += kept.num_bytes
        while len(self._kept) > self._max_answers or (self._num_bytes > self._max_bytes and len(self._kept) > 1):
            self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes

    def clear(self) -> None:
        """Lets go of all answers."""
        self._kept.clear()
        self._num_bytes = 0
