"""Reads W3C Trace Context."""

import re

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?", re.ASCII)
# A header of version 00 has 55 characters; later versions may be longer, but not without bound.
_MAX_CHARACTERS = 256


def trace_id_of(traceparent: str) -> str:
    """Returns the trace id (32 hex digits), or "" where there is none: a caller ignores what it can't parse.

    Versions after 00 are read as far as 00 goes, as https://www.w3.org/TR/trace-context/#versioning-of-traceparent asks.
    """
    match = _TRACEPARENT.fullmatch(traceparent) if len(traceparent) <= _MAX_CHARACTERS else None
    if match is None:
        return ""
    version, trace_id, parent_id, later = match.groups()
    if version == "ff" or (version == "00" and later is not None) or not trace_id.strip("0") or not parent_id.strip("0"):
        return ""
    return trace_id
