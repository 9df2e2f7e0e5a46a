"""The CPU backend over a recorder; what it captures is tested by the contract."""

import gc
import weakref

import pytest
import torch

from modelworker.graphs.backend import Tensors
from modelworker.graphs.cpu_backend import CpuGraphBackend
from modelworker_testing.aten_recorder import AtenRecorder


def test_close_frees_the_lists_and_then_the_recorder() -> None:
    recorder = AtenRecorder()
    backend = CpuGraphBackend(recorder)
    x = torch.ones(4)
    replay, _ = backend.capture(lambda: (x + 1,))
    replay.close()
    assert [recording.is_closed for recording in recorder.recordings] == [True]
    assert not recorder.is_closed
    backend.close()
    assert recorder.is_closed


def test_a_replay_keeps_the_memory_that_it_writes_to() -> None:
    recorder = AtenRecorder()
    alive = weakref.ref(recorder)
    x = torch.ones(4)
    replay, outputs = CpuGraphBackend(recorder).capture(lambda: (x + 1,))
    del recorder
    gc.collect()
    assert alive() is not None
    x.fill_(5)
    replay()
    assert outputs[0].tolist() == [6.0] * 4
    del replay
    gc.collect()
    assert alive() is None


def test_results_are_their_callers_own() -> None:
    """What the recorder keeps of a list must not be what the list returned: the pool would never get it back."""
    recorder = AtenRecorder()
    backend = CpuGraphBackend(recorder)
    x = torch.ones(4)
    backend.capture(lambda: (x + 1,))
    used = backend.num_bytes
    backend.capture(lambda: (x + 2,))
    assert backend.num_bytes == used > 0


def test_what_a_step_raises_is_raised() -> None:
    def fail() -> Tensors:
        raise ValueError("no such block")

    with pytest.raises(ValueError, match="no such block"):
        CpuGraphBackend(AtenRecorder()).capture(fail)
