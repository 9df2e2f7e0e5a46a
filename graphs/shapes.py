"""What a graph is captured for, what a step looks like, and when the one serves the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from modelworker.graphs.settings import RuntimeMode

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a graph was captured for. Made by `make_key` only.

    Attributes:
        mode: FULL or PIECEWISE.
        num_tokens: to which a step is padded.
        num_sequences: to which a step is padded; None: any number, as attention runs on the real batch.
        uniform_query_len: of every sequence, all of which decode; None: any mix.
    """

    mode: RuntimeMode
    num_tokens: int
    num_sequences: int | None
    uniform_query_len: int | None

    def __str__(self) -> str:
        text = f"{self.mode.name} {self.num_tokens} tokens"
        if self.num_sequences is not None:
            text += f" {self.num_sequences} sequences"
        if self.uniform_query_len is not None:
            text += f" of {self.uniform_query_len}"
        return text


def make_key(mode: RuntimeMode, num_tokens: int, *, max_sequences: int, uniform_query_len: int | None = None) -> GraphKey:
    """Makes the key of a size. Capture and look-up both get their keys here.

    Args:
        mode: FULL or PIECEWISE.
        num_tokens: at least 1; a multiple of the uniform query length.
        max_sequences: for which a FULL graph of any mix is captured.
        uniform_query_len: of a FULL decode graph; None for a graph of any mix.

    Raises:
        ValueError: there is no such graph.
    """
    if mode is RuntimeMode.NONE or num_tokens < 1:
        raise ValueError(f"no graph has mode {mode.name} and {num_tokens} tokens")
    if uniform_query_len is None:
        return GraphKey(mode, num_tokens, max_sequences if mode is RuntimeMode.FULL else None, None)
    if mode is not RuntimeMode.FULL or uniform_query_len < 1 or num_tokens % uniform_query_len:
        raise ValueError(f"no {mode.name} graph of {num_tokens} tokens has sequences of {uniform_query_len}")
    return GraphKey(mode, num_tokens, num_tokens // uniform_query_len, uniform_query_len)


class StepShape(NamedTuple):
    """All that dispatch looks at.

    Attributes:
        num_tokens: new tokens of all sequences.
        num_sequences: of the step.
        uniform_query_len: the query length of every sequence, if all of them decode with the same one; else None.
        all_decode: whether every sequence decodes, be it with different query lengths.
    """

    num_tokens: int
    num_sequences: int
    uniform_query_len: int | None
    all_decode: bool


def step_shape(
    query_lens: Int32Array, context_lens: Int32Array, draft_lens: Int32Array, decode_query_lens: Sequence[int]
) -> StepShape:
    """Hot path: returns the shape of a step.

    A row decodes if it has context, all its tokens but the first are drafts, and its query length is one of decode: never from its
    lengths alone, which may be those of a fresh prompt or of a chunk of one. The last token of a prompt counts as a decode.

    Args:
        query_lens: [num_sequences], int32, each at least 1.
        context_lens: [num_sequences], int32, each at least 0.
        draft_lens: [num_sequences], int32, how many of each row's tokens are drafts.
        decode_query_lens: the query lengths that count as decode.
    """
    num_sequences = len(query_lens)
    if num_sequences == 0:
        return StepShape(0, 0, None, False)
    num_tokens = int(np.add.reduce(query_lens))
    # A row that is all drafts but for its first token; most steps are tokens without drafts.
    if np.minimum.reduce(context_lens) == 0 or num_tokens - num_sequences != int(np.add.reduce(draft_lens)):
        return StepShape(num_tokens, num_sequences, None, False)
    longest = int(np.maximum.reduce(query_lens))
    if longest * num_sequences == num_tokens:
        decodes = longest in decode_query_lens
        return StepShape(num_tokens, num_sequences, longest if decodes else None, decodes)
    decode = query_lens == decode_query_lens[0]
    for query_len in decode_query_lens[1:]:
        decode |= query_lens == query_len
    return StepShape(num_tokens, num_sequences, None, bool(np.logical_and.reduce(decode)))


def fits(key: GraphKey, shape: StepShape) -> bool:
    """Hot path: returns whether a graph can run a step, padded."""
    return (
        0 < shape.num_tokens <= key.num_tokens
        and (key.num_sequences is None or shape.num_sequences <= key.num_sequences)
        and (key.uniform_query_len is None or key.uniform_query_len == shape.uniform_query_len)
    )
