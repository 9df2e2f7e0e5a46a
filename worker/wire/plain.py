"""Sees at once that the usual small step, a few rows of one new token each, is in order.

The checks in numpy say what is wrong with a step, and their time hardly grows with it. A step that comes after some milliseconds
finds none of their code in the processor's caches: they then take 230 us, and a look at a few numbers 17.
"""

from modelworker.worker.batch import FEEDBACK_TOKEN
from modelworker.worker.description import WorkerDescription
from modelworker.worker.wire.checks import StepFields

MAX_ROWS = 32
MAX_BLOCKS = 512
"""Of a step that is looked at: beyond that numpy is faster."""


def is_plain_decode(fields: StepFields, description: WorkerDescription) -> bool:
    """Hot path: whether a step is a small decode without drafts in which `checks.CHECKS` would find nothing.

    Returns:
        True: they would find nothing. False: it is another step, or something may be wrong with it.
    """
    num_rows = fields.num_sequences
    if not len(fields.token_ids) == len(fields.context_lens) == len(fields.block_counts) == num_rows:
        return False
    if not 0 < num_rows <= min(MAX_ROWS, description.limits.max_tokens_per_step) or not 0 < len(fields.block_ids) <= MAX_BLOCKS:
        return False
    if len(fields.sample) or len(fields.draft_lens):
        return False
    request = fields.request
    if request.step_id and not (request.worker_epoch and request.router_id):
        return False
    tokens = fields.token_ids.tolist()
    if min(tokens) < FEEDBACK_TOKEN or max(tokens) >= description.model.vocab_size:
        return False
    return _has_good_tables(fields, description)


def _has_good_tables(fields: StepFields, description: WorkerDescription) -> bool:
    """Whether all rows have one token, tables that cover it, and blocks of their own to write to."""
    block_size, max_model_len = description.kv_cache.block_size, description.model.max_model_len
    most = -(-max_model_len // block_size)
    block_ids = fields.block_ids.tolist()
    if min(block_ids) < 1 or max(block_ids) >= description.kv_cache.num_blocks:
        return False
    written: set[int] = set()
    start = 0
    rows = zip(fields.query_lens.tolist(), fields.context_lens.tolist(), fields.block_counts.tolist(), strict=True)
    for query_len, context_len, count in rows:
        if query_len != 1 or not 0 <= context_len < max_model_len or not context_len // block_size < count <= most:
            return False
        table = block_ids[start : start + count]
        start += count
        if start > len(block_ids):
            return False
        block = table[context_len // block_size]
        if block in written or table.count(block) > 1:
            return False
        written.add(block)
    return start == len(block_ids)
