"""Steps as requests: valid ones for a small worker, and mutations of them."""

import math
from typing import Any

import hypothesis.strategies as st
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from modelworker.proto import model_worker_pb2 as pb
from modelworker_testing.descriptions import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_SEQUENCES,
    MAX_TOKENS,
    NUM_BLOCKS,
    VOCAB_SIZE,
)
from modelworker_testing.step_rules import context_blocks, has_penalties

EXTREME_INTEGERS = (-(2**31), -(2**31) + 1, -2, -1, 0, 1, 2, 3, 31, 32, 100, 101, 2**31 - 2, 2**31 - 1)
EXTREME_FLOATS = (math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 1e-45, 1e-8, 9e-6, 1e-5, 0.5, 1.0, 1.0000001, 3.4e38)


def step_request(*rows: tuple[int, int, list[int]], **fields: Any) -> pb.ExecuteStepRequest:
    """A request of rows (context length, query length, block table) with tokens 1, 2, 3 ..."""
    num_tokens = sum(max(query, 0) for _, query, _ in rows)
    return pb.ExecuteStepRequest(
        **{
            "query_lens": [query for _, query, _ in rows],
            "context_lens": [context for context, _, _ in rows],
            "token_ids": [1 + token % (VOCAB_SIZE - 1) for token in range(num_tokens)],
            "block_counts": [len(table) for _, _, table in rows],
            "block_ids": [block for _, _, table in rows for block in table],
            **fields,
        }
    )


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    groups = []
    while number >= 0x80:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])


@st.composite
def valid_requests(draw: st.DrawFn, *, max_model_len: int = MAX_MODEL_LEN, block_size: int = BLOCK_SIZE) -> pb.ExecuteStepRequest:
    """Requests that a small worker must accept: shared prefixes, spare blocks, any order of blocks, sequenced or not."""
    pool = draw(st.permutations(range(1, NUM_BLOCKS)))
    max_blocks = -(-max_model_len // block_size)
    rows: list[tuple[int, int, list[int]]] = []
    tokens_left = MAX_TOKENS
    for _ in range(draw(st.integers(0, MAX_SEQUENCES))):
        if tokens_left == 0 or len(pool) < max_blocks:
            break
        context = draw(st.integers(0, max_model_len - 1))
        query = draw(st.integers(1, min(max_model_len - context, tokens_left)))
        tokens_left -= query
        needed = -(-(context + query) // block_size)
        table = pool[: draw(st.integers(needed, max_blocks))]
        pool = pool[len(table) :]
        if rows and draw(st.booleans()):
            prefix = draw(st.sampled_from(rows))[2][: context // block_size]
            table[: len(prefix)] = prefix
        rows.append((context, query, table))
    request = step_request(*rows)
    num_tokens = len(request.token_ids)
    request.token_ids[:] = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=num_tokens, max_size=num_tokens))
    _draw_identity(draw, request)
    _draw_sampling(draw, request, len(rows))
    _draw_maintenance(draw, request, block_size)
    _draw_tokens(draw, request)
    return request


def _draw_identity(draw: st.DrawFn, request: pb.ExecuteStepRequest) -> None:
    if draw(st.booleans()):
        request.step_id = draw(st.integers(1, 2**64 - 1))
        request.worker_epoch = draw(st.integers(1, 2**64 - 1))
        request.router_id = draw(st.integers(1, 2**64 - 1))
    if draw(st.booleans()):
        num_sequences = len(request.query_lens)
        ids = st.integers(0, 2**64 - 1)
        request.sequence_ids.extend(draw(st.lists(ids, min_size=num_sequences, max_size=num_sequences, unique=True)))
        request.finished_sequence_ids.extend(draw(st.lists(ids | st.integers(0, 3), max_size=MAX_SEQUENCES)))
    request.client_tag = draw(st.integers(0, 2**64 - 1))
    request.timeout_ms = draw(st.sampled_from((0, 1, 5000, 2**32 - 1)))
    if draw(st.booleans()):
        request.traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def _draw_sampling(draw: st.DrawFn, request: pb.ExecuteStepRequest, num_sequences: int) -> None:
    def per_row(values: st.SearchStrategy[Any]) -> Any:
        return draw(st.just([]) | st.lists(values, min_size=num_sequences, max_size=num_sequences))

    request.sample.extend(per_row(st.booleans()))
    if draw(st.booleans()):
        sampling = request.sampling
        sampling.temperature.extend(per_row(st.just(0.0) | st.floats(2**-16, 2**100, width=32)))
        sampling.top_k.extend(per_row(st.integers(0, 2**31 - 1)))
        sampling.top_p.extend(per_row(st.floats(0, 1, width=32, exclude_min=True)))
        sampling.min_p.extend(per_row(st.floats(0, 1, width=32, exclude_max=True)))
        sampling.seed.extend(per_row(st.integers(0, 2**64 - 1)))
        sampling.has_seed.extend(per_row(st.booleans()))
        sampling.num_logprobs.extend(per_row(st.sampled_from((-1, 0, 20))))
        sampling.logprobs_mode.extend(per_row(st.sampled_from((0, 1))))
        sampling.presence.extend(per_row(st.sampled_from((0.0, -2.0, 2.0))))
        sampling.frequency.extend(per_row(st.sampled_from((0.0, 0.5))))
        sampling.repetition.extend(per_row(st.sampled_from((1.0, 1.25))))


def _draw_tokens(draw: st.DrawFn, request: pb.ExecuteStepRequest) -> None:
    """Drafts, histories, lists, masks and prompt logprobs."""
    rows = range(len(request.query_lens))
    ids = st.integers(0, VOCAB_SIZE - 1)
    samples = list(request.sample) or [True] * len(rows)
    drafts = [request.query_lens[row] - 1 if samples[row] and draw(st.booleans()) else 0 for row in rows]
    if any(drafts) or draw(st.booleans()):
        request.draft_lens.extend(drafts)
    if draw(st.booleans()) or any(has_penalties(request, row) for row in rows):
        history: list[list[int]] = []
        for row in rows:
            context = request.context_lens[row]
            length = draw(st.integers(context, context + request.query_lens[row] - drafts[row]))
            history.append(draw(st.lists(ids, min_size=length, max_size=length)))
            request.history.prompt_lens.append(draw(st.integers(0, length)))
            request.history.output_lens.append(length - request.history.prompt_lens[row])
        request.history.token_ids.extend(token for row in history for token in row)
    lists = st.lists(ids, max_size=3, unique=True)
    for part in (request.allowed_ids, request.banned_ids, request.logit_bias):
        if draw(st.booleans()):
            chosen = [draw(lists) for _ in rows]
            part.counts.extend(map(len, chosen))
            part.token_ids.extend(token for row in chosen for token in row)
    request.logit_bias.values.extend(draw(st.floats(-100, 100, width=32)) for _ in request.logit_bias.token_ids)
    if draw(st.booleans()):
        request.grammar.rows.extend(row for row in rows if row % 2 for _ in range(1 + drafts[row]))
        request.grammar.bitmasks = bytes(len(request.grammar.rows) * 16)
    if draw(st.booleans()):
        request.prompt_logprobs.extend(draw(st.booleans()) for _ in rows)
        request.next_prompt_ids.extend(draw(ids) if request.prompt_logprobs[row] else -1 for row in rows)


def _draw_maintenance(draw: st.DrawFn, request: pb.ExecuteStepRequest, block_size: int) -> None:
    """Any copies, and zeroes for blocks that are no context or are copied into."""
    blocks = st.integers(1, NUM_BLOCKS - 1)
    destinations = draw(st.just([]) | st.lists(blocks, max_size=5, unique=True))
    if destinations:
        request.block_copies.destination_ids.extend(destinations)
        request.block_copies.source_ids.extend(draw(st.lists(blocks, min_size=len(destinations), max_size=len(destinations))))
    context = context_blocks(request, block_size) - set(destinations)
    zeroed = draw(st.just([]) | st.lists(blocks, max_size=5))
    request.zero_block_ids.extend(block for block in zeroed if block not in context)


def field_values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Any value of a field's type, ordinary and extreme ones alike."""
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_STRING:
        return st.text(max_size=5) | st.just("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=5)
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return st.sampled_from(EXTREME_FLOATS)
    if field.type in (FieldDescriptor.TYPE_SFIXED32, FieldDescriptor.TYPE_ENUM):
        return st.sampled_from(EXTREME_INTEGERS)
    largest = 2**32 - 1 if field.type == FieldDescriptor.TYPE_UINT32 else 2**64 - 1
    return st.sampled_from((0, 1, 2, 3, largest))


@st.composite
def mutated_requests(draw: st.DrawFn) -> pb.ExecuteStepRequest:
    """Valid requests with one to four changes to any of their fields."""
    request = draw(valid_requests())
    for _ in range(draw(st.integers(1, 4))):
        _mutate(draw, request)
    return request


def _mutate(draw: st.DrawFn, message: Message) -> None:
    field = draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        getattr(message, field.name).SetInParent()
        if draw(st.booleans()):
            _mutate(draw, getattr(message, field.name))
        return
    if not field.is_repeated:
        setattr(message, field.name, draw(field_values(field)))
        return
    values = getattr(message, field.name)
    change = draw(st.sampled_from(("append", "clear", "drop", "double", "alter", "swap")))
    if change == "append" or not values:
        values.append(draw(field_values(field)))
        return
    index = draw(st.integers(0, len(values) - 1))
    if change == "clear":
        del values[:]
    elif change == "drop":
        del values[index]
    elif change == "double":
        values.insert(index, values[index])
    elif change == "alter":
        values[index] = draw(field_values(field))
    else:
        values[index], values[-1] = values[-1], values[index]


# -- what is right, one token and one row at a time --
