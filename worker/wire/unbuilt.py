"""Refuses fields of the protocol that this worker does not implement, by name. It never ignores one."""

from collections.abc import Sequence

import numpy as np
from google.protobuf.message import Message

from modelworker.worker.wire.capabilities import FIELD_CAPABILITIES
from modelworker.worker.wire.violations import Violations, check_optional_length

REQUIRED_FIELDS = frozenset({"query_lens", "context_lens", "token_ids", "block_counts", "block_ids"})

# Per-row arrays for which the protocol names a neutral value: a row that holds it asks for nothing, so it is accepted.
NEUTRAL_VALUES = {
    "draft_lens": 0,
    "prompt_logprobs": False,
    "next_prompt_ids": -1,
    "sampling.presence": 0.0,
    "sampling.frequency": 0.0,
    "sampling.repetition": 1.0,
}

NOT_IMPLEMENTED = "this worker does not implement it (see WorkerInfo.capabilities)"
ACCEPTED_FIELDS = REQUIRED_FIELDS | {capability.partition("=")[0] for capability in FIELD_CAPABILITIES}
_GROUPS = {path.partition(".")[0] for path in (*ACCEPTED_FIELDS, *NEUTRAL_VALUES) if "." in path}


def refuse_unbuilt_fields(message: Message, num_sequences: int, violations: Violations, prefix: str = "") -> None:
    """Refuses known fields that are set and that this worker does not implement.

    Looks at what is set, not at a list of names: a field that is added to the protocol is refused until it is a capability.
    """
    for descriptor, value in message.ListFields():
        path = prefix + descriptor.name
        if path in _GROUPS:
            refuse_unbuilt_fields(value, num_sequences, violations, f"{path}.")
        elif path in ACCEPTED_FIELDS or path in violations:  # An array that is too long already is not looked at.
            continue
        elif path in NEUTRAL_VALUES:
            _check_neutral(path, value, num_sequences, violations)
        else:
            violations.add(path, f"found set, expected unset: {NOT_IMPLEMENTED}")


def _check_neutral(path: str, values: Sequence[float], num_sequences: int, violations: Violations) -> None:
    if not check_optional_length(path, values, num_sequences, violations):
        return
    array = np.array(values)
    neutral = NEUTRAL_VALUES[path]
    rows = np.flatnonzero(array != neutral)
    if rows.size:
        violations.add(
            f"{path}[{rows[0]}]",
            f"row {rows[0]} (of {rows.size} such rows): found {array[rows[0]]}, expected the neutral {neutral}: {NOT_IMPLEMENTED}",
        )
