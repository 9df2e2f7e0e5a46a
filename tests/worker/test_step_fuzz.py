"""Whatever comes in, a step changes no KV that it does not write, its answer is in order, and a server has a status for it."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, event, given, settings

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.client import FEEDBACK_TOKEN, Client
from modelworker.worker.engine import Engine
from modelworker.worker.errors import InvalidStepError, PreconditionError
from modelworker.worker.settings import WorkerSettings
from modelworker.worker.wire import encode_result, parse_step
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.descriptions import BLOCK_SIZE, MAX_MODEL_LEN, MAX_SEQUENCES, MAX_TOKENS, NUM_BLOCKS, VOCAB_SIZE
from modelworker_testing.engines import engine_of, tiny_settings
from modelworker_testing.step_rules import is_valid, tables_of, token_places, zero_blocks
from modelworker_testing.steps import mutated_requests, valid_requests
from modelworker_testing.worker_process import worker_process

CANARY = 7.25
EPOCH = 12345
# Every status of the protocol's table but INTERNAL, which nothing that a client sends may cause.
STATUSES = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}

quick = settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def settings_of(model: Path) -> WorkerSettings:
    """The limits for which `steps` makes requests."""
    tiny = tiny_settings(model)
    return replace(
        tiny,
        model=replace(tiny.model, max_model_len=MAX_MODEL_LEN),
        kv_cache=replace(tiny.kv_cache, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS),
        step=replace(tiny.step, max_sequences=MAX_SEQUENCES, max_tokens_per_step=MAX_TOKENS),
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with engine_of(model, settings_of) as engine:
        yield engine


def fill(engine: Engine, value: float) -> None:
    with torch.inference_mode():
        for layer in engine.kv_cache.layers:
            for cache in layer:
                cache.fill_(value)


def changed_slots(engine: Engine, filler: float) -> set[int]:
    """The slots of which anything in any layer is not the filler any more."""
    changed = np.zeros(NUM_BLOCKS * BLOCK_SIZE, np.bool_)
    for layer in engine.kv_cache.layers:
        for cache in layer:
            values = cache.permute(0, 2, 1, 3).reshape(len(changed), -1).numpy()
            same = np.isnan(values) if math.isnan(filler) else values == filler
            changed |= ~same.all(1)
    return set(np.flatnonzero(changed).tolist())


def rows_that_read_nan(request: pb.ExecuteStepRequest) -> set[int]:
    """The rows whose context has a slot of a cache full of NaN, or one that such a row writes in this step."""
    writers = {slot: row for row, _, slot in token_places(request)}
    zeroed = {block * BLOCK_SIZE + offset for block in zero_blocks(request) for offset in range(BLOCK_SIZE)} - writers.keys()
    contexts = [
        {table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE for position in range(context)} - zeroed
        for table, context in zip(tables_of(request), request.context_lens, strict=True)
    ]
    poisoned: set[int] = set()
    while True:
        more = {
            row for row, slots in enumerate(contexts) if any(slot not in writers or writers[slot] in poisoned for slot in slots)
        }
        if more <= poisoned:
            return poisoned
        poisoned |= more


def rows_without_tokens(request: pb.ExecuteStepRequest) -> set[int]:
    """The rows whose first sampled position has no token left."""
    masks = request.grammar.bitmasks
    width = 4 * -(-VOCAB_SIZE // 32)
    rows = list(request.grammar.rows)
    found = set()
    for row in range(len(request.query_lens)):
        tokens = set(lists_of(request.allowed_ids, row) or range(VOCAB_SIZE)) - set(lists_of(request.banned_ids, row))
        if row in rows:
            bits = masks[rows.index(row) * width :][:width]
            tokens &= {token for token in range(VOCAB_SIZE) if bits[token // 8] >> token % 8 & 1}
        if not tokens:
            found.add(row)
    return found


def lists_of(lists: pb.TokenIdLists, row: int) -> list[int]:
    start = sum(lists.counts[:row])
    return list(lists.token_ids[start : start + lists.counts[row]]) if lists.counts else []


def answer_is_in_order(request: pb.ExecuteStepRequest, answer: pb.ExecuteStepResponse, poisoned: set[int]) -> None:
    rows = range(len(request.query_lens))
    samples = list(request.sample) or [True] * len(rows)
    drafts = list(request.draft_lens) or [0] * len(rows)
    without_tokens = {row for row in rows_without_tokens(request) if samples[row]} - poisoned
    failed = poisoned | without_tokens
    for row in rows:
        if not samples[row] or row in failed:
            assert answer.sampled_counts[row] == 0
        else:
            assert 1 <= answer.sampled_counts[row] <= 1 + drafts[row]
    assert len(answer.sampled_ids) == sum(answer.sampled_counts)
    assert all(0 <= token < VOCAB_SIZE for token in answer.sampled_ids)
    assert [error.index for error in answer.sequence_errors] == sorted(failed)
    for error in answer.sequence_errors:
        expected = pb.NON_FINITE_LOGITS if samples[error.index] else pb.NON_FINITE_HIDDEN_STATE
        assert error.code == (pb.NO_ALLOWED_TOKEN if error.index in without_tokens else expected)
    tables = tables_of(request)
    tainted = set()
    for row in poisoned:
        tainted.update(tables[row][: -(-(request.context_lens[row] + request.query_lens[row]) // BLOCK_SIZE)])
    assert list(answer.tainted_block_ids) == sorted(tainted)
    assert (answer.worker_epoch, answer.step_id, answer.client_tag) == (EPOCH, request.step_id, request.client_tag)
    logprobs_are_in_order(request, answer)
    prompt_logprobs_are_in_order(request, answer, failed)


def logprobs_are_in_order(request: pb.ExecuteStepRequest, answer: pb.ExecuteStepResponse) -> None:
    wanted = list(request.sampling.num_logprobs) or [-1] * len(request.query_lens)
    row_of_token = [row for row, count in enumerate(answer.sampled_counts) for _ in range(count)]
    if not answer.HasField("logprobs"):
        assert max(wanted, default=-1) == -1
        return
    logprobs = answer.logprobs
    assert len(logprobs.counts) == len(row_of_token)
    start = 0
    for row, token, count in zip(row_of_token, answer.sampled_ids, logprobs.counts, strict=True):
        assert count == 0 if wanted[row] < 0 else 1 <= count <= 1 + wanted[row]
        if count:
            assert logprobs.token_ids[start] == token
            assert list(logprobs.ranks[start + 1 : start + count]) == list(range(1, count))
        start += count
    assert len(logprobs.token_ids) == len(logprobs.values) == len(logprobs.ranks) == start
    assert all(-math.inf < value <= 0 for value in logprobs.values)
    assert all(1 <= rank <= VOCAB_SIZE for rank in logprobs.ranks)


def prompt_logprobs_are_in_order(request: pb.ExecuteStepRequest, answer: pb.ExecuteStepResponse, failed: set[int]) -> None:
    assert answer.HasField("prompt_logprobs") == any(request.prompt_logprobs)
    if any(request.prompt_logprobs):
        next_ids = list(request.next_prompt_ids) or [-1] * len(request.query_lens)
        tokens, start = [], 0
        for row, query_len in enumerate(request.query_lens):
            own = [*request.token_ids[start + 1 : start + query_len], *([next_ids[row]] if next_ids[row] >= 0 else [])]
            tokens.append(own if request.prompt_logprobs[row] and row not in failed else [])
            start += query_len
        assert list(answer.prompt_logprobs.counts) == list(map(len, tokens))
        assert list(answer.prompt_logprobs.token_ids) == [token for row in tokens for token in row]
        assert all(-math.inf < value <= 0 for value in answer.prompt_logprobs.values)


def step_touches_only_what_it_names(engine: Engine, request: pb.ExecuteStepRequest, raw: bytes) -> None:
    """The property: refused and untouched, or executed with exactly its own slots written and its blocks maintained."""
    for filler in (CANARY, math.nan):
        engine.reset_kv_cache()
        fill(engine, filler)
        if not is_valid(request, engine.description):
            event("refused")
            with pytest.raises(InvalidStepError):
                parse_step(request, engine.description, arrival_ns=0, deadline_ns=None, raw=raw)
            assert changed_slots(engine, filler) == set()
            return
        batch = parse_step(request, engine.description, arrival_ns=0, deadline_ns=None, raw=raw)
        if FEEDBACK_TOKEN in request.token_ids:
            event("nothing to feed back")
            with pytest.raises(PreconditionError, match="no token is kept"):
                engine.step(batch)
            assert changed_slots(engine, filler) == set()
            return
        event("executed")
        answer = encode_result(batch, engine.step(batch), EPOCH)
        written = {slot for _, _, slot in token_places(request)}
        zeroed = {block * BLOCK_SIZE + offset for block in zero_blocks(request) for offset in range(BLOCK_SIZE)}
        changed = changed_slots(engine, filler)
        failed = rows_that_read_nan(request) if math.isnan(filler) else set()
        assert zeroed - written <= changed <= written | zeroed
        # The rows that NaN does not reach write numbers.
        assert changed >= {slot for row, _, slot in token_places(request) if row not in failed}
        answer_is_in_order(request, pb.ExecuteStepResponse.FromString(answer.SerializeToString()), failed)


@quick
@given(request=valid_requests())
def test_a_valid_step_writes_exactly_its_slots_and_its_answer_is_in_order(engine: Engine, request: pb.ExecuteStepRequest) -> None:
    step_touches_only_what_it_names(engine, request, request.SerializeToString())


@quick
@given(request=mutated_requests())
def test_a_mutated_step_is_refused_or_writes_exactly_its_slots(engine: Engine, request: pb.ExecuteStepRequest) -> None:
    step_touches_only_what_it_names(engine, request, request.SerializeToString())


@st.composite
def damaged_steps(draw: st.DrawFn) -> bytes:
    """The bytes of a valid step with one to three of them changed, or any bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=64))
    content = bytearray(draw(valid_requests()).SerializeToString())
    for _ in range(draw(st.integers(1, 3)) if content else 0):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content)


@quick
@given(raw=damaged_steps())
def test_damaged_bytes_are_refused_or_write_exactly_their_slots(engine: Engine, raw: bytes) -> None:
    try:
        request = pb.ExecuteStepRequest.FromString(raw)
    except DecodeError:
        event("no message")
        return
    step_touches_only_what_it_names(engine, request, raw)


def test_a_server_answers_every_step_with_ok_or_a_status_of_the_table_and_goes_on(model: Path) -> None:
    flags = ["--max-model-len", str(MAX_MODEL_LEN), "--block-size", str(BLOCK_SIZE), "--num-blocks", str(NUM_BLOCKS)]
    flags += ["--max-sequences", str(MAX_SEQUENCES), "--max-tokens-per-step", str(MAX_TOKENS)]
    seen: set[grpc.StatusCode] = set()
    with (
        worker_process(model, *flags) as process,
        Client(process.address) as client,
        grpc.insecure_channel(process.address) as channel,
    ):
        call = channel.unary_unary("/modelworker.v1.ModelWorker/ExecuteStep")

        @settings(quick, max_examples=200)
        @given(
            raw=damaged_steps() | (valid_requests() | mutated_requests()).map(lambda request: request.SerializeToString()),
            fits=st.booleans(),
            retried=st.booleans(),
        )
        def any_step_is_answered(raw: bytes, fits: bool, retried: bool) -> None:
            if fits and raw:
                info = client.info()
                identity = pb.ExecuteStepRequest(worker_epoch=info.worker_epoch, router_id=1, step_id=info.next_step_id - retried)
                raw += identity.SerializeToString()
            answered = call.future(raw, timeout=30)
            error = answered.exception()
            seen.add(grpc.StatusCode.OK if error is None else error.code())
            assert seen <= STATUSES, error
            if error is None:
                pb.ExecuteStepResponse.FromString(answered.result())

        any_step_is_answered()
        assert {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION} <= seen
        info = client.info()
        # How many depends on the deadlines that the machine's speed lets pass.
        assert info.last_executed_step_id > 0, info.counters
        assert "engine_faults_total" not in info.counters
