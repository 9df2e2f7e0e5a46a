"""What `CudaGraphBackend` gets from torch and CUDA, beyond the contract that every backend keeps."""

import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from modelworker.graphs.backend import GraphBackend
from modelworker.graphs.cpu_backend import CpuGraphBackend
from modelworker.graphs.cuda_backend import CudaGraphBackend
from modelworker.graphs.dispatch import Dispatcher
from modelworker.graphs.graph_set import CaptureReport, GraphSet
from modelworker.graphs.settings import CaptureMode, GraphSettings
from modelworker_testing.aten_recorder import AtenRecorder
from modelworker_testing.graph_world import GraphWorld, Row

pytestmark = pytest.mark.cuda
MAX_SEQUENCES, MAX_TOKENS = 4, 16


class Captured(NamedTuple):
    world: GraphWorld
    graphs: GraphSet
    report: CaptureReport


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def captured(device: torch.device) -> Iterator[Captured]:
    backend: GraphBackend = CudaGraphBackend(device) if device.type == "cuda" else CpuGraphBackend(AtenRecorder())
    world = GraphWorld(max_sequences=MAX_SEQUENCES, max_tokens=MAX_TOKENS, device=device.type)
    settings = GraphSettings(max_sequences=MAX_SEQUENCES, max_tokens_per_step=MAX_TOKENS, mode=CaptureMode.FULL_AND_PIECEWISE)
    dispatcher = Dispatcher(settings)
    graphs = GraphSet(backend=backend, programs=world.programs())
    report = graphs.capture(dispatcher, inputs_for=world.inputs_for)
    assert report.failures == ()
    yield Captured(world, graphs, report)
    graphs.close()


def only_cuda(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("is about CUDA")


def test_a_replay_launches_and_waits_for_nothing(captured: Captured, device: torch.device) -> None:
    only_cuda(device)
    world = captured.world
    for key in captured.report.captured:
        inputs = world.padded_inputs([Row(0, 1)], key)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            captured.graphs.run(key, inputs)
        finally:
            torch.cuda.set_sync_debug_mode(before)
    torch.cuda.synchronize(device)


def test_the_mode_that_forbids_waiting_does_so(device: torch.device) -> None:
    only_cuda(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device=device).item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_replay_runs_on_the_current_stream_behind_what_was_launched_there(captured: Captured, device: torch.device) -> None:
    only_cuda(device)
    world = captured.world
    rows = [Row(0, 1), Row(1, 1)]
    world.contexts[:2] = [4, 7]
    expected = world.eager(rows)
    key = next(key for key in captured.report.captured if key.num_tokens == 2 and key.uniform_query_len == 1)
    inputs = world.padded_inputs(rows, key)
    right = inputs[0].clone()
    inputs[0].zero_()
    busy = torch.eye(4096, device=device)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        # Long enough for a replay that did not wait to read the zeros.
        for _ in range(20):
            busy = busy @ busy
        inputs[0].copy_(right)
        (found,) = captured.graphs.run(key, inputs)
        found = found[:2].clone()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def private_bytes() -> dict[tuple[int, int], int]:
    """Memory of each pool of graphs."""
    sizes: dict[tuple[int, int], int] = {}
    for segment in torch.cuda.memory_snapshot():
        pool = tuple(segment["segment_pool_id"])
        if pool != (0, 0):
            sizes[pool] = sizes.get(pool, 0) + segment["total_size"]
    return sizes


def test_all_graphs_lie_in_one_pool_which_is_counted_and_given_back(device: torch.device) -> None:
    only_cuda(device)
    before = private_bytes()
    world = GraphWorld(max_sequences=MAX_SEQUENCES, max_tokens=MAX_TOKENS, device=device.type)
    settings = GraphSettings(max_sequences=MAX_SEQUENCES, max_tokens_per_step=MAX_TOKENS)
    graphs = GraphSet(backend=CudaGraphBackend(device), programs=world.programs())
    report = graphs.capture(Dispatcher(settings), inputs_for=world.inputs_for)
    (pool,) = set(private_bytes()) - set(before)
    assert 0 < private_bytes()[pool] <= report.num_bytes < 2**30
    graphs.close()
    assert private_bytes() == before


_FAILED_CAPTURE = """
import torch
from modelworker.graphs.cuda_backend import CudaGraphBackend

device = torch.device("cuda", 0)
backend = CudaGraphBackend(device)
x = torch.ones(4, device=device)
with torch.inference_mode():
    with backend.session():
        try:
            backend.capture(lambda: (x * float(x.sum()),))
        except RuntimeError as error:
            print("refused:", str(error).splitlines()[0])
        else:
            raise SystemExit("a capture that waits for the device was not refused")
        x + 1
        replay, (y,) = backend.capture(lambda: (x * 2,))
    torch.cuda.empty_cache()
    x.fill_(21)
    replay()
    torch.ones(1 << 24, device=device)
    assert y.tolist() == [42.0] * 4, y
    replay.close()
    del y
    backend.close()
    torch.cuda.empty_cache()
print("works")
"""


def test_after_a_capture_that_cuda_refuses_the_allocator_and_the_next_capture_work(device: torch.device) -> None:
    """In a process of its own: where it fails, nothing on the device works any more."""
    only_cuda(device)
    done = subprocess.run([sys.executable, "-c", _FAILED_CAPTURE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("refused:")
    assert done.stdout.endswith("works\n")
