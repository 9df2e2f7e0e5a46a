"""Each rule of a step: what it refuses, and how it says so."""

import math
import struct
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.batch import StepBatch
from modelworker.worker.description import WorkerDescription
from modelworker.worker.errors import InvalidStepError
from modelworker.worker.wire import parse_reset_kv_cache, parse_step
from modelworker_testing.descriptions import describe_worker
from modelworker_testing.steps import step_request, varint

WORKER = describe_worker()
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def parse(request: pb.ExecuteStepRequest, worker: WorkerDescription = WORKER, **times: Any) -> StepBatch:
    return parse_step(request, worker, **{"arrival_ns": 0, "deadline_ns": None, **times})


def violations_of(request: pb.ExecuteStepRequest, worker: WorkerDescription = WORKER) -> dict[str, str]:
    with pytest.raises(InvalidStepError) as caught:
        parse(request, worker)
    return {violation.field: violation.description for violation in caught.value.violations}


def decode_of(num_sequences: int, **fields: Any) -> pb.ExecuteStepRequest:
    """Rows of one token at position 3, each with a block of its own."""
    return step_request(*((3, 1, [row + 1]) for row in range(num_sequences)), **fields)


# -- lengths and limits --


def test_a_step_without_rows_is_accepted() -> None:
    assert parse(pb.ExecuteStepRequest()).num_sequences == 0
    assert parse(pb.ExecuteStepRequest(step_id=1, worker_epoch=2, router_id=3, sampling=pb.SamplingParams())).is_sequenced


@pytest.mark.parametrize("name", ["context_lens", "token_ids", "block_counts", "block_ids", "sample", "draft_lens"])
def test_a_step_without_rows_but_with_entries_is_refused_naming_the_array(name: str) -> None:
    violations = violations_of(pb.ExecuteStepRequest(**{name: [1]}))
    assert "found 1 entries, expected 0" in violations[name]


@pytest.mark.parametrize("name", ["context_lens", "token_ids", "block_counts", "block_ids"])
@pytest.mark.parametrize("change", ["missing", "added", "empty"])
def test_an_array_of_another_length_is_refused_naming_it(name: str, change: str) -> None:
    request = decode_of(3)
    values = getattr(request, name)
    values[:] = {"missing": values[:-1], "added": [*values, 1], "empty": []}[change]
    assert violations_of(request)[name].startswith(f"found {len(values)} entries, expected 3, ")


@pytest.mark.parametrize(
    "name",
    ["temperature", "top_k", "top_p", "min_p", "seed", "has_seed", "num_logprobs", "logprobs_mode", "presence", "repetition"],
)
@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_sampling_array_that_is_neither_empty_nor_one_per_row_is_refused(name: str, length: int) -> None:
    request = decode_of(3, sampling=pb.SamplingParams(**{name: [1] * length}))
    found = violations_of(request)
    assert found == {f"sampling.{name}": f"found {length} entries, expected 3, one per entry of query_lens, or none"}


def test_a_sample_array_that_is_neither_empty_nor_one_per_row_is_refused() -> None:
    assert violations_of(decode_of(3, sample=[True, False])) == {
        "sample": "found 2 entries, expected 3, one per entry of query_lens, or none"
    }


@pytest.mark.parametrize("query", [0, -1, -(2**31)])
def test_a_row_without_tokens_is_refused_naming_it(query: int) -> None:
    request = decode_of(3)
    request.query_lens[1] = query
    assert violations_of(request)["query_lens[1]"] == f"row 1: found {query}, expected at least 1"


def test_lengths_whose_sum_wraps_around_are_refused() -> None:
    request = decode_of(4, query_lens=[2**31 - 1, 2**31 - 1, 1, 5])
    assert violations_of(request)["query_lens"] == "found 4294967300 tokens in sum, expected at most max_tokens_per_step = 40"


@pytest.mark.parametrize("context", [-1, -(2**31)])
def test_a_negative_context_is_refused_naming_the_row(context: int) -> None:
    request = decode_of(3)
    request.context_lens[2] = context
    assert violations_of(request) == {"context_lens[2]": f"row 2: found {context}, expected at least 0"}


@pytest.mark.parametrize(("context", "query"), [(30, 1), (0, 31), (29, 2), (2**31 - 1, 1)])
def test_a_row_longer_than_the_model_allows_is_refused_naming_it(context: int, query: int) -> None:
    request = step_request((3, 1, [9]), (context, query, [1, 2, 3, 4, 5, 6, 7, 8]))
    assert violations_of(request) == {
        "context_lens[1]": f"row 1: found context {context} + query {query} = {context + query} tokens, "
        "expected at most max_model_len = 30"
    }


@pytest.mark.parametrize(("context", "query"), [(29, 1), (0, 30), (15, 15)])
def test_a_row_of_exactly_the_models_length_is_accepted(context: int, query: int) -> None:
    assert parse(step_request((context, query, [1, 2, 3, 4, 5, 6, 7, 8]))).seq_lens.tolist() == [30]


def test_as_many_sequences_as_allowed_are_accepted_and_one_more_is_refused() -> None:
    assert parse(decode_of(6)).num_sequences == 6
    assert violations_of(decode_of(7))["query_lens"] == "found 7 sequences, expected at most max_sequences = 6"


def test_as_many_tokens_as_allowed_are_accepted_and_one_more_is_refused() -> None:
    def request_of(query: int) -> pb.ExecuteStepRequest:
        return step_request((0, 20, [1, 2, 3, 4, 5]), (0, query, [6, 7, 8, 9, 10, 11]))

    assert parse(request_of(20)).num_tokens == 40
    assert violations_of(request_of(21)) == {"token_ids": "found 41 tokens, expected at most max_tokens_per_step = 40"}
    short = request_of(21)
    del short.token_ids[-1]
    assert violations_of(short)["query_lens"] == "found 41 tokens in sum, expected at most max_tokens_per_step = 40"


# -- tokens --


@pytest.mark.parametrize("token", [-(2**31), -2, 101, 102, 2**31 - 1])
def test_a_token_outside_the_vocabulary_is_refused_naming_row_and_place(token: int) -> None:
    request = step_request((0, 3, [1]), (0, 4, [2]))
    request.token_ids[5] = token
    assert violations_of(request) == {
        "token_ids[5]": f"row 1, token 2 of the row: found {token}, expected 0 .. 100, or -1 (feedback)"
    }


def test_the_first_and_the_last_token_of_the_vocabulary_are_accepted() -> None:
    assert parse(decode_of(2, token_ids=[0, 100])).token_ids.tolist() == [0, 100]


# -- block tables --


def test_a_step_with_a_short_block_table_is_refused_naming_the_row() -> None:
    request = step_request((3, 1, [9]), (0, 20, [1, 2, 3, 4]))
    assert violations_of(request) == {"block_counts[1]": "row 1: found 4 blocks of 4 tokens, expected 5 .. 8"}


@pytest.mark.parametrize("seq_len", [4, 5, 8, 9])
def test_a_table_needs_another_block_right_after_a_multiple_of_the_block_size(seq_len: int) -> None:
    needed = 1 if seq_len == 4 else 2 if seq_len <= 8 else 3
    table = list(range(1, needed + 1))
    assert parse(step_request((seq_len - 1, 1, table))).block_counts.tolist() == [needed]
    violations = violations_of(step_request((seq_len - 1, 1, table[:-1])))
    assert violations == {"block_counts[0]": f"row 0: found {needed - 1} blocks of 4 tokens, expected {needed} .. 8"}


def test_a_table_longer_than_the_longest_sequence_needs_is_refused_and_a_spare_block_is_not() -> None:
    assert parse(step_request((0, 1, list(range(1, 9))))).block_counts.tolist() == [8]
    violations = violations_of(step_request((0, 1, list(range(1, 10)))))
    assert violations == {"block_counts[0]": "row 0: found 9 blocks of 4 tokens, expected 1 .. 8"}


@pytest.mark.parametrize("count", [-1, -(2**31), 2**31 - 1])
def test_an_extreme_block_count_is_refused_naming_the_row(count: int) -> None:
    request = decode_of(3)
    request.block_counts[1] = count
    assert violations_of(request) == {"block_counts[1]": f"row 1: found {count} blocks of 4 tokens, expected 1 .. 8"}


@pytest.mark.parametrize("block", [-(2**31), -1, 0, 32, 33, 2**31 - 1])
def test_a_block_outside_the_cache_is_refused_naming_row_and_place_even_where_it_is_not_used(block: int) -> None:
    request = step_request((3, 1, [9, 10]), (0, 5, [1, 2, block]))
    description = violations_of(request)["block_ids[4]"]
    assert description.startswith(f"row 1, block 2 of the row: found {block}, expected 1 .. 31")
    assert ("null block" in description) == (block == 0)


# -- writes --


def test_two_rows_that_write_one_slot_are_refused_naming_both() -> None:
    assert violations_of(step_request((3, 1, [5]), (2, 1, [6]), (3, 1, [5]))) == {
        "block_ids[2]": "rows 0 and 2 both write block 5, offset 3 (their positions 3 and 3), expected one row to write there"
    }


def test_two_prefills_that_overlap_in_a_block_are_refused_naming_it_once() -> None:
    assert violations_of(step_request((0, 8, [1, 2]), (4, 6, [3, 2, 4]))) == {
        "block_ids[3]": "rows 0 and 1 both write block 2, offset 0 (their positions 4 and 4), expected one row to write there"
    }


def test_rows_that_write_different_slots_of_one_block_are_accepted() -> None:
    assert parse(step_request((0, 2, [5]), (2, 2, [5]))).slots(4).tolist() == [20, 21, 22, 23]


def test_rows_may_share_blocks_that_they_only_read() -> None:
    assert parse(step_request((8, 1, [1, 2, 3]), (9, 2, [1, 2, 4]))).num_tokens == 3


def test_a_row_may_read_a_block_that_another_row_writes() -> None:
    assert parse(step_request((0, 4, [1]), (4, 3, [1, 2]))).num_tokens == 7
    assert parse(step_request((0, 8, [1, 2]), (8, 1, [1, 2, 3]))).num_tokens == 9


@pytest.mark.parametrize(
    ("row", "entry"),
    [
        ((0, 8, [5, 5]), 1),  # both are written
        ((4, 1, [5, 5]), 1),  # written, and its own context
        ((0, 1, [5, 6, 5]), 2),  # written, and spare
        ((8, 5, [7, 5, 5, 6]), 2),  # a prefill chunk whose context it is
    ],
)
def test_a_block_that_a_row_writes_and_names_twice_is_refused(row: tuple[int, int, list[int]], entry: int) -> None:
    violations = violations_of(step_request((3, 1, [20]), row))
    assert list(violations) == [f"block_ids[{1 + entry}]"]
    assert violations[f"block_ids[{1 + entry}]"].startswith("row 1: found block 5, which the row writes, as blocks ")


def test_a_block_that_a_row_names_twice_but_only_reads_is_accepted() -> None:
    assert parse(step_request((8, 1, [5, 5, 6]), (8, 5, [5, 5, 7, 8]))).num_tokens == 6


# -- sampling --


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-1.0, -1e-30, 1e-45, 1e-8, 9.9e-6, math.nan, math.inf, -math.inf)),
        *(("top_k", value) for value in (-1, -(2**31))),
        *(("top_p", value) for value in (0.0, -0.5, 1.0000001, math.nan, math.inf)),
        *(("min_p", value) for value in (-0.1, 1.0, 1.5, math.nan, math.inf, -math.inf)),
        *(("num_logprobs", value) for value in (-2, 21, 2**31 - 1, -(2**31))),
        *((name, value) for name in ("presence", "frequency") for value in (-2.0000002, 2.5, math.nan, math.inf, -math.inf)),
        *(("repetition", value) for value in (0.0, -1.0, math.nan, math.inf)),
        *(("logprobs_mode", value) for value in (2, -1, 2**31 - 1)),
    ],
)
def test_a_sampling_value_out_of_range_is_refused_naming_the_row(name: str, value: float) -> None:
    good = {"top_p": 1.0, "num_logprobs": -1, "repetition": 1.0}.get(name, 0)
    violations = violations_of(decode_of(3, sampling=pb.SamplingParams(**{name: [good, good, value]})))
    assert list(violations) == [f"sampling.{name}[2]"]
    assert violations[f"sampling.{name}[2]"].startswith("row 2: found ")
    assert ", expected " in violations[f"sampling.{name}[2]"]


def test_a_signalling_nan_is_refused_like_any_other() -> None:
    temperature = struct.pack("<BBI", 0x0A, 4, 0x7F800001)
    request = decode_of(1, sampling=pb.SamplingParams.FromString(temperature))
    assert list(violations_of(request)) == ["sampling.temperature[0]"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [0.0, -0.0, 1e-5, 3e38]),
        ("top_k", [0, 1, 101, 2**31 - 1]),
        ("top_p", [1e-45, 0.5, 0.9999999, 1.0]),
        ("min_p", [0.0, -0.0, 1e-45, 0.9999999]),
        ("seed", [0, 1, 2**63, 2**64 - 1]),
        ("has_seed", [True, False, True, False]),
        ("num_logprobs", [-1, 0, 1, 20]),
        ("presence", [-2.0, -0.0, 0.0, 2.0]),
        ("frequency", [-2.0, -0.0, 0.0, 2.0]),
        ("repetition", [1e-45, 0.5, 1.0, 3e38]),
        ("logprobs_mode", [0, 1, 0, 1]),
    ],
)
def test_the_bounds_of_every_sampling_parameter_are_accepted(name: str, values: list[float]) -> None:
    history = pb.TokenHistory(prompt_lens=[3] * 4, output_lens=[0] * 4, token_ids=[1] * 12)
    assert parse(decode_of(4, sampling=pb.SamplingParams(**{name: values}), history=history)).num_sequences == 4


def test_arrays_that_are_left_out_are_neutral() -> None:
    batch = parse(decode_of(2, sampling=pb.SamplingParams(temperature=[0, 0.5])))
    sampling = batch.sampling
    assert sampling is not None
    assert sampling.temperature.tolist() == [0, 0.5]
    assert sampling.top_k.tolist() == [0, 0]
    assert sampling.top_p.tolist() == [1, 1]
    assert sampling.min_p.tolist() == [0, 0]
    assert sampling.seed.tolist() == [0, 0]
    assert sampling.has_seed.tolist() == [False, False]
    assert sampling.num_logprobs.tolist() == [-1, -1]
    assert sampling.processed_logprobs.tolist() == [False, False]
    assert sampling.presence.tolist() == sampling.frequency.tolist() == [0, 0]
    assert sampling.repetition.tolist() == [1, 1]
    assert batch.sample.tolist() == [True, True]


def test_all_sampling_parameters_reach_the_batch() -> None:
    given = pb.SamplingParams(
        temperature=[0.5, 0],
        top_k=[102, 101],
        top_p=[0.25, 1],
        min_p=[0.125, 0],
        seed=[2**64 - 1, 5],
        has_seed=[True, False],
        presence=[0.5, 0],
        frequency=[0, -0.5],
        repetition=[1, 2],
        num_logprobs=[20, -1],
        logprobs_mode=["LOGPROBS_MODE_PROCESSED", "LOGPROBS_MODE_RAW"],
    )
    batch = parse(
        decode_of(
            2,
            sampling=given,
            sample=[True, False],
            history=pb.TokenHistory(prompt_lens=[3, 0], output_lens=[1, 0], token_ids=[1] * 4),
        )
    )
    sampling = batch.sampling
    assert sampling is not None
    assert batch.sample.tolist() == [True, False]
    assert sampling.temperature.tolist() == [0.5, 0]
    assert sampling.top_k.tolist() == [0, 101]  # more than the vocabulary is off
    assert sampling.top_p.tolist() == [0.25, 1]
    assert sampling.min_p.tolist() == [0.125, 0]
    assert sampling.seed.tolist() == [2**64 - 1, 5]
    assert sampling.has_seed.tolist() == [True, False]
    assert sampling.presence.tolist() == [0.5, 0]
    assert sampling.frequency.tolist() == [0, -0.5]
    assert sampling.repetition.tolist() == [1, 2]
    assert sampling.num_logprobs.tolist() == [20, -1]
    assert sampling.processed_logprobs.tolist() == [True, False]
    arrays = {name: getattr(sampling, name) for name in type(sampling).__dataclass_fields__}
    types = {name: str(array.dtype) for name, array in arrays.items() if isinstance(array, np.ndarray)}
    assert types == {
        "temperature": "float32",
        "top_k": "int32",
        "top_p": "float32",
        "min_p": "float32",
        "seed": "uint64",
        "has_seed": "bool",
        "presence": "float32",
        "frequency": "float32",
        "repetition": "float32",
        "num_logprobs": "int32",
        "processed_logprobs": "bool",
    }


def test_a_step_of_greedy_rows_without_logprobs_needs_no_sampling() -> None:
    assert parse(decode_of(2)).sampling is None
    assert parse(decode_of(2, sampling=pb.SamplingParams(temperature=[0, 0], top_k=[5, 5], num_logprobs=[-1, -1]))).sampling is None


# -- identity --


@pytest.mark.parametrize("name", ["worker_epoch", "router_id"])
def test_a_sequenced_step_without_epoch_or_router_is_refused(name: str) -> None:
    request = decode_of(1, step_id=7, worker_epoch=8, router_id=9)
    request.ClearField(name)
    assert violations_of(request) == {name: "found 0, expected to be set, because step_id is 7 (a sequenced step)"}


def test_an_unsequenced_step_needs_neither_epoch_nor_router() -> None:
    batch = parse(decode_of(1))
    assert (batch.step_id, batch.worker_epoch, batch.router_id, batch.digest) == (0, 0, 0, b"")
    assert not batch.is_sequenced


def test_the_identity_of_a_step_reaches_the_batch() -> None:
    largest = 2**64 - 1
    batch = parse(
        decode_of(1, step_id=largest, worker_epoch=largest - 1, router_id=largest - 2, client_tag=largest - 3, traceparent=TRACE)
    )
    assert (batch.step_id, batch.worker_epoch, batch.router_id, batch.client_tag) == (
        largest,
        largest - 1,
        largest - 2,
        largest - 3,
    )
    assert batch.traceparent == TRACE
    assert batch.is_sequenced


@pytest.mark.parametrize(
    "trace",
    [
        "x",
        TRACE.upper(),
        TRACE[:-1],
        TRACE + "0",
        TRACE + "\n",
        TRACE.replace("-", "_"),
        "00-" + "0" * 32 + TRACE[35:],
        TRACE[:36] + "0" * 16 + TRACE[52:],
        "\u0660" * 55,
        "a" * 100_000,
    ],
)
def test_a_trace_context_that_can_not_be_parsed_is_ignored(trace: str) -> None:
    assert parse(decode_of(1, traceparent=trace)).traceparent == ""


def test_a_trace_context_of_a_later_version_is_kept() -> None:
    later = "01" + TRACE[2:] + "-more"
    assert parse(decode_of(1, traceparent=later)).traceparent == later


@pytest.mark.parametrize(
    ("timeout_ms", "deadline_ns", "expected"),
    [
        (0, None, None),
        (0, 77, 77),
        (5, None, 5_000_100),
        (5, 77, 77),
        (5, 10**9, 5_000_100),
        (2**32 - 1, None, (2**32 - 1) * 10**6 + 100),
    ],
)
def test_the_deadline_is_the_earlier_one_of_rpc_and_timeout(timeout_ms: int, deadline_ns: int | None, expected: int | None) -> None:
    batch = parse(decode_of(1, timeout_ms=timeout_ms), arrival_ns=100, deadline_ns=deadline_ns)
    assert batch.arrival_ns == 100
    assert batch.deadline_ns == expected


# -- the digest --


def sequenced(**changes: Any) -> pb.ExecuteStepRequest:
    request = decode_of(2, step_id=7, worker_epoch=8, router_id=9, sampling=pb.SamplingParams(temperature=[0, 1]))
    request.MergeFrom(pb.ExecuteStepRequest(**changes))
    return request


WIDE_WORKER = describe_worker(max_sequences=64, max_tokens_per_step=64, num_blocks=64)
LONG_CONTENT = {"banned_ids": pb.TokenIdLists(counts=[1000, 0], token_ids=[3] * 1000)}


@pytest.mark.parametrize("content", [{}, LONG_CONTENT], ids=["short", "long"])
def test_retries_have_one_digest_whatever_their_tag_timeout_and_trace(content: dict[str, Any]) -> None:
    digest = parse(sequenced(**content)).digest
    assert 32 <= len(digest) < 512
    assert parse(sequenced(client_tag=1, timeout_ms=2, traceparent=TRACE, **content)).digest == digest
    assert parse(sequenced(client_tag=2**64 - 1, timeout_ms=2**32 - 1, **content)).digest == digest


@given(num_rows=st.integers(1, 40), timeout_ms=st.integers(1, 2**32 - 1), tag=st.integers(1, 2**64 - 1), is_traced=st.booleans())
@example(num_rows=24, timeout_ms=1000, tag=1, is_traced=True)
def test_retries_of_every_length_have_one_digest(num_rows: int, timeout_ms: int, tag: int, is_traced: bool) -> None:
    rows = [(0, 1, [1 + row]) for row in range(num_rows)]
    step = step_request(*rows, step_id=7, worker_epoch=8, router_id=9)
    retry = pb.ExecuteStepRequest(client_tag=tag, timeout_ms=timeout_ms, traceparent=TRACE if is_traced else "")
    retry.MergeFrom(step)
    assert parse(retry, WIDE_WORKER).digest == parse(step, WIDE_WORKER).digest


def test_unpacked_arrays_and_another_order_of_fields_have_the_same_digest() -> None:
    request = sequenced()
    parts = [pb.ExecuteStepRequest() for _ in range(2)]
    parts[0].sampling.CopyFrom(request.sampling)
    parts[1].CopyFrom(request)
    parts[1].ClearField("sampling")
    parts[1].ClearField("token_ids")
    unpacked = b"".join(struct.pack("<Bi", 10 << 3 | 5, token) for token in request.token_ids)
    again = pb.ExecuteStepRequest.FromString(unpacked + parts[0].SerializeToString() + parts[1].SerializeToString())
    assert parse(again).digest == parse(request).digest


@pytest.mark.parametrize("content", [{}, LONG_CONTENT], ids=["short", "long"])
@pytest.mark.parametrize(
    ("name", "value"),
    [("worker_epoch", 1), ("router_id", 1), ("step_id", 1), ("sample", [True, True]), ("token_ids", [1, 1]), ("block_ids", [2, 1])],
)
def test_another_content_has_another_digest(name: str, value: Any, content: dict[str, Any]) -> None:
    changed = sequenced(**content)
    changed.ClearField(name)
    changed.MergeFrom(pb.ExecuteStepRequest(**{name: value}))
    assert parse(changed).digest != parse(sequenced(**content)).digest


def test_a_request_is_left_as_it_was() -> None:
    request = sequenced(client_tag=1, timeout_ms=2, traceparent=TRACE)
    before = request.SerializeToString(deterministic=True)
    batch = parse(request)
    batch.block_ids[:] = 0
    assert request.SerializeToString(deterministic=True) == before


# -- fields that are unknown --


def test_an_unknown_field_is_refused_by_its_number() -> None:
    request = pb.ExecuteStepRequest.FromString(decode_of(1).SerializeToString() + b"\xf8\x07\x01")
    assert violations_of(request) == {"127": "found field number 127, which this worker does not know, expected unset"}
    assert list(violations_of(request)) == ["127"]  # also when it is looked at again


def test_an_unknown_sampling_parameter_is_refused_by_its_path() -> None:
    request = decode_of(1, sampling=pb.SamplingParams.FromString(b"\x6d\x00\x00\x80\x3f"))
    assert list(violations_of(request)) == ["sampling.13"]


def test_a_field_with_another_wire_type_is_refused_by_its_name() -> None:
    request = pb.ExecuteStepRequest.FromString(decode_of(1).SerializeToString() + b"\x40\x01")
    assert violations_of(request) == {"query_lens": "found wire type 0, which is not that of this field"}


@pytest.mark.parametrize("unknown", [b"\xf8\x07\x01", b"\xfb\x07\xfc\x07"], ids=["numbers", "groups"])
def test_millions_of_unknown_fields_are_refused_at_once(unknown: bytes) -> None:
    request = pb.ExecuteStepRequest.FromString(decode_of(1).SerializeToString() + unknown * 2_000_000)
    begun = time.thread_time()
    assert "127" in violations_of(request)
    assert time.thread_time() - begun < 0.5


# -- what is said --


def test_every_violation_of_a_step_is_named() -> None:
    request = step_request((0, 0, [1]), (29, 2, [2, 3, 4, 5, 6, 7, 8, 9]), (0, 20, [10, 11]), (0, 1, [0]))
    request.token_ids[:] = [*[1] * 22, 101]
    request.sampling.top_p.extend([1, 1, 0, 1])
    request.lora_index.append(1)
    request.draft_lens.extend([0, 2, 0, 0])
    request.banned_ids.counts.extend([0, 0, 0, 1])
    request.banned_ids.token_ids.append(101)
    assert list(violations_of(request)) == [
        "lora_index",
        "query_lens[0]",
        "context_lens[1]",
        "token_ids[22]",
        "block_counts[2]",
        "block_ids[11]",
        "draft_lens[1]",
        "sampling.top_p[2]",
        "banned_ids.token_ids[0]",
    ]


def test_at_most_16_violations_are_named() -> None:
    request = step_request((0, 20, [1, 2, 3, 4, 5]), token_ids=[101] * 20, lora_index=[1])
    violations = violations_of(request)
    assert list(violations) == ["lora_index", *(f"token_ids[{index}]" for index in range(15))]


def test_the_text_of_the_error_says_all_of_it() -> None:
    with pytest.raises(InvalidStepError, match=r"^query_lens\[0\]: row 0: found 0, expected at least 1$"):
        parse(step_request((0, 0, [1])))


def test_a_step_with_millions_of_rows_is_refused_at_once_for_their_number_alone() -> None:
    request = pb.ExecuteStepRequest.FromString(b"\x42" + varint(40_000_000) + bytes(40_000_000))
    begun = time.thread_time()
    assert list(violations_of(request)) == ["query_lens"]
    assert time.thread_time() - begun < 1.0


def test_a_huge_malformed_step_is_refused_at_once() -> None:
    request = step_request((-1, 1, [0]))
    request.MergeFromString(b"\x52" + varint(40_000_000) + b"\xff" * 40_000_000)
    begun = time.thread_time()
    assert list(violations_of(request)) == ["token_ids"]
    assert time.thread_time() - begun < 1.0


# -- reset --


def test_a_reset_without_an_epoch_is_refused() -> None:
    assert parse_reset_kv_cache(pb.ResetKvCacheRequest(worker_epoch=5)) == 5
    with pytest.raises(InvalidStepError, match="worker_epoch: found 0"):
        parse_reset_kv_cache(pb.ResetKvCacheRequest())


def test_a_reset_with_an_unknown_field_is_refused() -> None:
    request = pb.ResetKvCacheRequest.FromString(pb.ResetKvCacheRequest(worker_epoch=5).SerializeToString() + b"\xf8\x07\x01")
    with pytest.raises(InvalidStepError, match="127: found field number 127"):
        parse_reset_kv_cache(request)
