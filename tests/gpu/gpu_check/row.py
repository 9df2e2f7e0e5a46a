"""A row of the table, and the table."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from modelworker.worker.terminal import format_table

Status = Literal["ok", "FAILED", "skipped", "not captured", "degraded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One result.

    Attributes:
        part: of the check.
        what: is measured or checked.
        way: in which it runs; "" where there is only one.
        value: the figure; None: there is none.
        unit: of the figure.
        share: of the limit that was measured in the same run, 1 at best; None: it is held against none.
        status: all but "ok" say why in the note.
        note: for people.
    """

    part: str
    what: str
    way: str = ""
    value: float | None = None
    unit: str = ""
    share: float | None = None
    status: Status = "ok"
    note: str = ""


def row_to_json(row: Row) -> str:
    """Writes a row on one line."""
    return json.dumps(asdict(row))


def row_from_json(line: str) -> Row:
    """Reads what `row_to_json` wrote."""
    return Row(**json.loads(line))


def format_rows(rows: Iterable[Row]) -> str:
    """Lays rows out for people."""
    cells = [
        (
            row.part,
            row.what,
            row.way,
            "" if row.value is None else f"{_figure(row.value)} {row.unit}".rstrip(),
            "" if row.share is None else f"{row.share:.2f}",
            row.note if row.status == "ok" else f"{row.status}: {row.note}",
        )
        for row in rows
    ]
    return format_table(cells, header=("part", "what", "way", "result", "of limit", "note"), right=(3, 4))


def _figure(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
