"""Parses, checks and encodes logprobs of tokens that the router sends."""

import numpy as np

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.batch import PromptLogprobs, PromptLogprobsBatch
from modelworker.worker.description import WorkerDescription
from modelworker.worker.wire.checks import StepFields
from modelworker.worker.wire.violations import Violations, check_optional_length


def parse_prompt_logprobs(fields: StepFields, description: WorkerDescription, violations: Violations) -> PromptLogprobsBatch | None:
    """Makes the rows' wishes; None if no row has any. What is wrong goes to `violations`, and the result is then meaningless."""
    if not (fields.request.prompt_logprobs or fields.request.next_prompt_ids):
        return None
    num_sequences, vocab_size = fields.num_sequences, description.model.vocab_size
    wanted = np.array(fields.request.prompt_logprobs, np.bool_)
    next_ids = np.array(fields.request.next_prompt_ids, np.int32)
    if not check_optional_length("prompt_logprobs", wanted, num_sequences, violations):
        wanted = np.zeros(num_sequences, np.bool_)
    if not check_optional_length("next_prompt_ids", next_ids, num_sequences, violations):
        next_ids = np.full(num_sequences, -1, np.int32)
    outside = (next_ids < -1) | (next_ids >= vocab_size)
    unwanted = (next_ids != -1) & ~wanted & ~outside & ("prompt_logprobs" not in violations)
    if outside.any():
        violations.add_entries(
            "next_prompt_ids",
            np.flatnonzero(outside),
            lambda row: f"row {row}: found {next_ids[row]}, expected -1 (none) .. {vocab_size - 1}",
        )
    if unwanted.any():
        violations.add_entries(
            "next_prompt_ids",
            np.flatnonzero(unwanted),
            lambda row: f"row {row}: found {next_ids[row]}, expected -1, because prompt_logprobs of the row is not true",
        )
    return PromptLogprobsBatch(wanted=wanted, next_ids=next_ids) if wanted.any() else None


def encode_prompt_logprobs(logprobs: PromptLogprobs) -> pb.PromptLogprobs:
    """Hot path: writes logprobs into the answer."""
    return pb.PromptLogprobs(
        counts=logprobs.counts.tolist(),
        token_ids=logprobs.token_ids.tolist(),
        values=logprobs.values.tolist(),
        ranks=logprobs.ranks.tolist(),
    )
