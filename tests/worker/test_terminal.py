import fcntl
import io
import os
import struct
import termios

import pytest

from modelworker.worker.stage import StageTracker
from modelworker.worker.terminal import TerminalProgress, format_bytes, format_table, progress_line


def screen(text: str) -> list[str]:
    """What a terminal shows after `text`: its lines, without what was erased."""
    lines = [""]
    for part in text.replace("\r\x1b[2K", "\0").replace("\n", "\n\1").split("\1"):
        lines[-1] += part.rsplit("\0", 1)[-1] if "\0" in part else part
        if part.endswith("\n"):
            lines.append("")
    return [line.rstrip("\n") for line in lines]


def test_a_stage_leaves_one_line_with_its_time_and_amount():
    stream = io.StringIO()
    progress = TerminalProgress(stream)
    with progress.stage("loading weights", 10, "tensors") as advance:
        advance(4)
        advance(6)
    (line, rest) = screen(stream.getvalue())
    assert line.startswith("loading weights: 0.")
    assert line.endswith("s, 10 tensors")
    assert rest == ""


def test_a_stage_that_fails_leaves_nothing_on_the_screen():
    stream = io.StringIO()
    with pytest.raises(RuntimeError), TerminalProgress(stream).stage("loading weights", 10):
        raise RuntimeError
    assert screen(stream.getvalue()) == [""]


def test_a_line_is_cut_to_the_terminal_so_that_all_of_it_can_be_erased():
    primary, secondary = os.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    with os.fdopen(secondary, "w") as stream, os.fdopen(primary, "rb", buffering=0) as screen:
        with TerminalProgress(stream).stage("importing a file with a long name", 10**9, "parameters"):
            pass
        drawn = screen.read(4096).decode()
    bars = [line for line in drawn.replace("\n", "\r").split("\r") if "[" in line.replace("\x1b[2K", "")]
    assert bars
    assert all(len(line.replace("\x1b[2K", "")) < 40 for line in bars)


def test_the_bar_is_taken_away_before_a_log_line():
    stream = io.StringIO()
    progress = TerminalProgress(stream)
    with progress.stage("warming up"):
        progress.hide()
        stream.write("a log line\n")
    assert screen(stream.getvalue())[0] == "a log line"


def test_progress_lines_show_share_and_amounts():
    assert progress_line("loading", 512, 1024, "bytes", 3.2) == "loading [############............]  50%  512 B of 1.0 KiB, 3 s"
    assert progress_line("loading", 3000, 2000, "bytes", 3.2).startswith("loading [########################] 100%")
    assert progress_line("warming up", 0, None, "", 2.0) == "warming up ... 2 s"
    assert progress_line("fetching", 5, None, "files", 2.0) == "fetching ... 5 files, 2 s"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (64 * 2**20, "64.0 MiB"), (2**30 - 1, "1.0 GiB"), (3 * 2**50, "3072.0 TiB")],
)
def test_sizes_are_shown_in_binary_units(number: int, text: str):
    assert format_bytes(number) == text


def test_tables_are_aligned_without_trailing_spaces():
    table = format_table([("a", "1", "x"), ("long name", "1,000", "")], header=("name", "size", ""), right=(1,))
    assert table.splitlines() == ["name        size", "a              1  x", "long name  1,000"]


def test_a_table_with_rows_of_different_length_is_refused():
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        format_table([("a", "b"), ("a",)])


def test_the_tracker_says_the_innermost_stage_and_its_share():
    stream = io.StringIO()
    tracker = StageTracker(TerminalProgress(stream))
    assert str(tracker) == "preparing"
    with tracker.stage("starting"):
        with tracker.stage("loading weights", 200, "tensors") as advance:
            advance(80)
            advance(6)
            assert str(tracker) == "loading weights 43 %"
        assert str(tracker) == "starting"
    assert "loading weights: 0.0 s, 86 tensors" in screen(stream.getvalue())
