"""The reference router: continuous batching over a worker, small enough to read in one sitting.

types          what goes in and comes out: requests, settings, events
request_check  whether a worker can serve a request
blocks         the KV cache blocks and who has them
sequence       a request under way, its time in the KV cache, its row of a step
drafts         guesses at the next tokens, from the sequence's own text
batcher        chooses the rows of a step and gives them blocks
message        rows become an `ExecuteStepRequest`
scheduler      sends steps and takes their answers
"""

from modelworker.worker.scheduler.blocks import BlockPool
from modelworker.worker.scheduler.scheduler import Scheduler
from modelworker.worker.scheduler.types import (
    BlockOrder,
    Event,
    FinishReason,
    KvCacheRecomputed,
    Request,
    RequestError,
    RequestFinished,
    RequestPreempted,
    Sampling,
    SchedulerSettings,
    StepExecuted,
    TokenLogprobs,
    TokenSampled,
    WorkerAnswerError,
    WorkerChangedError,
)

__all__ = [
    "BlockOrder",
    "BlockPool",
    "Event",
    "FinishReason",
    "KvCacheRecomputed",
    "Request",
    "RequestError",
    "RequestFinished",
    "RequestPreempted",
    "Sampling",
    "Scheduler",
    "SchedulerSettings",
    "StepExecuted",
    "TokenLogprobs",
    "TokenSampled",
    "WorkerAnswerError",
    "WorkerChangedError",
]
