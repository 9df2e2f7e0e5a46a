"""What is counted of a step that was executed."""

from modelworker.worker.batch import StepBatch
from modelworker.worker.counters import Counters
from modelworker.worker.result import StepResult


def count_step(counters: Counters, batch: StepBatch, result: StepResult) -> None:
    """Hot path: counts an executed step, its tokens, the mode in which it ran and its rows that failed."""
    counters.increment("steps_executed_total", sequenced=str(batch.is_sequenced).lower())
    counters.increment("graph_executions_total", mode=result.graph.mode.name, fallback=result.graph.fallback_reason)
    counters.increment("tokens_total", batch.num_tokens)
    counters.increment("sampled_tokens_total", len(result.sampled_ids))
    counters.increment("kv_blocks_zeroed_total", len(batch.zero_block_ids))
    counters.increment("kv_blocks_copied_total", len(batch.copy_destination_ids))
    for failure in result.sequence_errors:
        counters.increment("sequence_errors_total", code=failure.code.name)
