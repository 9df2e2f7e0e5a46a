"""Parses and checks what a step says of single tokens: allowed and banned ones, grammar masks, bias, history.

Each `parse_*` returns None where no row says anything; what is wrong goes to `violations`, and the result is then None, too.
"""

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from modelworker.worker.arrays import Int32Array, Int64Array
from modelworker.worker.batch import GrammarMasks, LogitBias, SamplingBatch, TokenHistory, TokenLists
from modelworker.worker.description import WorkerDescription
from modelworker.worker.wire.checks import StepFields
from modelworker.worker.wire.violations import Violations, check_length

_LARGEST_COUNT = 2**31 - 1


def parse_token_lists(
    name: Literal["allowed_ids", "banned_ids"], fields: StepFields, description: WorkerDescription, violations: Violations
) -> TokenLists | None:
    """Parses token ids of each row."""
    if not fields.request.HasField(name):
        return None
    lists = getattr(fields.request, name)
    return _parse_lists(name, lists.counts, lists.token_ids, fields, description, violations)


def parse_logit_bias(fields: StepFields, description: WorkerDescription, violations: Violations) -> LogitBias | None:
    """Parses what is added to single logits."""
    if not fields.request.HasField("logit_bias"):
        return None
    bias = fields.request.logit_bias
    values = np.array(bias.values, np.float32)
    has_values = check_length("logit_bias.values", values, len(bias.token_ids), violations, "one per entry of logit_bias.token_ids")
    finite = np.isfinite(values)
    if not finite.all():
        violations.add_entries(
            "logit_bias.values", np.flatnonzero(~finite), lambda index: f"found {values[index]}, expected a finite value"
        )
    tokens = _parse_lists("logit_bias", bias.counts, bias.token_ids, fields, description, violations)
    if tokens is None or not has_values:
        return None
    keys = np.repeat(np.arange(fields.num_sequences), tokens.counts) * description.model.vocab_size + tokens.token_ids
    order = np.argsort(keys, kind="stable")
    repeated = order[1:][keys[order[1:]] == keys[order[:-1]]]
    if repeated.size:
        violations.add_entries(
            "logit_bias.token_ids",
            np.sort(repeated),
            lambda index: f"found {tokens.token_ids[index]} once more in its row, expected each token once",
        )
    return LogitBias(tokens=tokens, values=values)


def parse_history(fields: StepFields, description: WorkerDescription, violations: Violations) -> TokenHistory | None:
    """Parses prompt and output tokens."""
    history = fields.request.history
    if not (len(history.prompt_lens) or len(history.output_lens) or len(history.token_ids)):
        return None
    prompt_lens, output_lens = np.array(history.prompt_lens, np.int32), np.array(history.output_lens, np.int32)
    token_ids = np.array(history.token_ids, np.int32)
    are_right = True
    for name, lens in (("history.prompt_lens", prompt_lens), ("history.output_lens", output_lens)):
        are_right &= _check_counts(name, lens, fields.num_sequences, violations)
    if are_right:
        num_tokens = int(prompt_lens.sum(dtype=np.int64) + output_lens.sum(dtype=np.int64))
        are_right = check_length(
            "history.token_ids", token_ids, num_tokens, violations, "the sum of history.prompt_lens and history.output_lens"
        )
    are_right &= _check_token_ids("history.token_ids", token_ids, description, violations)
    return TokenHistory(prompt_lens=prompt_lens, output_lens=output_lens, token_ids=token_ids) if are_right else None


def check_history(fields: StepFields, sampling: SamplingBatch, violations: Violations) -> None:
    """Rows with penalties that sample have a history that reaches their context, and not beyond their first sampled token.

    Between a history and its context may stand tokens that the worker has kept; whether it has them is known at the execution.
    """
    history, context_lens = sampling.history, fields.context_lens.astype(np.int64)
    lens: Int64Array = np.zeros(fields.num_sequences, np.int64)
    if history is not None:
        lens = history.prompt_lens.astype(np.int64) + history.output_lens
    samples = fields.sample if len(fields.sample) else np.ones(fields.num_sequences, np.bool_)
    drafts = fields.draft_lens if len(fields.draft_lens) else np.zeros(fields.num_sequences, np.int32)
    most = context_lens + fields.query_lens - drafts
    may_be_kept = fields.request.step_id > 0 and len(fields.request.sequence_ids) > 0
    least = np.zeros_like(lens) if may_be_kept else context_lens
    bad = sampling.has_penalties & samples & ((lens < least) | (lens > most))
    if bad.any():
        violations.add_entries(
            "history.prompt_lens",
            np.flatnonzero(bad),
            lambda row: (
                f"row {row}: found {lens[row]} tokens of prompt and output, expected {least[row]} .. {most[row]}: "
                f"from the tokens of the context to those before the first one that is sampled"
            ),
        )


def parse_grammar(fields: StepFields, description: WorkerDescription, violations: Violations) -> GrammarMasks | None:
    """Parses masks of allowed tokens."""
    grammar = fields.request.grammar
    if not (len(grammar.rows) or grammar.bitmasks):
        return None
    rows = np.array(grammar.rows, np.int32)
    width = 4 * -(-description.model.vocab_size // 32)
    are_right = True
    if len(grammar.bitmasks) != len(rows) * width:
        are_right = False
        violations.add(
            "grammar.bitmasks",
            f"found {len(grammar.bitmasks)} bytes, expected {len(rows) * width}: for each of {len(rows)} rows "
            f"ceil({description.model.vocab_size} / 32) words of 4 bytes",
        )
    are_right &= _check_grammar_rows(rows, fields, violations)
    return GrammarMasks(rows=rows, bits=np.frombuffer(grammar.bitmasks, np.uint8).reshape(-1, width)) if are_right else None


def _check_grammar_rows(rows: Int32Array, fields: StepFields, violations: Violations) -> bool:
    outside = (rows < 0) | (rows >= fields.num_sequences)
    outside[1:] |= rows[1:] < rows[:-1]
    if outside.any():
        violations.add_entries(
            "grammar.rows",
            np.flatnonzero(outside),
            lambda index: f"found {rows[index]}, expected rows 0 .. {fields.num_sequences - 1} in rising order",
        )
        return False
    if "draft_lens" in violations:
        return False
    expected = 1 + (fields.draft_lens if len(fields.draft_lens) else np.zeros(fields.num_sequences, np.int32))
    counts = np.bincount(rows, minlength=fields.num_sequences)
    wrong = np.flatnonzero((counts > 0) & (counts != expected))
    if wrong.size:
        firsts = np.searchsorted(rows, wrong)
        violations.add_entries(
            "grammar.rows",
            firsts,
            lambda index: (
                f"found {counts[rows[index]]} masks of row {rows[index]}, expected {expected[rows[index]]} (1 + draft_len)"
            ),
        )
    return wrong.size == 0


def _parse_lists(
    name: str, counts: Any, token_ids: Any, fields: StepFields, description: WorkerDescription, violations: Violations
) -> TokenLists | None:
    """Parses `counts` and `token_ids` of a message, which are repeated fields of integers."""
    lists = TokenLists(counts=np.array(counts, np.int32), token_ids=np.array(token_ids, np.int32))
    if not (len(lists.counts) or len(lists.token_ids)):
        return None
    are_right = _check_counts(f"{name}.counts", lists.counts, fields.num_sequences, violations)
    if are_right:
        total = int(lists.counts.sum(dtype=np.int64))
        are_right = check_length(f"{name}.token_ids", lists.token_ids, total, violations, f"the sum of {name}.counts")
    are_right &= _check_token_ids(f"{name}.token_ids", lists.token_ids, description, violations)
    return lists if are_right and len(lists.token_ids) else None


def _check_counts(name: str, counts: Int32Array, num_sequences: int, violations: Violations) -> bool:
    has_length = check_length(name, counts, num_sequences, violations)
    return _check_entries(name, counts, range(_LARGEST_COUNT + 1), "at least 0", violations) and has_length


def _check_token_ids(name: str, token_ids: Int32Array, description: WorkerDescription, violations: Violations) -> bool:
    vocab_size = description.model.vocab_size
    return _check_entries(name, token_ids, range(vocab_size), f"0 .. {vocab_size - 1}", violations)


def _check_entries(name: str, values: npt.NDArray[np.int32], bounds: range, expected: str, violations: Violations) -> bool:
    if values.size == 0 or (values.min() >= bounds.start and values.max() < bounds.stop):
        return True
    bad = np.flatnonzero((values < bounds.start) | (values >= bounds.stop))
    violations.add_entries(name, bad, lambda index: f"found {values[index]}, expected {expected}")
    return False
