"""Measures what the edge costs per step: parsing with all checks, its digest, and encoding the answer. One JSON object per line.

    python tests/benchmarks/bench_wire.py [--repeat N]

Steps: decode of 256 sequences with 256 blocks each (all rows sampling with every parameter set), the same with 16 blocks, and a
prefill of 8 sequences with 1,024 tokens each.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import google.protobuf
import numpy as np

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.batch import StepBatch
from modelworker.worker.description import KvCacheDescription, StepLimits
from modelworker.worker.result import GraphExecution, GraphMode, SampledLogprobs, StepResult
from modelworker.worker.wire import encode_result, parse_step
from modelworker.worker.wire.step import digest_of
from modelworker_testing.descriptions import describe_engine

BLOCK_SIZE = 32
WORKER = describe_engine(
    "bench",
    vocab_size=128_256,
    max_model_len=8192,
    kv_cache=KvCacheDescription(
        dtype="bfloat16", layout_fingerprint="", block_size=BLOCK_SIZE, num_blocks=70_000, bytes_per_block=2**22
    ),
    limits=StepLimits(
        max_sequences=256,
        max_tokens_per_step=8192,
        max_steps_in_flight=64,
        max_message_bytes=2**26,
        max_feedback_sequences=0,
        lease_idle_ms=0,
        max_replays=0,
    ),
)


def make_request(num_sequences: int, num_blocks: int, query_len: int, *, sequenced: bool) -> bytes:
    """Serializes a step whose rows fill their tables to the last slot, with blocks in random order."""
    generator = np.random.default_rng(0)
    total = num_sequences * num_blocks
    request = pb.ExecuteStepRequest(
        query_lens=[query_len] * num_sequences,
        context_lens=[num_blocks * BLOCK_SIZE - query_len] * num_sequences,
        token_ids=generator.integers(0, WORKER.model.vocab_size, num_sequences * query_len).tolist(),
        block_counts=[num_blocks] * num_sequences,
        block_ids=(1 + generator.permutation(total)).tolist(),
        sample=[True] * num_sequences,
        sampling=pb.SamplingParams(
            temperature=[0.7] * num_sequences,
            top_k=[50] * num_sequences,
            top_p=[0.9] * num_sequences,
            min_p=[0.05] * num_sequences,
            seed=list(range(num_sequences)),
            has_seed=[True] * num_sequences,
            num_logprobs=[0] * num_sequences,
            logprobs_mode=["LOGPROBS_MODE_PROCESSED"] * num_sequences,
        ),
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )
    if sequenced:
        request.step_id, request.worker_epoch, request.router_id = 7, 8, 9
    return request.SerializeToString()


def make_result(batch: StepBatch) -> StepResult:
    """Makes a result in which every row has sampled one token with its logprob."""
    ones = np.ones(batch.num_sequences, np.int32)
    return StepResult(
        sampled_counts=ones,
        sampled_ids=ones,
        logprobs=SampledLogprobs(
            processed=ones == 1, counts=ones, token_ids=ones, values=np.zeros(batch.num_sequences, np.float32), ranks=ones
        ),
        sequence_errors=(),
        tainted_block_ids=np.zeros(0, np.int32),
        graph=GraphExecution(
            mode=GraphMode.NONE, padded_tokens=batch.num_tokens, padded_sequences=256, compiled=False, fallback_reason="disabled"
        ),
    )


def measure(name: str, run: Callable[[], Any], repeat: int, **figures: Any) -> None:
    """Times calls one by one and prints their spread."""
    for _ in range(20):
        run()
    times_us = []
    for _ in range(repeat):
        begun = time.perf_counter_ns()
        run()
        times_us.append((time.perf_counter_ns() - begun) / 1000)
    spread = {"min_us": min(times_us), "median_us": statistics.median(times_us), "max_us": max(times_us)}
    versions = {"python": platform.python_version(), "protobuf": google.protobuf.__version__, "numpy": np.__version__}
    print(json.dumps({"benchmark": name, **figures, **{key: round(value, 1) for key, value in spread.items()}, **versions}))


def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=1000, help="calls per measurement (default: %(default)s)")
    repeat = parser.parse_args().repeat
    for step, shape in {"decode_256x256": (256, 256, 1), "decode_256x16": (256, 16, 1), "prefill_8x1024": (8, 256, 1024)}.items():
        for sequenced in (False, True):
            content = make_request(*shape, sequenced=sequenced)
            request = pb.ExecuteStepRequest.FromString(content)
            parse = partial(parse_step, request, WORKER, arrival_ns=0, deadline_ns=None, raw=content)
            # Of an unsequenced step these are the checks and the copy into the batch; a sequenced one has a digest, too.
            measure("parse_step", parse, repeat, step=step, sequenced=sequenced, message_bytes=len(content))
        measure("digest", partial(digest_of, request), repeat, step=step, message_bytes=len(content))
        measure("protobuf_parse", partial(pb.ExecuteStepRequest.FromString, content), repeat, step=step, message_bytes=len(content))
        batch = replace(parse(), client_tag=1)
        measure("encode_result", partial(encode_result, batch, make_result(batch), 1), repeat, step=step)


if __name__ == "__main__":
    main()
