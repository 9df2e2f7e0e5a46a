"""What the CUDA backend asks of `torch.cuda`, in which order. What it gets is tested on a GPU, by the contract."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from modelworker.graphs.cuda_backend import CudaGraphBackend

DEVICE = torch.device("cuda", 1)
POOL = (0, 7)


class Stream:
    def __init__(self, notes: list[str], name: str) -> None:
        self._notes, self.name = notes, name

    def wait_stream(self, other: "Stream") -> None:
        self._notes.append(f"{self.name} waits for {other.name}")


class Graph:
    def __init__(self, cuda: "Cuda", number: int) -> None:
        self._cuda, self._name = cuda, f"graph {number}"

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        self._cuda.notes.append(f"{self._name} begins on {self._cuda.current.name} in {pool}, {capture_error_mode}")
        self._cuda.free_bytes -= 10  # what the driver takes
        self._cuda.memory.pools_in_use.append(pool)

    def capture_end(self) -> None:
        self._cuda.notes.append(f"{self._name} ends")
        if not self._cuda.invalidated or self._cuda.failed_captures_end:
            self._cuda.memory.pools_in_use.pop()
        if self._cuda.invalidated:
            raise RuntimeError("the capture was invalidated")

    def replay(self) -> None:
        self._cuda.notes.append(f"{self._name} is launched on {self._cuda.current.name}")

    def reset(self) -> None:
        self._cuda.notes.append(f"{self._name} is reset")


class Memory:
    """Stands in for the module `torch.cuda.memory`: knows into which pools the allocator allocates because of captures."""

    def __init__(self) -> None:
        self.pools_in_use: list[object] = []

    def _cuda_endAllocateToPool(self, device_index: int, pool: object) -> None:  # noqa: N802
        assert device_index == DEVICE.index
        if pool not in self.pools_in_use:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.pools_in_use.remove(pool)


class Untold:
    """A module `torch.cuda.memory` without the function."""

    def __init__(self) -> None:
        self.pools_in_use: list[object] = []


class Cuda:
    """Stands in for the module `torch.cuda`: notes what is called, and in which stream."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.main = self.current = Stream(self.notes, "main")
        self.memory: Any = Memory()
        self.invalidated = False
        self.failed_captures_end = True
        self.free_bytes, self.reserved = 1000, 100
        self.segments: list[dict[str, Any]] = []
        self.graphs: list[weakref.ref[Graph]] = []

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802
        self.notes.append(f"new stream on {device}")
        return Stream(self.notes, "side")

    def CUDAGraph(self) -> Graph:  # noqa: N802
        graph = Graph(self, len(self.graphs) + 1)
        self.graphs.append(weakref.ref(graph))
        return graph

    def graph_pool_handle(self) -> tuple[int, int]:
        self.notes.append("new pool")
        return POOL

    def current_stream(self, device: torch.device) -> Stream:
        assert device == DEVICE
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self, device: torch.device) -> None:
        assert device == DEVICE
        self.notes.append("synchronize")

    def empty_cache(self) -> None:
        assert not self.memory.pools_in_use, "memory is freed while a capture is under way"
        self.notes.append("empty cache")

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        assert device == DEVICE
        return self.free_bytes, 2000

    def memory_reserved(self, device: torch.device) -> int:
        assert device == DEVICE
        return self.reserved

    def memory_snapshot(self) -> list[dict[str, Any]]:
        return self.segments


def test_all_graphs_share_one_pool_and_one_stream_and_the_device_is_synchronized_only_around_them() -> None:
    cuda = Cuda()
    backend = CudaGraphBackend(DEVICE, cuda=cuda)
    with backend.session():
        cuda.notes.append(f"warm-up on {cuda.current.name}")
        first, outputs = backend.capture(lambda: (torch.ones(2),))
        second, _ = backend.capture(tuple)
    assert outputs[0].tolist() == [1.0, 1.0]
    second()
    first()
    assert cuda.notes == [
        *("new stream on cuda:1", "new pool"),
        *("synchronize", "empty cache", "side waits for main", "warm-up on side"),
        *("graph 1 begins on side in (0, 7), thread_local", "graph 1 ends"),
        *("graph 2 begins on side in (0, 7), thread_local", "graph 2 ends"),
        *("main waits for side", "synchronize", "empty cache"),
        *("graph 2 is launched on main", "graph 1 is launched on main"),
    ]


def test_a_capture_outside_of_the_session_is_refused() -> None:
    backend = CudaGraphBackend(DEVICE, cuda=Cuda())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="within the backend's session"):
            backend.capture(tuple)
        with backend.session():
            pass


@pytest.mark.parametrize("invalidated", [False, True])
def test_a_failed_capture_is_ended_and_freed_and_raises_its_own_error(invalidated: bool) -> None:
    cuda = Cuda()
    backend = CudaGraphBackend(DEVICE, cuda=cuda)

    def fail() -> tuple[()]:
        cuda.invalidated = invalidated
        raise ValueError("the model reads a value")

    with backend.session():
        with pytest.raises(ValueError, match="the model reads a value"):
            backend.capture(fail)
        assert [note for note in cuda.notes if note.startswith("graph 1")][1:] == ["graph 1 ends", "graph 1 is reset"]
        cuda.invalidated = False
        backend.capture(tuple)
    assert cuda.current is cuda.main


@pytest.mark.parametrize("failed_captures_end", [False, True])
@pytest.mark.parametrize("raises", [False, True])
def test_after_a_failed_capture_the_allocator_takes_none_to_be_under_way(raises: bool, failed_captures_end: bool) -> None:
    """Before torch 2.13, and from then on."""
    cuda = Cuda()
    cuda.failed_captures_end = failed_captures_end
    backend = CudaGraphBackend(DEVICE, cuda=cuda)

    def fail() -> tuple[()]:
        cuda.invalidated = True
        if raises:
            raise RuntimeError("the capture was invalidated")
        return ()

    with backend.session():
        with pytest.raises(RuntimeError, match="the capture was invalidated"):
            backend.capture(fail)
        assert not cuda.memory.pools_in_use
        cuda.invalidated = False
        backend.capture(tuple)
    backend.close()


def test_a_graph_whose_capture_failed_outlives_an_allocator_that_can_not_be_told() -> None:
    cuda = Cuda()
    cuda.memory = Untold()
    cuda.failed_captures_end, cuda.invalidated = False, True
    backend = CudaGraphBackend(DEVICE, cuda=cuda)

    def fail() -> None:
        with backend.session():
            with pytest.raises(RuntimeError, match="the capture was invalidated"):
                backend.capture(tuple)
            gc.collect()
            assert cuda.graphs[0]() is not None

    with pytest.raises(AssertionError, match="under way"):
        fail()


def test_an_error_at_the_end_of_a_capture_is_raised_and_the_graph_freed() -> None:
    cuda = Cuda()
    backend = CudaGraphBackend(DEVICE, cuda=cuda)
    cuda.invalidated = True
    with backend.session(), pytest.raises(RuntimeError, match="the capture was invalidated"):
        backend.capture(tuple)
    assert "graph 1 is reset" in cuda.notes


def test_a_session_that_fails_leaves_the_stream_of_before() -> None:
    cuda = Cuda()
    backend = CudaGraphBackend(DEVICE, cuda=cuda)
    with pytest.raises(ValueError, match="warm-up"), backend.session():
        raise ValueError("warm-up")
    assert cuda.current is cuda.main


def test_memory_is_that_of_the_pool_and_what_the_driver_took_meanwhile() -> None:
    cuda = Cuda()
    backend = CudaGraphBackend(DEVICE, cuda=cuda)
    with backend.session():
        backend.capture(tuple)
        backend.capture(tuple)
        # The pool grows, and so does the allocator's own memory by a warm-up run.
        cuda.segments = [
            {"segment_pool_id": POOL, "total_size": 300},
            {"segment_pool_id": (0, 0), "total_size": 5000},
            {"segment_pool_id": [0, 7], "total_size": 40},
            {"segment_pool_id": (0, 8), "total_size": 70},
        ]
        cuda.reserved += 400
        cuda.free_bytes -= 400
    assert backend.num_bytes == 340 + 20


def test_a_replay_is_freed_after_the_device_has_run_it() -> None:
    cuda = Cuda()
    backend = CudaGraphBackend(DEVICE, cuda=cuda)
    with backend.session():
        replay, _ = backend.capture(tuple)
    cuda.notes.clear()
    replay.close()
    backend.close()
    assert cuda.notes == ["synchronize", "graph 1 is reset", "empty cache"]
