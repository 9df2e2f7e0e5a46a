"""What the CUDA backend asks of `torch.cuda`, in which order. What it gets is tested on a GPU, by the contract."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from modelworker.graphs.cuda_backend import CudaGraphBackend
from modelworker.graphs.dispatch import Dispatcher
from modelworker.graphs.full import FullGraphs
from modelworker.graphs.graph_set import GraphSet
from modelworker.graphs.settings import GraphSettings, RuntimeMode

DEVICE = torch.device("cuda", 1)
POOL = (0, 7)


class Stream:
    def __init__(self, notes: list[str], name: str) -> None:
        self._notes, self.name = notes, name

    def wait_stream(self, other: "Stream") -> None:
        self._notes.append(f"{self.name} waits for {other.name}")


class Graph:
    def __init__(self, cuda: "Cuda", number: int) -> None:
        self._cuda, self._name = cuda, f"graph {number}" if number else "keeper"
        self._pool: object = None

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        self._cuda.notes.append(f"{self._name} begins on {self._cuda.current.name} in {pool}, {capture_error_mode}")
        self._cuda.free_bytes -= 10  # what the driver takes
        assert self._cuda.users.get(pool) != 0, "a capture into a pool that was let go and is cached"
        self._cuda.users[pool] = self._cuda.users.get(pool, 0) + 1
        self._pool = pool
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
        if self._pool is not None:
            self._cuda.users[self._pool] -= 1
            self._pool = None


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
        self.num_pools = 0
        # Graphs of each pool that the allocator knows. One without any it knows until its memory is freed.
        self.users: dict[object, int] = {}

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802
        self.notes.append(f"new stream on {device}")
        return Stream(self.notes, "side")

    def CUDAGraph(self) -> Graph:  # noqa: N802
        """The first is the one that keeps the pool."""
        graph = Graph(self, len(self.graphs))
        self.graphs.append(weakref.ref(graph))
        return graph

    def graph_pool_handle(self) -> tuple[int, int]:
        self.notes.append("new pool")
        self.num_pools += 1
        return 0, POOL[1] + self.num_pools - 1

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
        self.users = {pool: count for pool, count in self.users.items() if count}

    def _sleep(self, cycles: int) -> None:
        self.notes.append(f"a kernel of {cycles} cycles on {self.current.name}")

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
        "new stream on cuda:1",
        *("synchronize", "empty cache", "side waits for main", "warm-up on side"),
        *("new pool", "keeper begins on side in (0, 7), thread_local", "a kernel of 1 cycles on side", "keeper ends"),
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
    cuda.failed_captures_end = False
    backend = CudaGraphBackend(DEVICE, cuda=cuda)

    def fail() -> None:
        with backend.session():
            _replay, _ = backend.capture(tuple)
            cuda.invalidated = True
            with pytest.raises(RuntimeError, match="the capture was invalidated"):
                backend.capture(tuple)
            gc.collect()
            assert cuda.graphs[2]() is not None

    with pytest.raises(AssertionError, match="under way"):
        fail()


@pytest.mark.parametrize(("num_before", "failed"), [(0, "keeper"), (1, "graph 2")])
def test_an_error_at_the_end_of_a_capture_is_raised_and_the_graph_freed(num_before: int, failed: str) -> None:
    cuda = Cuda()
    backend = CudaGraphBackend(DEVICE, cuda=cuda)
    with backend.session():
        replays = [backend.capture(tuple)[0] for _ in range(num_before)]
        cuda.invalidated = True
        with pytest.raises(RuntimeError, match="the capture was invalidated"):
            backend.capture(tuple)
        assert f"{failed} is reset" in cuda.notes
        cuda.invalidated = False
        replays.append(backend.capture(tuple)[0])
    replays[-1]()


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
        _replays = [backend.capture(tuple) for _ in range(2)]
        # The pool grows, and so does the allocator's own memory by a warm-up run.
        cuda.segments = [
            {"segment_pool_id": POOL, "total_size": 300},
            {"segment_pool_id": (0, 0), "total_size": 5000},
            {"segment_pool_id": [0, 7], "total_size": 40},
            {"segment_pool_id": (0, 8), "total_size": 70},
        ]
        cuda.reserved += 400
        cuda.free_bytes -= 400
    assert backend.num_bytes == 340 + 30


def test_a_replay_is_freed_after_the_device_has_run_it() -> None:
    cuda = Cuda()
    backend = CudaGraphBackend(DEVICE, cuda=cuda)
    with backend.session():
        replay, _ = backend.capture(tuple)
    cuda.notes.clear()
    replay.close()
    backend.close()
    assert cuda.notes == ["synchronize", "graph 1 is reset", "keeper is reset", "empty cache"]
    assert not cuda.users


def unreadable() -> tuple[()]:
    raise ValueError("the model reads a value")


def test_a_graph_is_captured_after_all_others_of_the_pool_were_freed() -> None:
    cuda = Cuda()
    backend = CudaGraphBackend(DEVICE, cuda=cuda)
    with backend.session():
        with pytest.raises(ValueError, match="the model reads a value"):
            backend.capture(unreadable)
        first, _ = backend.capture(tuple)
        first.close()
        second, _ = backend.capture(tuple)
    second()
    assert "graph 3 is launched on main" in cuda.notes
    assert cuda.users == {POOL: 2}


@pytest.mark.parametrize("fails_at", [4, 2])
def test_one_mode_that_can_not_be_captured_does_not_take_the_other_with_it(fails_at: int) -> None:
    """The error is Python's: CUDA ends the capture well, so that this graph lets the pool go, and so do those before it."""
    cuda = Cuda()
    buffer = torch.zeros(4)

    def run(tokens: torch.Tensor) -> tuple[()]:
        is_captured = bool(cuda.memory.pools_in_use)
        return unreadable() if is_captured and len(tokens) == fails_at else ()

    programs = {RuntimeMode.PIECEWISE: FullGraphs(run), RuntimeMode.FULL: FullGraphs(lambda _: ())}
    graphs = GraphSet(backend=CudaGraphBackend(DEVICE, cuda=cuda), programs=programs)
    dispatcher = Dispatcher(GraphSettings(max_sequences=2, max_tokens_per_step=4))
    report = graphs.capture(dispatcher, inputs_for=lambda key: (buffer[: key.num_tokens],))
    assert [(failure.key.mode, failure.key.num_tokens) for failure in report.failures] == [(RuntimeMode.PIECEWISE, fails_at)]
    assert [(key.mode, key.num_tokens) for key in report.captured] == [(RuntimeMode.FULL, 2), (RuntimeMode.FULL, 1)]
    graphs.close()
    assert not cuda.users


def test_a_pool_without_graphs_is_let_go_at_the_end_of_the_session_or_with_its_last_graph() -> None:
    cuda = Cuda()
    backend = CudaGraphBackend(DEVICE, cuda=cuda)
    with backend.session(), pytest.raises(ValueError, match="the model reads a value"):
        backend.capture(unreadable)
    assert not cuda.users
    with backend.session():
        replays = [backend.capture(tuple)[0] for _ in range(2)]
    for replay in replays:
        assert sum(cuda.users.values()) > 1
        replay.close()
    assert not sum(cuda.users.values())
    with backend.session():
        backend.capture(tuple)
