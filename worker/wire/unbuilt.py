"""Refuses fields of the protocol that this worker does not implement, by name. It never ignores one."""

from google.protobuf.message import Message

from modelworker.worker.wire.capabilities import FIELD_CAPABILITIES
from modelworker.worker.wire.violations import Violations

REQUIRED_FIELDS = frozenset({"query_lens", "context_lens", "token_ids", "block_counts", "block_ids"})

NOT_IMPLEMENTED = "this worker does not implement it (see WorkerInfo.capabilities)"
ACCEPTED_FIELDS = REQUIRED_FIELDS | frozenset(FIELD_CAPABILITIES)
_GROUPS = {path.partition(".")[0] for path in ACCEPTED_FIELDS if "." in path}


def refuse_unbuilt_fields(message: Message, violations: Violations, prefix: str = "") -> None:
    """Refuses known fields that are set and that this worker does not implement.

    Looks at what is set, not at a list of names: a field that is added to the protocol is refused until it is a capability.
    """
    for descriptor, value in message.ListFields():
        path = prefix + descriptor.name
        if path in _GROUPS:
            refuse_unbuilt_fields(value, violations, f"{path}.")
        elif path not in ACCEPTED_FIELDS:
            violations.add(path, f"found set, expected unset: {NOT_IMPLEMENTED}")
