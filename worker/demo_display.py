"""What the demo shows: texts that grow in panes on a terminal, or as plain lines, and a table of steps."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from modelworker.worker.scheduler import FinishReason, RequestFinished, StepExecuted

_PLAIN_WIDTH = 88
_TWO_COLUMNS_FROM = 90
_MIN_COMFORTABLE_HEIGHT = 6
_MAX_HEIGHT = 8
_REDRAWS_PER_SECOND = 12


@dataclass(eq=False, slots=True)
class Pane:
    """One request on the screen."""

    number: int
    prompt: str
    sampling: str
    num_prompt_tokens: int
    text: str = ""
    num_tokens: int = 0
    state: str = "not here yet"
    is_over: bool = False


class Display(Protocol):
    """Shows requests as they come, grow and end."""

    def arrived(self, pane: Pane, step_id: int) -> None:
        """A request has come."""

    def grew(self, pane: Pane, piece: str) -> None:
        """A request has got text."""

    def ended(self, pane: Pane, finished: RequestFinished) -> None:
        """A request is over."""

    def stepped(self, step: StepExecuted) -> None:
        """A step was executed."""

    def close(self) -> None:
        """Nothing more comes."""


class PlainDisplay:
    """Lines for logs and pipes: a text is printed line by line as it fills them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pending: dict[int, str] = {}

    def arrived(self, pane: Pane, step_id: int) -> None:
        """Says who has come."""
        prompt = _shorten(pane.prompt, _PLAIN_WIDTH)
        self._line(f"[{pane.number}] arrives before step {step_id} ({pane.num_prompt_tokens} tokens, {pane.sampling}): {prompt}")

    def grew(self, pane: Pane, piece: str) -> None:
        """Prints full lines."""
        pending = self._pending.get(pane.number, "") + piece
        while "\n" in pending or len(pending) > _PLAIN_WIDTH:
            end = pending.find("\n", 0, _PLAIN_WIDTH + 1)
            if end < 0:
                end = pending.rfind(" ", 1, _PLAIN_WIDTH)
            if end < 0:
                break
            if pending[:end].strip():
                self._line(f"[{pane.number}]   {pending[:end].strip()}")
            pending = pending[end + 1 :]
        self._pending[pane.number] = pending

    def ended(self, pane: Pane, finished: RequestFinished) -> None:
        """Prints the rest, and how it ended."""
        rest = self._pending.pop(pane.number, "").strip()
        if rest:
            self._line(f"[{pane.number}]   {rest}")
        self._line(f"[{pane.number}] ends after {len(finished.output_ids)} tokens: {finished.error or finished.reason.value}")

    def stepped(self, step: StepExecuted) -> None:
        """Shows nothing: the table at the end does."""

    def close(self) -> None:
        """Shows nothing."""

    def _line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


@dataclass(eq=False)
class PaneDisplay:
    """Panes on a terminal, redrawn in place while texts grow."""

    console: Console
    panes: Sequence[Pane]
    last_step: StepExecuted | None = None
    is_closed: bool = False
    live: Live = field(init=False)

    def __post_init__(self) -> None:
        """Starts drawing."""
        self.live = Live(
            console=self.console, refresh_per_second=_REDRAWS_PER_SECOND, get_renderable=self._render, vertical_overflow="crop"
        )
        self.live.start()

    def arrived(self, pane: Pane, step_id: int) -> None:
        """The next redraw shows it."""

    def grew(self, pane: Pane, piece: str) -> None:
        """The next redraw shows it."""

    def ended(self, pane: Pane, finished: RequestFinished) -> None:
        """The next redraw shows it."""

    def stepped(self, step: StepExecuted) -> None:
        """The next redraw shows it."""
        self.last_step = step

    def close(self) -> None:
        """Leaves a last picture on the screen, with all of the texts."""
        self.is_closed = True
        self.live.stop()

    def _render(self) -> Group:
        is_low = self.console.height < len(self.panes) * _MIN_COMFORTABLE_HEIGHT
        num_columns = 2 if self.console.width >= _TWO_COLUMNS_FROM or is_low else 1
        num_rows = math.ceil(len(self.panes) / num_columns)
        height = max(min((self.console.height - 2) // num_rows, _MAX_HEIGHT), 3)
        grid = Table.grid(expand=True)
        for _ in range(num_columns):
            grid.add_column(ratio=1)
        width = self.console.width // num_columns - 4
        cells = [self._panel(pane, width, None if self.is_closed else height) for pane in self.panes]
        for start in range(0, len(cells), num_columns):
            grid.add_row(*cells[start : start + num_columns])
        return Group(grid, self._status())

    def _panel(self, pane: Pane, width: int, height: int | None) -> Panel:
        """Draws a pane: the prompt and the end of its text, so that what is new is always seen."""
        lines = [Text(_shorten(pane.prompt, width), style="dim"), *Text(pane.text.strip()).wrap(self.console, width)]
        if height is not None:
            room = height - 2
            lines = lines[-1:] if room == 1 else [lines[0], *lines[1:][-(room - 1) :]]
        colour = "green" if pane.is_over else "yellow" if pane.num_tokens else "bright_black"
        return Panel(
            Group(*lines),
            title=f"{pane.number} · {pane.sampling}",
            title_align="left",
            subtitle=pane.state,
            subtitle_align="right",
            border_style=colour,
            height=height,
            box=box.ROUNDED,
        )

    def _status(self) -> Text:
        step = self.last_step
        if step is None:
            return Text("no step yet", style="dim")
        return Text(
            f"step {step.step_id}: {step.num_tokens} tokens of {step.num_sequences} sequences, {step.round_trip_ms:.1f} ms",
            style="dim",
        )


def step_table(steps: Iterable[StepExecuted]) -> Table:
    """Makes the table of steps; consecutive ones of the same shape share a line, with the median of their times."""
    # Two characters between columns: a table of thousands of steps fits 80 columns.
    table = Table(
        box=box.SIMPLE_HEAD, title="Steps", title_justify="left", title_style="bold", collapse_padding=True, pad_edge=False
    )
    for name in ("step", "tokens", "sequences", "decoding", "mode", "padded to", "ms p50", "ms max"):
        table.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for _, same in groupby(steps, key=_shape):
        group = list(same)
        first, last = group[0], group[-1]
        times = [step.round_trip_ms for step in group]
        table.add_row(
            f"{first.step_id}" if len(group) == 1 else f"{first.step_id} - {last.step_id}",
            str(first.num_tokens),
            str(first.num_sequences),
            str(first.num_decodes),
            first.mode,
            str(first.padded_tokens),
            f"{percentile(times, 50):.1f}",
            f"{max(times):.1f}",
        )
    return table


def _shape(step: StepExecuted) -> tuple[int, int, int, str, int]:
    return step.num_tokens, step.num_sequences, step.num_decodes, step.mode, step.padded_tokens


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the smallest value that at least `percent` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(percent / 100 * len(ordered)) - 1, 0)]


def end_of(finished: RequestFinished) -> str:
    """Returns how a request ended, for people."""
    ends = {FinishReason.STOP: "done", FinishReason.LENGTH: "token limit", FinishReason.ERROR: f"failed: {finished.error}"}
    return f"{len(finished.output_ids)} tokens, {ends[finished.reason]}"


def _shorten(text: str, width: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"
