"""Steps as requests: a small worker, valid requests for it, mutations of them, and what is right and wrong by brute force."""

import math
from typing import Any

import hypothesis.strategies as st
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.description import (
    CapturedSize,
    Degradation,
    ExecutionDescription,
    KvCacheDescription,
    ModelDescription,
    SelfCheck,
    StepLimits,
    WorkerDescription,
)
from modelworker.worker.result import GraphMode

VOCAB_SIZE = 101
MAX_MODEL_LEN = 30
BLOCK_SIZE = 4
NUM_BLOCKS = 32
MAX_BLOCKS = 8
MAX_SEQUENCES = 6
MAX_TOKENS = 40

EXTREME_INTEGERS = (-(2**31), -(2**31) + 1, -2, -1, 0, 1, 2, 3, 31, 32, 100, 101, 2**31 - 2, 2**31 - 1)
EXTREME_FLOATS = (math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 1e-45, 1e-8, 9e-6, 1e-5, 0.5, 1.0, 1.0000001, 3.4e38)


def describe_worker(
    *,
    vocab_size: int = VOCAB_SIZE,
    max_model_len: int = MAX_MODEL_LEN,
    block_size: int = BLOCK_SIZE,
    num_blocks: int = NUM_BLOCKS,
    max_sequences: int = MAX_SEQUENCES,
    max_tokens_per_step: int = MAX_TOKENS,
) -> WorkerDescription:
    """A worker of which every figure and text is another."""
    return WorkerDescription(
        model=ModelDescription(
            name="tiny",
            architecture="LlamaForCausalLM",
            weights_digest="sha256:01",
            config_digest="sha256:02",
            eos_token_ids=(2, 7),
            dtype="float32",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_layers=11,
            hidden_size=64,
            num_heads=12,
            num_kv_heads=3,
            head_dim=16,
            num_parameters=2**40,
        ),
        kv_cache=KvCacheDescription(
            dtype="bfloat16", layout_fingerprint="layout", block_size=block_size, num_blocks=num_blocks, bytes_per_block=2**35
        ),
        limits=StepLimits(
            max_sequences=max_sequences,
            max_tokens_per_step=max_tokens_per_step,
            max_steps_in_flight=65,
            max_message_bytes=2**33,
            max_feedback_sequences=13,
            lease_idle_ms=30_000,
            max_replays=130,
        ),
        execution=ExecutionDescription(
            device="cpu",
            device_name="a processor",
            optimization_level=1,
            graph_mode="PIECEWISE",
            captured=(
                CapturedSize(mode=GraphMode.FULL, num_tokens=8, num_sequences=9, uniform_query_len=10, cost_ms=0.5),
                CapturedSize(mode=GraphMode.PIECEWISE, num_tokens=14, num_sequences=15, uniform_query_len=17, cost_ms=1.5),
            ),
            attention="native",
            num_threads=4,
            tensor_parallel_size=5,
        ),
        self_check=SelfCheck(passed=True, findings=("logits agree", "tokens agree")),
        degradations=(Degradation(reason="no_compiler", message="install one"),),
        versions={"modelworker": "0.1.0", "torch": "2"},
    )


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
    if draw(st.booleans()) or any(_has_penalties(request, row) for row in rows):
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


def _has_penalties(request: pb.ExecuteStepRequest, row: int) -> bool:
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
        if _has_penalties(request, row) and _samples(request, row)
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
