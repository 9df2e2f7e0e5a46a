"""What a step says of single tokens: lists, bias, history and masks become fields of its request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.client.packing import IntegersLike, Values, packed


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepTokens:
    """What a step says of single tokens: each None (nothing) or one entry per row of the step; the .proto has the details.

    Attributes:
        allowed_ids: the only tokens that each row may sample; an empty list is no restriction.
        banned_ids: tokens that each row may not sample.
        logit_bias: of each row, what is added to the logits of tokens.
        prompt_ids: of rows with penalties; an empty list for others.
        output_ids: likewise, the tokens after the prompt.
        grammar_rows: ascending, the row of each mask; a row with drafts is named 1 + draft_len times.
        grammar_masks: [len(grammar_rows), vocab_size], which tokens are allowed.
    """

    allowed_ids: Sequence[IntegersLike] | None = None
    banned_ids: Sequence[IntegersLike] | None = None
    logit_bias: Sequence[Mapping[int, float]] | None = None
    prompt_ids: Sequence[IntegersLike] | None = None
    output_ids: Sequence[IntegersLike] | None = None
    grammar_rows: IntegersLike | None = None
    grammar_masks: npt.NDArray[np.bool_] | None = None


def add_tokens(request: pb.ExecuteStepRequest, tokens: StepTokens) -> None:
    """Writes them into the request.

    Raises:
        ValueError: a value does not fit its field's type.
    """
    if tokens.allowed_ids is not None:
        request.allowed_ids.MergeFromString(packed(pb.TokenIdLists, _list_fields(tokens.allowed_ids)))
    if tokens.banned_ids is not None:
        request.banned_ids.MergeFromString(packed(pb.TokenIdLists, _list_fields(tokens.banned_ids)))
    if tokens.logit_bias is not None:
        values = np.array([value for row in tokens.logit_bias for value in row.values()], np.float32)
        fields = _list_fields([list(row) for row in tokens.logit_bias]) | {"values": (values, "<f4")}
        request.logit_bias.MergeFromString(packed(pb.LogitBias, fields))
    if tokens.prompt_ids is not None or tokens.output_ids is not None:
        request.history.MergeFromString(packed(pb.TokenHistory, _history_fields(tokens)))
    if tokens.grammar_masks is not None:
        rows = np.arange(len(tokens.grammar_masks)) if tokens.grammar_rows is None else tokens.grammar_rows
        request.grammar.MergeFromString(packed(pb.GrammarMasks, {"rows": (rows, "<i4")}))
        request.grammar.bitmasks = _bits(tokens.grammar_masks)


def _list_fields(lists: Sequence[IntegersLike]) -> dict[str, tuple[Values | None, str]]:
    return {"counts": ([len(ids) for ids in lists], "<i4"), "token_ids": (_joined(lists), "<i4")}


def _history_fields(tokens: StepTokens) -> dict[str, tuple[Values | None, str]]:
    num_rows = len(tokens.prompt_ids if tokens.prompt_ids is not None else tokens.output_ids or ())
    empty: Sequence[IntegersLike] = [()] * num_rows
    prompts = empty if tokens.prompt_ids is None else tokens.prompt_ids
    outputs = empty if tokens.output_ids is None else tokens.output_ids
    return {
        "prompt_lens": ([len(ids) for ids in prompts], "<i4"),
        "output_lens": ([len(ids) for ids in outputs], "<i4"),
        "token_ids": (_joined([ids for row in zip(prompts, outputs, strict=True) for ids in row]), "<i4"),
    }


def _joined(lists: Sequence[IntegersLike]) -> npt.NDArray[np.integer[Any]]:
    """Puts lists of integers one behind the other."""
    return np.concatenate([np.zeros(0, np.int64), *(np.asarray(ids) for ids in lists if len(ids))])


def _bits(masks: npt.NDArray[np.bool_]) -> bytes:
    """Packs masks [n, size] into little-endian words of 32 bits."""
    padded = np.pad(masks, ((0, 0), (0, -masks.shape[1] % 32)))
    return np.packbits(padded, axis=1, bitorder="little").tobytes()
