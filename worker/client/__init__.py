"""A small client for routers and tests: `Client` and `AsyncClient`, alike but for the transport.

    with Client("127.0.0.1:50051") as client:
        client.wait_ready(timeout=60)
        info = client.info()
        answer = client.execute(build_step(query_lens=[1], context_lens=[0], token_ids=[1], block_counts=[1], block_ids=[1]))

Errors are those of `errors`. Steps in order, with safe retries: `FencedSession`; several in flight, over a stream:
`StreamSession`. Needs neither torch nor structlog.
"""

from modelworker.proto.model_worker_pb2 import ExecuteStepRequest, WorkerInfo
from modelworker.worker.batch import FEEDBACK_TOKEN
from modelworker.worker.client.answer import RowError, StepAnswer, StepLogprobs, StepPromptLogprobs, decode_answer
from modelworker.worker.client.connection import AsyncClient, Client
from modelworker.worker.client.errors import (
    CallDeadlineError,
    FeedbackMismatchError,
    InvalidRequestError,
    KvCacheLostError,
    NotImplementedByWorkerError,
    PreconditionFailedError,
    StepConflictError,
    StepOutOfOrderError,
    WorkerBusyError,
    WorkerCallError,
    WorkerFaultError,
    WorkerOwnedError,
    WorkerUnavailableError,
)
from modelworker.worker.client.session import AsyncFencedSession, FencedSession
from modelworker.worker.client.session_state import StepPendingError
from modelworker.worker.client.step import BlockCopies, StepSampling, build_step
from modelworker.worker.client.step_tokens import StepTokens
from modelworker.worker.client.stream import AsyncStepStream, StepStream, StreamAnswer
from modelworker.worker.client.stream_session import AsyncStreamSession, StreamSession

__all__ = [
    "FEEDBACK_TOKEN",
    "AsyncClient",
    "AsyncFencedSession",
    "AsyncStepStream",
    "AsyncStreamSession",
    "BlockCopies",
    "CallDeadlineError",
    "Client",
    "ExecuteStepRequest",
    "FeedbackMismatchError",
    "FencedSession",
    "InvalidRequestError",
    "KvCacheLostError",
    "NotImplementedByWorkerError",
    "PreconditionFailedError",
    "RowError",
    "StepAnswer",
    "StepConflictError",
    "StepLogprobs",
    "StepOutOfOrderError",
    "StepPendingError",
    "StepPromptLogprobs",
    "StepSampling",
    "StepStream",
    "StepTokens",
    "StreamAnswer",
    "StreamSession",
    "WorkerBusyError",
    "WorkerCallError",
    "WorkerFaultError",
    "WorkerInfo",
    "WorkerOwnedError",
    "WorkerUnavailableError",
    "build_step",
    "decode_answer",
]
