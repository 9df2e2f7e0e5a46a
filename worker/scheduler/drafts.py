"""Guesses at the next tokens of a sequence, for the worker to verify."""

from collections.abc import Iterable

_LONGEST = 4
_SHORTEST = 2


class PromptLookup:
    """Guesses that what followed the last few tokens when they came before follows them again.

    Looks for the longest run of 4 to 2 tokens at the end that came before, and continues from its last occurrence. Source: "prompt
    lookup decoding" (Saxena, 2023). Good where a text repeats itself: summaries, edits, code, loops.
    """

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._token_ids: list[int] = []
        # The position after the last occurrence of each run that is followed by something.
        self._next: dict[tuple[int, ...], int] = {}
        self.extend(token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Takes more of the sequence."""
        for token_id in token_ids:
            position = len(self._token_ids)
            for length in range(_SHORTEST, min(_LONGEST, position) + 1):
                self._next[tuple(self._token_ids[position - length :])] = position
            self._token_ids.append(token_id)

    def propose(self, limit: int) -> list[int]:
        """Returns `limit` tokens, or none."""
        for length in range(_LONGEST, _SHORTEST - 1, -1):
            start = self._next.get(tuple(self._token_ids[-length:]))
            if start is not None and length <= len(self._token_ids):
                # Past the end, the text goes on with what was proposed: a loop of two tokens gives drafts of any length.
                text = self._token_ids + [0] * limit
                end = len(self._token_ids)
                for index in range(limit):
                    text[end + index] = text[start + index]
                return text[end:]
        return []
