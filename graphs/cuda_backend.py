"""Graphs on CUDA: `torch.cuda.CUDAGraph`, all in one pool and captured on one stream."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from modelworker.graphs.backend import Tensors, span_bytes


class CudaReplay:
    """An instantiated CUDA graph.

    Args:
        graph: that is launched.
        free: called with this replay when it is closed: waits until the device has run the graph, then frees it.
    """

    def __init__(self, graph: Any, free: Callable[["CudaReplay"], None]) -> None:
        self.graph = graph
        self._free = free
        self._launch = graph.replay

    def __call__(self) -> None:
        """Hot path: launches the graph on the current stream and returns; nothing is waited for."""
        self._launch()

    def close(self) -> None:
        """Waits until the device has run the graph, then frees it."""
        self._free(self)


class CudaGraphBackend:
    """Captures on one CUDA device.

    `torch.cuda.graph` would synchronize the device and empty the allocator's cache at every capture. Here both happen only when
    the session is opened and closed, and captures are begun and ended directly.

    The first graph is never launched. It keeps the pool: the allocator lets a pool go with its last graph, and as long as memory of
    it is cached the next capture into it fails. So a mode that can't be captured would take the next one with it.

    Args:
        device: with its index.
        cuda: the module `torch.cuda`, or what stands in for it.

    Attributes:
        runs_what_it_captures: no: what is launched while a graph is captured does not run.
    """

    runs_what_it_captures: ClassVar[bool] = False

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._stream = cuda.Stream(device)
        self._pool: Any = None
        self._in_session = False
        self._driver_bytes = 0
        self._keeper: Any = None
        self._replays: weakref.WeakSet[CudaReplay] = weakref.WeakSet()
        # Graphs whose capture failed. An allocator that still takes one to be under way calls back into it.
        self._failed: list[Any] = []

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Makes the stream of all captures the current one.

        The device is synchronized at the start, so that cached memory can be freed for the pool, and at the end, so that an error
        of a warm-up run is raised here and not in a later step.
        """
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        before = self._bytes_outside_allocator()
        current = self._cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        self._in_session = True
        try:
            with self._cuda.stream(self._stream):
                yield
        finally:
            self._in_session = False
        current.wait_stream(self._stream)
        self._cuda.synchronize(self._device)
        self._release_unused_pool()
        # What warm-up runs left in the allocator's cache is of use to their stream only.
        self._cuda.empty_cache()
        self._driver_bytes += max(self._bytes_outside_allocator() - before, 0)

    def capture(self, run: Callable[[], Tensors]) -> tuple[CudaReplay, Tensors]:
        """Captures what a callable launches.

        Only this thread is held to the rules of a capture (`thread_local`): what other threads do with CUDA can't break it.

        Raises:
            RuntimeError: no session is open, or CUDA refuses what the callable does.
        """
        if not self._in_session:
            raise RuntimeError("a CUDA graph is captured within the backend's session, on its stream")
        if self._keeper is None:
            # Each keeper has a pool of its own: the allocator may still know the one before, and takes no capture into that.
            self._pool = self._cuda.graph_pool_handle()
            self._keeper, _ = self._captured(self._one_kernel)
        graph, outputs = self._captured(run)
        replay = CudaReplay(graph, self._free)
        self._replays.add(replay)
        return replay, outputs

    def borrowed(self, tensor: Tensor) -> Tensor:
        """Returns a tensor in the same memory that doesn't own it."""
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        memory = torch.as_tensor(_Memory(tensor.data_ptr(), span_bytes(tensor)), device=tensor.device)
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    @property
    def num_bytes(self) -> int:
        """Memory of the pool, and what the driver took for the graphs themselves."""
        pool = sum(
            segment["total_size"] for segment in self._cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) == self._pool
        )
        return int(pool) + self._driver_bytes

    def close(self) -> None:
        """Returns the pool, which no graph uses any more, to the device."""
        self._release_unused_pool()
        self._cuda.empty_cache()
        self._driver_bytes = 0

    def _one_kernel(self) -> Tensors:
        """Launches the least of which torch doesn't warn that the graph is empty. It takes no memory of the pool."""
        self._cuda._sleep(1)
        return ()

    def _captured(self, run: Callable[[], Tensors]) -> tuple[Any, Tensors]:
        """Captures a graph; returns it, and what the callable returned."""
        graph = self._cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            outputs = run()
        except BaseException:
            # An error may have invalidated the capture: ending it frees the stream, and reports once more what is raised already.
            with contextlib.suppress(RuntimeError):
                self._end_capture(graph)
            graph.reset()
            raise
        try:
            self._end_capture(graph)
        except BaseException:
            graph.reset()
            raise
        return graph, outputs

    def _free(self, replay: CudaReplay) -> None:
        """Waits until the device has run a graph, then frees it."""
        self._cuda.synchronize(self._device)
        replay.graph.reset()
        self._replays.discard(replay)
        if not self._in_session:
            self._release_unused_pool()

    def _release_unused_pool(self) -> None:
        """Lets the pool go where it has no graph but its keeper, so that its memory can be freed."""
        if self._keeper is not None and not self._replays:
            self._keeper.reset()
            self._keeper = None

    def _end_capture(self, graph: Any) -> None:
        """Ends a capture. Where that fails, tells the allocator, to which it would be under way for ever.

        Before torch 2.13, `capture_end` leaves the allocator as it is when CUDA reports an error: what is allocated goes on to be
        the pool's, and the next call that frees cached memory fails.
        """
        try:
            graph.capture_end()
        except BaseException:
            self._failed.append(graph)
            end_allocation = getattr(self._cuda.memory, "_cuda_endAllocateToPool", None)
            if end_allocation is not None:
                # Where `capture_end` did it, this finds nothing to end, and says so.
                with contextlib.suppress(RuntimeError):
                    end_allocation(self._device.index, self._pool)
            raise

    def _bytes_outside_allocator(self) -> int:
        """Returns what this device's memory holds beyond torch's allocator: context, modules, instantiated graphs."""
        free, total = self._cuda.mem_get_info(self._device)
        return int(total - free - self._cuda.memory_reserved(self._device))


class _Memory:
    """Device memory in the form of the CUDA array interface, version 3, which torch takes without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
        }
