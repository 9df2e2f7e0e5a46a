"""What the worker counts and writes down about calls, and about the items of streams, which are calls in all but transport."""

import logging
import time
from collections.abc import Iterable

import grpc
import structlog

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker import errors
from modelworker.worker.counters import Counters
from modelworker.worker.statuses import code_of
from modelworker.worker.telemetry import LineLimit
from modelworker.worker.trace_context import trace_id_of

_LOGGER_NAME = "modelworker.rpc"

# A client that is refused often is seen in the counters; its lines must not drown the others, nor hold up the event loop.
_MAX_LINES_PER_SECOND = 10

StepSize = dict[str, int]
"""How large a step is, for its log line."""


class CallLog:
    """Counts calls, and binds and writes their log lines. Lives on the event loop.

    What is bound holds for the context in which it is bound: that of the call's task, or the one that a stream made for an item.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._log: structlog.stdlib.BoundLogger = structlog.get_logger(_LOGGER_NAME)
        self._limit = LineLimit(max_lines=_MAX_LINES_PER_SECOND, seconds=1.0, report=self._write_held_back)

    # -- counters --

    def count_call(self, method: str, code: grpc.StatusCode) -> None:
        """Counts a call that has ended."""
        self._counters.increment("rpcs_total", method=method, code=code.name)

    def count_stream_step(self, code: grpc.StatusCode) -> None:
        """Counts a step of a stream that was answered, or whose stream has gone."""
        self._counters.increment("stream_steps_total", code=code.name)

    # -- what every line of a call carries --

    def bind_call(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Binds what is known of a call before it is parsed."""
        structlog.contextvars.bind_contextvars(method=method)
        for key, value in metadata:
            if key == "traceparent" and isinstance(value, str):
                self._bind_trace(value)

    def bind_step(self, request: object) -> StepSize:
        """Binds a step's identity. Returns its size, which is empty for a request that is no step."""
        if not isinstance(request, pb.ExecuteStepRequest):
            return {}
        structlog.contextvars.bind_contextvars(step_id=request.step_id, epoch=request.worker_epoch, client_tag=request.client_tag)
        self._bind_trace(request.traceparent)
        return {"num_sequences": len(request.query_lens), "num_tokens": len(request.token_ids)}

    def _bind_trace(self, traceparent: str) -> None:
        if trace_id := trace_id_of(traceparent):
            structlog.contextvars.bind_contextvars(trace_id=trace_id)
        elif traceparent:
            self._counters.increment("trace_contexts_ignored_total")

    # -- lines --

    def write_error(self, method: str, error: Exception) -> None:
        """Writes why a call, or an item of a stream, gets a status instead of an answer; of many alike, the first ones."""
        code = code_of(error)
        if not self._limit.admit(method, code.name):
            return
        if code is grpc.StatusCode.INTERNAL:
            self._log.error("call failed", code=code.name, exc_info=error)
        elif isinstance(error, errors.InvalidStepError):
            # The descriptions quote what the client sent, which may be token ids.
            self._log.warning("call refused", code=code.name, fields=[violation.field for violation in error.violations])
        elif code is grpc.StatusCode.UNAVAILABLE:
            # Starting or draining: nothing is wrong, and who polls does so often.
            self._log.info("call refused", code=code.name, reason=str(error))
        else:
            self._log.warning("call refused", code=code.name, reason=str(error))

    def _write_held_back(self, kind: tuple[str, ...], number: int) -> None:
        method, code = kind
        self._log.warning("more calls refused", method=method, code=code, suppressed=number)

    def write_step(self, size: StepSize, response: object, arrival_ns: int) -> None:
        """Writes an executed step's line, where somebody wants to see it."""
        if not isinstance(response, pb.ExecuteStepResponse) or not logging.getLogger(_LOGGER_NAME).isEnabledFor(logging.DEBUG):
            return
        timings = response.timings_ns
        self._log.debug(
            "step executed",
            **size,
            num_sampled=len(response.sampled_ids),
            num_failed=len(response.sequence_errors),
            graph_mode=pb.GraphMode.Name(response.graph.mode),
            queue_ms=timings.queue / 1e6,
            prepare_ms=timings.prepare / 1e6,
            forward_ms=timings.forward / 1e6,
            sample_ms=timings.sample / 1e6,
            call_ms=(time.monotonic_ns() - arrival_ns) / 1e6,
        )
