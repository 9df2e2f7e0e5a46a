"""Whether a worker can serve a request: found out before it is queued, for the worker would refuse the whole step."""

from modelworker.worker.client import WorkerInfo
from modelworker.worker.scheduler.types import Request, RequestError


def check_request(request: Request, info: WorkerInfo, *, num_drafts: int) -> None:
    """Checks everything about a request but its room in the KV cache.

    Args:
        request: to be queued.
        info: the worker.
        num_drafts: tokens that are guessed with each one that is sampled.

    Raises:
        RequestError: this worker can't serve it.
    """
    request.sampling.check()
    request.sampling.check_capabilities(info.capabilities)
    if num_drafts and "draft_lens" not in info.capabilities:
        raise RequestError("num_drafts", f"found {num_drafts}, but this worker does not verify drafts")
    vocab_size, max_model_len = info.model.vocab_size, info.model.max_model_len
    if not request.prompt_ids:
        raise RequestError("prompt_ids", "found no token, expected at least 1")
    if request.max_tokens < 1:
        raise RequestError("max_tokens", f"found {request.max_tokens}, expected at least 1")
    for position, token_id in enumerate(request.prompt_ids):
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"prompt_ids[{position}]", f"found {token_id}, expected 0 .. {vocab_size - 1}")
    if len(request.prompt_ids) > max_model_len:
        raise RequestError("prompt_ids", f"found {len(request.prompt_ids)} tokens, the model takes {max_model_len}")
