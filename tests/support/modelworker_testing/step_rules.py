"""Which steps a small worker must accept, by brute force."""

import math
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.description import WorkerDescription
from modelworker_testing.descriptions import BLOCK_SIZE, NUM_BLOCKS


def tables_of(request: pb.ExecuteStepRequest) -> list[list[int]]:
    """The block table of each row."""
    tables, start = [], 0
    for count in request.block_counts:
        tables.append(list(request.block_ids[start : start + count]))
        start += count
    return tables


def context_blocks(request: pb.ExecuteStepRequest, block_size: int = BLOCK_SIZE) -> set[int]:
    """The blocks that hold context of a row."""
    return {
        block
        for table, context in zip(tables_of(request), request.context_lens, strict=True)
        for index, block in enumerate(table)
        if index * block_size < context
    }


def zero_blocks(request: pb.ExecuteStepRequest) -> set[int]:
    """The blocks that are zero after the step's maintenance, of a cache in which no other block is."""
    zeroed = set(request.zero_block_ids)
    copies = dict(zip(request.block_copies.destination_ids, request.block_copies.source_ids, strict=True))
    return {block for block in range(NUM_BLOCKS) if copies.get(block, block) in zeroed}


def token_places(request: pb.ExecuteStepRequest, block_size: int = BLOCK_SIZE) -> list[tuple[int, int, int]]:
    """(row, position, slot) of each new token."""
    places = []
    for row, table in enumerate(tables_of(request)):
        place = {}
        for index, block in enumerate(table):
            for offset in range(block_size):
                place[index * block_size + offset] = block * block_size + offset
        for token in range(request.query_lens[row]):
            position = request.context_lens[row] + token
            places.append((row, position, place[position]))
    return places


def is_valid(request: pb.ExecuteStepRequest, worker: WorkerDescription) -> bool:
    """Whether the worker has to accept a request, straight from the protocol's text."""
    return (
        not _has_unknown_fields(request)
        and _asks_only_for_what_is_built(request)
        and _identity_is_valid(request)
        and _rows_are_valid(request, worker)
        and _writes_are_valid(request, worker.kv_cache.block_size)
        and _feedback_is_valid(request)
        and _maintenance_is_valid(request, worker)
        and _sampling_is_valid(request)
        and _drafts_are_valid(request)
        and _tokens_are_valid(request, worker)
    )


def _has_unknown_fields(message: Message) -> bool:
    parts = [value for field, value in message.ListFields() if field.type == FieldDescriptor.TYPE_MESSAGE]
    return len(UnknownFieldSet(message)) > 0 or any(_has_unknown_fields(part) for part in parts)


def _asks_only_for_what_is_built(request: pb.ExecuteStepRequest) -> bool:
    for name in ("lora_index", "draft_probabilities", "return_hidden"):
        field = request.DESCRIPTOR.fields_by_name[name]
        is_message = field.type == FieldDescriptor.TYPE_MESSAGE
        if request.HasField(name) if is_message else bool(getattr(request, name)):
            return False
    return True


def _identity_is_valid(request: pb.ExecuteStepRequest) -> bool:
    return request.step_id == 0 or (request.worker_epoch > 0 and request.router_id > 0)


def _rows_are_valid(request: pb.ExecuteStepRequest, worker: WorkerDescription) -> bool:
    num_sequences = len(request.query_lens)
    lengths_are_valid = (
        len(request.context_lens) == len(request.block_counts) == num_sequences <= worker.limits.max_sequences
        and len(request.sample) in {0, num_sequences}
        and len(request.token_ids) == sum(request.query_lens) <= worker.limits.max_tokens_per_step
        and len(request.block_ids) == sum(request.block_counts)
    )
    return (
        lengths_are_valid
        and all(
            _row_is_valid(*row, worker) for row in zip(request.context_lens, request.query_lens, request.block_counts, strict=True)
        )
        and all(-1 <= token < worker.model.vocab_size for token in request.token_ids)
        and all(0 < block < worker.kv_cache.num_blocks for block in request.block_ids)
    )


def _row_is_valid(context: int, query: int, count: int, worker: WorkerDescription) -> bool:
    block_size = worker.kv_cache.block_size
    return (
        query >= 1
        and context >= 0
        and context + query <= worker.model.max_model_len
        and count * block_size >= context + query
        and (count - 1) * block_size < worker.model.max_model_len
    )


def _writes_are_valid(request: pb.ExecuteStepRequest, block_size: int) -> bool:
    places = token_places(request, block_size)
    if len({slot for _, _, slot in places}) < len(places):
        return False
    tables = tables_of(request)
    return all(tables[row].count(slot // block_size) == 1 for row, _, slot in places)


def _feedback_is_valid(request: pb.ExecuteStepRequest) -> bool:
    ids = list(request.sequence_ids)
    if ids and (len(ids) != len(request.query_lens) or len(set(ids)) < len(ids)):
        return False
    drafts = list(request.draft_lens) or [0] * len(request.query_lens)
    start = 0
    for row, query_len in enumerate(request.query_lens):
        tokens = request.token_ids[start : start + query_len]
        start += query_len
        if -1 in tokens[1:]:
            return False
        is_feedback = -1 in tokens
        if is_feedback and (query_len != 1 + drafts[row] or not ids or request.step_id == 0 or row in request.grammar.rows):
            return False
    return True


def _maintenance_is_valid(request: pb.ExecuteStepRequest, worker: WorkerDescription) -> bool:
    copies, zeroed = request.block_copies, set(request.zero_block_ids)
    destinations = set(copies.destination_ids)
    return (
        len(copies.source_ids) == len(copies.destination_ids) == len(destinations)
        and all(0 < block < worker.kv_cache.num_blocks for block in {*zeroed, *copies.source_ids, *destinations})
        and not (zeroed - destinations) & context_blocks(request, worker.kv_cache.block_size)
        and len(request.zero_block_ids) < worker.kv_cache.num_blocks
        and len(request.finished_sequence_ids) <= max(worker.limits.max_feedback_sequences, worker.limits.max_sequences)
    )


def _sampling_is_valid(request: pb.ExecuteStepRequest) -> bool:
    ranges = {
        "temperature": lambda value: value == 0 or (value >= 9.999999747378752e-06 and not math.isinf(value)),
        "top_k": lambda value: value >= 0,
        "top_p": lambda value: 0 < value <= 1,
        "min_p": lambda value: 0 <= value < 1,
        "seed": lambda value: True,
        "has_seed": lambda value: True,
        "num_logprobs": lambda value: -1 <= value <= 20,
        "logprobs_mode": lambda value: value in (0, 1),
        "presence": lambda value: -2 <= value <= 2,
        "frequency": lambda value: -2 <= value <= 2,
        "repetition": lambda value: 0 < value < math.inf,
    }
    return all(
        len(getattr(request.sampling, name)) in {0, len(request.query_lens)} and all(map(valid, getattr(request.sampling, name)))
        for name, valid in ranges.items()
    )


def _samples(request: pb.ExecuteStepRequest, row: int) -> bool:
    return request.sample[row] if request.sample else True


def _draft_len(request: pb.ExecuteStepRequest, row: int) -> int:
    return request.draft_lens[row] if request.draft_lens else 0


def has_penalties(request: pb.ExecuteStepRequest, row: int) -> bool:
    arrays = ((request.sampling.presence, 0), (request.sampling.frequency, 0), (request.sampling.repetition, 1))
    return any(values[row] != neutral for values, neutral in arrays if values)


def _drafts_are_valid(request: pb.ExecuteStepRequest) -> bool:
    if len(request.draft_lens) not in {0, len(request.query_lens)}:
        return False
    return all(
        drafts == 0 or (drafts > 0 and request.query_lens[row] == 1 + drafts and _samples(request, row))
        for row, drafts in enumerate(request.draft_lens)
    )


def _tokens_are_valid(request: pb.ExecuteStepRequest, worker: WorkerDescription) -> bool:
    return (
        all(_list_is_valid(part, request, worker) for part in (request.allowed_ids, request.banned_ids, request.logit_bias))
        and _bias_is_valid(request)
        and _history_is_valid(request, worker)
        and _grammar_is_valid(request, worker)
        and _prompt_logprobs_are_valid(request, worker)
    )


def _are_tokens(ids: Any, worker: WorkerDescription) -> bool:
    return all(0 <= token < worker.model.vocab_size for token in ids)


def _list_is_valid(part: Any, request: pb.ExecuteStepRequest, worker: WorkerDescription) -> bool:
    if not part.counts and not part.token_ids:
        return True
    return (
        len(part.counts) == len(request.query_lens)
        and all(count >= 0 for count in part.counts)
        and sum(part.counts) == len(part.token_ids)
        and _are_tokens(part.token_ids, worker)
    )


def _bias_is_valid(request: pb.ExecuteStepRequest) -> bool:
    bias = request.logit_bias
    rows = [row for row, count in enumerate(bias.counts) for _ in range(count)]
    return (
        len(bias.values) == len(bias.token_ids)
        and len(set(zip(rows, bias.token_ids, strict=True))) == len(rows)
        and all(map(math.isfinite, bias.values))
    )


def _history_is_valid(request: pb.ExecuteStepRequest, worker: WorkerDescription) -> bool:
    history, rows = request.history, range(len(request.query_lens))
    if history.prompt_lens or history.output_lens or history.token_ids:
        if not (
            len(history.prompt_lens) == len(history.output_lens) == len(rows)
            and all(length >= 0 for length in (*history.prompt_lens, *history.output_lens))
            and sum(history.prompt_lens) + sum(history.output_lens) == len(history.token_ids)
            and _are_tokens(history.token_ids, worker)
        ):
            return False
        lengths = [prompt + output for prompt, output in zip(history.prompt_lens, history.output_lens, strict=True)]
    else:
        lengths = [0 for _ in rows]
    return all(
        context <= lengths[row] <= context + request.query_lens[row] - _draft_len(request, row)
        for row, context in enumerate(request.context_lens)
        if has_penalties(request, row) and _samples(request, row)
    )


def _grammar_is_valid(request: pb.ExecuteStepRequest, worker: WorkerDescription) -> bool:
    rows = list(request.grammar.rows)
    return (
        rows == sorted(rows)
        and all(0 <= row < len(request.query_lens) for row in rows)
        and all(rows.count(row) == 1 + _draft_len(request, row) for row in rows)
        and len(request.grammar.bitmasks) == len(rows) * 4 * -(-worker.model.vocab_size // 32)
    )


def _prompt_logprobs_are_valid(request: pb.ExecuteStepRequest, worker: WorkerDescription) -> bool:
    wanted, next_ids, num_sequences = request.prompt_logprobs, request.next_prompt_ids, len(request.query_lens)
    if len(wanted) not in {0, num_sequences} or len(next_ids) not in {0, num_sequences}:
        return False
    return all(
        token == -1 or (0 <= token < worker.model.vocab_size and bool(wanted) and wanted[row]) for row, token in enumerate(next_ids)
    )
