"""Compares recorded logprobs with those of a replay, entry by entry.

Other kernels sum up in another order, so they are never quite equal: how far apart they are is reported, for a reader to judge.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any


@dataclass(kw_only=True, slots=True)
class LogprobsComparison:
    """How far logprobs are apart.

    Attributes:
        num_compared: values, of the same token at the same place.
        num_not_compared: others: only one of the answers has the token at the place, or the row has other tokens before it.
        max_difference: the largest one; None: nothing was compared.
    """

    num_compared: int = 0
    num_not_compared: int = 0
    max_difference: float | None = None

    def add_sampled(self, recorded: Any, replayed: Any) -> None:
        """Takes in the logprobs of two answers' sampled tokens. Those of a row that sampled other tokens can't be compared."""
        old_rows, new_rows = _tokens_by_row(recorded), _tokens_by_row(replayed)
        old, new = _sampled_by_place(recorded), _sampled_by_place(replayed)
        differing = {row for row, (a, b) in enumerate(zip(old_rows, new_rows, strict=True)) if a != b}
        self._add(
            {place: values for place, values in old.items() if place[0] not in differing},
            {place: values for place, values in new.items() if place[0] not in differing},
        )
        self.num_not_compared += sum(len(values) for (row, _), values in old.items() if row in differing)

    def add_prompt(self, recorded: Any, replayed: Any) -> None:
        """Takes in the logprobs of two answers' prompt tokens."""
        self._add(_prompt_by_place(recorded), _prompt_by_place(replayed))

    def _add(self, old: Mapping[tuple[int, int], Mapping[int, float]], new: Mapping[tuple[int, int], Mapping[int, float]]) -> None:
        for place in old.keys() | new.keys():
            old_values, new_values = old.get(place, {}), new.get(place, {})
            common = old_values.keys() & new_values.keys()
            self.num_compared += len(common)
            self.num_not_compared += max(len(old_values), len(new_values)) - len(common)
            for token_id in common:
                a, b = old_values[token_id], new_values[token_id]
                # Not by subtraction alone: both may be -inf.
                self.max_difference = max(0.0 if a == b else abs(a - b), self.max_difference or 0.0)


def _tokens_by_row(answer: Any) -> list[list[int]]:
    return [list(answer.sampled_ids[start:end]) for start, end in pairwise(accumulate(answer.sampled_counts, initial=0))]


def _sampled_by_place(answer: Any) -> dict[tuple[int, int], dict[int, float]]:
    """Returns logprobs by token id of each place: (row, 2 i) has its sampled token i, (row, 2 i + 1) the likeliest ones there."""
    places = [(row, index) for row, count in enumerate(answer.sampled_counts) for index in range(count)]
    logprobs = answer.logprobs
    bounds = pairwise(accumulate(logprobs.counts, initial=0))
    found: dict[tuple[int, int], dict[int, float]] = {}
    for (row, index), (start, end) in zip(places, bounds, strict=False):  # Without logprobs there are no counts.
        entries = list(zip(logprobs.token_ids[start:end], logprobs.values[start:end], strict=True))
        found[row, 2 * index], found[row, 2 * index + 1] = dict(entries[:1]), dict(entries[1:])
    return found


def _prompt_by_place(answer: Any) -> dict[tuple[int, int], dict[int, float]]:
    logprobs = answer.prompt_logprobs
    places = [(row, index) for row, count in enumerate(logprobs.counts) for index in range(count)]
    entries = zip(logprobs.token_ids, logprobs.values, strict=True)
    return {place: {token_id: value} for place, (token_id, value) in zip(places, entries, strict=True)}
