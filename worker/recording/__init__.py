"""Recording of executed steps, off by default: a wrong token in the field becomes a file for `modelworker replay`.

The engine thread hands each step over (`RecordingEngine`), a thread of its own encodes and writes it (`StepRecorder`); `read_steps`
reads what was written. The format stands in `file`.
"""

from modelworker.worker.recording.engine import RecordingEngine, RepeatableEngine
from modelworker.worker.recording.facts import facts_of
from modelworker.worker.recording.file import (
    FILE_PATTERN,
    Record,
    RecordingFile,
    RecordingHeader,
    RecordKind,
    create_file,
    encode_header,
)
from modelworker.worker.recording.reader import ExecutedStep, ReleasedSequences, read_steps
from modelworker.worker.recording.recorder import StepRecorder, prepare_folder

__all__ = [
    "FILE_PATTERN",
    "ExecutedStep",
    "Record",
    "RecordKind",
    "RecordingEngine",
    "RecordingFile",
    "RecordingHeader",
    "ReleasedSequences",
    "RepeatableEngine",
    "StepRecorder",
    "create_file",
    "encode_header",
    "facts_of",
    "prepare_folder",
    "read_steps",
]
