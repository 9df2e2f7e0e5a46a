"""The rows of a step become an `ExecuteStepRequest`, and its answer what each row got."""

from collections.abc import Iterator, Sequence

from modelworker.worker.client import BlockCopies, ExecuteStepRequest, StepAnswer, StepSampling, StepTokens, build_step
from modelworker.worker.scheduler.batcher import Batch
from modelworker.worker.scheduler.sequence import Row
from modelworker.worker.scheduler.types import Sampling, TokenLogprobs


def build_request(batch: Batch, *, finished_sequence_ids: Sequence[int], names_sequences: bool) -> ExecuteStepRequest:
    """Builds the request of a batch.

    Args:
        batch: with at least one row.
        finished_sequence_ids: sequences that the worker may forget.
        names_sequences: whether the worker keeps what it samples, for steps that are sent before their tokens are known here.
    """
    rows = batch.rows
    samplings = [row.sequence.request.sampling for row in rows]
    return build_step(
        query_lens=[row.query_len for row in rows],
        context_lens=[row.start for row in rows],
        token_ids=[token_id for row in rows for token_id in row.token_ids],
        block_counts=[len(row.residence.block_ids) for row in rows],
        block_ids=[block_id for row in rows for block_id in row.residence.block_ids],
        sample=None if all(row.samples for row in rows) else [row.samples for row in rows],
        sampling=None if all(sampling == Sampling() for sampling in samplings) else _step_sampling(samplings),
        draft_lens=[row.num_drafts for row in rows] if any(row.num_drafts for row in rows) else None,
        sequence_ids=[row.residence.sequence_id for row in rows] if names_sequences else None,
        finished_sequence_ids=list(finished_sequence_ids) if names_sequences else None,
        tokens=_histories(rows),
        block_copies=_block_copies(batch.copies),
    )


def _histories(rows: list[Row]) -> StepTokens | None:
    """The known tokens of rows whose sampling depends on them; the worker appends those that are known only to it."""
    if not any(row.samples and row.sequence.request.sampling.has_penalties for row in rows):
        return None
    wanted = [row.sequence if row.samples and row.sequence.request.sampling.has_penalties else None for row in rows]
    return StepTokens(
        prompt_ids=[() if sequence is None else sequence.request.prompt_ids for sequence in wanted],
        output_ids=[() if sequence is None else sequence.output_ids for sequence in wanted],
    )


def _block_copies(copies: list[tuple[int, int]]) -> BlockCopies | None:
    if not copies:
        return None
    return BlockCopies(source_ids=[source for source, _ in copies], destination_ids=[destination for _, destination in copies])


def _step_sampling(samplings: list[Sampling]) -> StepSampling:
    return StepSampling(
        temperature=[sampling.temperature for sampling in samplings],
        top_k=[sampling.top_k for sampling in samplings],
        top_p=[sampling.top_p for sampling in samplings],
        min_p=[sampling.min_p for sampling in samplings],
        seed=[sampling.seed or 0 for sampling in samplings],
        has_seed=[sampling.seed is not None for sampling in samplings],
        presence=[sampling.presence for sampling in samplings],
        frequency=[sampling.frequency for sampling in samplings],
        repetition=[sampling.repetition for sampling in samplings],
        num_logprobs=[sampling.num_logprobs for sampling in samplings],
    )


def rows_of(answer: StepAnswer, rows: list[Row]) -> Iterator[tuple[Row, list[tuple[int, TokenLogprobs | None]]]]:
    """Yields each row with the tokens that were sampled for it."""
    logprobs = _logprobs_of_tokens(answer)
    for row, token_ids in zip(rows, answer.tokens_of_rows, strict=True):
        yield row, [(token_id, next(logprobs, None)) for token_id in token_ids]


def _logprobs_of_tokens(answer: StepAnswer) -> Iterator[TokenLogprobs | None]:
    for token_ids, values, ranks in answer.logprobs_of_tokens():
        if len(token_ids) == 0:
            yield None
        else:
            top = tuple(zip(token_ids[1:].tolist(), values[1:].tolist(), strict=True))
            yield TokenLogprobs(logprob=float(values[0]), rank=int(ranks[0]), top=top)
