"""All graphs of a worker: captured once at the start, in one order and one pool, and run by key."""

import gc
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from modelworker.graphs.backend import GraphBackend, Replay, Tensors, UnknownKeyError
from modelworker.graphs.dispatch import Dispatcher, Reason
from modelworker.graphs.settings import RuntimeMode
from modelworker.graphs.shapes import GraphKey

_logger = logging.getLogger(__name__)

# CUDA, its libraries and torch's allocator of the CPU raise a plain RuntimeError.
_LACK_OF_MEMORY: Final = ("out of memory", "_STATUS_ALLOC_FAILED", "DefaultCPUAllocator: ")


class GraphMemoryError(MemoryError):
    """There is no memory for a graph, or for the run that warms it up."""


class Program(Protocol):
    """What is captured in one mode: `FullGraphs` or `PiecewiseGraphs`."""

    def __call__(self, *inputs: Tensor) -> Tensors:
        """Runs a step without a graph."""
        ...

    def capture(self, key: GraphKey, inputs: Sequence[Tensor], backend: GraphBackend) -> None:
        """Captures the step of a key."""
        ...

    def replay(self, key: GraphKey, inputs: Sequence[Tensor]) -> Tensors:
        """Hot path: runs the step of a key."""
        ...

    def replays(self, key: GraphKey) -> Sequence[Replay]:
        """Returns what `replay` calls for a key, in order."""
        ...

    def close(self) -> None:
        """Frees all graphs."""
        ...


@dataclass(frozen=True, slots=True)
class CaptureFailure:
    """Why a mode is out of service.

    Attributes:
        key: the first that could not be captured.
        error: what was raised.
    """

    key: GraphKey
    error: Exception

    def __str__(self) -> str:
        return f"{self.key}: {type(self.error).__name__}: {self.error}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureReport:
    """What capturing came to.

    Attributes:
        captured: the keys that can be run, in the order of capture.
        failures: at most one per mode.
        num_bytes: memory that all graphs together take.
        seconds: how long it took, the warm-up runs included.
    """

    captured: tuple[GraphKey, ...]
    failures: tuple[CaptureFailure, ...]
    num_bytes: int
    seconds: float


class GraphSet:
    """All graphs of a worker. Used on one thread.

    Args:
        backend: of the device; owned by the set from now on.
        programs: what is captured in which mode.

    Attributes:
        hits: how often each captured key has been run.
    """

    def __init__(self, *, backend: GraphBackend, programs: Mapping[RuntimeMode, Program]) -> None:
        self._backend = backend
        self._programs = dict(programs)
        self.hits: dict[GraphKey, int] = {}

    def capture(
        self,
        dispatcher: Dispatcher,
        *,
        inputs_for: Callable[[GraphKey], Sequence[Tensor]],
        progress: Callable[[GraphKey], None] = lambda _: None,
    ) -> CaptureReport:
        """Captures every key of a dispatcher, in its order, each after one warm-up run, but where a capture is a run itself.

        Where a key can't be captured, its whole mode is disabled: the dispatcher is told, the log and the report say why.

        Args:
            dispatcher: loses the modes that can't be captured.
            inputs_for: stages a harmless batch for a key, and returns the step's inputs for it, in static buffers.
            progress: called after each key.

        Raises:
            RuntimeError: the set has captured before.
            ValueError: a key has a mode without a program.
            GraphMemoryError: there is no memory for a graph or its warm-up run.
            Exception: what else a warm-up run raises: it would fail without graphs as well. Where there are none, the mode is
                disabled instead, and the first run without a graph raises it.
        """
        if self.hits:
            raise RuntimeError("graphs are captured once")
        if missing := {key.mode for key in dispatcher.keys} - set(self._programs):
            raise ValueError(f"nothing can be captured for mode {min(missing).name}")
        started = time.monotonic()
        failures: dict[RuntimeMode, CaptureFailure] = {}
        with _garbage_collected_once(), _lack_of_memory_named("the graphs"), self._backend.session():
            for key in dispatcher.keys:
                if key.mode not in failures:
                    failure = self._capture_key(key, inputs_for(key))
                    if failure is not None:
                        failures[key.mode] = failure
                        dispatcher.disable(key.mode, Reason.NOT_CAPTURED)
                progress(key)
        captured = tuple(key for key in dispatcher.keys if key.mode not in failures)
        self.hits = dict.fromkeys(captured, 0)
        report = CaptureReport(
            captured=captured,
            failures=tuple(failures.values()),
            num_bytes=self._backend.num_bytes,
            seconds=time.monotonic() - started,
        )
        _logger.info("captured %d graphs in %.1f s, %.1f MiB", len(captured), report.seconds, report.num_bytes / 2**20)
        return report

    def replays(self, key: GraphKey) -> Sequence[Replay]:
        """Returns what running a key calls, in order, for measurements; nothing where it was not captured."""
        program = self._programs.get(key.mode)
        return () if program is None else program.replays(key)

    def run(self, key: GraphKey, inputs: Sequence[Tensor]) -> Tensors:
        """Hot path: runs a step with the graph of a key.

        Args:
            key: that was captured.
            inputs: as at the capture, with new values; see the program of the key's mode.

        Returns:
            the step's outputs, padded, valid until any key is run again or the set is closed.

        Raises:
            UnknownKeyError: the key was not captured.
            StaleInputError: an input lies elsewhere than at the capture.
        """
        if key not in self.hits:
            raise UnknownKeyError(f"no graph was captured for {key}")
        outputs = self._programs[key.mode].replay(key, inputs)
        self.hits[key] += 1
        return outputs

    def drop(self, mode: RuntimeMode) -> None:
        """Frees the graphs of a mode that the dispatcher no longer chooses; their keys become unknown."""
        self._programs[mode].close()
        self.hits = {key: count for key, count in self.hits.items() if key.mode is not mode}

    def close(self) -> None:
        """Frees all graphs and their memory. Can be called again."""
        self.hits = {}
        for program in self._programs.values():
            program.close()
        self._backend.close()

    def _capture_key(self, key: GraphKey, inputs: Sequence[Tensor]) -> CaptureFailure | None:
        """Captures one key. Where that fails, frees its mode's graphs, logs why and returns it."""
        program = self._programs[key.mode]
        named = f"the graph of {key}"
        if not self._backend.runs_what_it_captures:
            with _lack_of_memory_named(named):
                program(*inputs)
        try:
            with _lack_of_memory_named(named):
                program.capture(key, inputs, self._backend)
        except GraphMemoryError:
            program.close()
            raise
        except Exception as error:
            program.close()
            failure = CaptureFailure(key, error)
            _logger.exception("mode %s is disabled, for it can't be captured: %s", key.mode.name, failure)
            # The frames hold tensors, whose memory the other mode needs.
            traceback.clear_frames(error.__traceback__)
            return failure
        return None


@contextmanager
def _lack_of_memory_named(what: str) -> Iterator[None]:
    """Turns the errors by which torch, CUDA and Python say that memory is lacking into one that says for what."""
    try:
        yield
    except GraphMemoryError:
        raise
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in text for sign in _LACK_OF_MEMORY):
            raise GraphMemoryError(f"there is no memory for {what}") from error
        raise


@contextmanager
def _garbage_collected_once() -> Iterator[None]:
    """Collects garbage, and none until the end: a collection in the middle of a capture could free what a capture must not."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
