"""A step's request becomes a checked batch, and its result an answer."""

from typing import Protocol

import numpy as np

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.batch import SampledLogprobs, StepBatch, StepResult
from modelworker.worker.description import WorkerDescription
from modelworker.worker.trace_context import trace_id_of
from modelworker.worker.wire.checks import CHECKS, Check, StepFields
from modelworker.worker.wire.content import MessageSchema, digest_without, refuse_unknown_fields
from modelworker.worker.wire.feedback import check_feedback_tokens, check_sequence_ids
from modelworker.worker.wire.info import graph_mode_name
from modelworker.worker.wire.maintenance import check_maintenance
from modelworker.worker.wire.plain import is_plain_decode
from modelworker.worker.wire.prompt_logprobs import encode_prompt_logprobs, parse_prompt_logprobs
from modelworker.worker.wire.sampling import parse_sampling
from modelworker.worker.wire.sizes import refuse_long_arrays
from modelworker.worker.wire.unbuilt import refuse_unbuilt_fields
from modelworker.worker.wire.violations import Violations

_STEP_SCHEMA = MessageSchema.of(pb.ExecuteStepRequest())
_RESET_SCHEMA = MessageSchema.of(pb.ResetKvCacheRequest())

_OTHER_CHECKS: tuple[Check, ...] = (check_sequence_ids, check_feedback_tokens, check_maintenance)

# What may differ between two tries of one step.
_NOT_CONTENT = frozenset(
    pb.ExecuteStepRequest.DESCRIPTOR.fields_by_name[name].number for name in ("client_tag", "timeout_ms", "traceparent")
)


def parse_step(
    request: pb.ExecuteStepRequest,
    description: WorkerDescription,
    *,
    arrival_ns: int,
    deadline_ns: int | None,
    raw: bytes | None = None,
    keeps_request: bool = False,
) -> StepBatch:
    """Hot path: makes a checked batch of a request, which may contain anything.

    Args:
        request: the request.
        description: limits, vocabulary and KV cache geometry of this worker.
        arrival_ns: `time.monotonic_ns()` of the request's arrival.
        deadline_ns: `time.monotonic_ns()` of the RPC's deadline, or None.
        raw: the bytes that the request was parsed from; None: they are gone. Only what is recorded is taken from them.
        keeps_request: the batch has the request's bytes in it, to be recorded.

    Returns:
        A batch of which everything that wire and engine rely on is true.

    Raises:
        InvalidStepError: with the path, what was found and what was expected, for up to 16 violations.
    """
    violations = Violations()
    _check_before_copying(request, description, violations)
    digest = _check_content(request, violations)
    fields = StepFields.of(request)
    checks = _OTHER_CHECKS if is_plain_decode(fields, description) else (*CHECKS, *_OTHER_CHECKS)
    for check in checks:
        check(fields, description, violations)
    sampling = parse_sampling(fields, description, violations)
    prompt_logprobs = parse_prompt_logprobs(fields, description, violations)
    violations.raise_if_any()
    return StepBatch(
        step_id=request.step_id,
        worker_epoch=request.worker_epoch,
        router_id=request.router_id,
        client_tag=request.client_tag,
        arrival_ns=arrival_ns,
        deadline_ns=_deadline(arrival_ns, request.timeout_ms, deadline_ns),
        digest=digest,
        traceparent=request.traceparent if trace_id_of(request.traceparent) else "",
        sequence_ids=fields.sequence_ids,
        query_lens=fields.query_lens,
        context_lens=fields.context_lens,
        token_ids=fields.token_ids,
        draft_lens=fields.draft_lens if len(fields.draft_lens) else np.zeros(fields.num_sequences, np.int32),
        block_counts=fields.block_counts,
        block_ids=fields.block_ids,
        sample=fields.sample if len(fields.sample) else np.ones(fields.num_sequences, np.bool_),
        sampling=sampling,
        finished_sequence_ids=fields.finished_sequence_ids,
        zero_block_ids=fields.zero_block_ids,
        copy_source_ids=fields.copy_source_ids,
        copy_destination_ids=fields.copy_destination_ids,
        prompt_logprobs=prompt_logprobs,
        request=(raw or request.SerializeToString()) if keeps_request else b"",
    )


def _check_before_copying(request: pb.ExecuteStepRequest, description: WorkerDescription, violations: Violations) -> None:
    """Checks what can be checked without looking at the entries of an array.

    Raises:
        InvalidStepError: an array is longer than any step's, so that it is not looked at.
    """
    refuse_long_arrays(request, description, violations)
    is_too_long = not violations.is_empty
    refuse_unbuilt_fields(request, violations)
    if is_too_long:
        violations.raise_if_any()


def _check_content(request: pb.ExecuteStepRequest, violations: Violations) -> bytes:
    """Checks what needs the request's bytes, and returns the digest of a sequenced step.

    What this worker does not know of the request is found without a look at any field: without it the request is smaller.
    """
    content = request.SerializeToString(deterministic=True)
    request.DiscardUnknownFields()
    if request.ByteSize() != len(content):
        request.ParseFromString(content)  # A request that is refused is refused again.
        refuse_unknown_fields(content, _STEP_SCHEMA, violations)
        return b""
    return digest_without(content, _NOT_CONTENT) if request.step_id else b""


def digest_of(request: pb.ExecuteStepRequest) -> bytes:
    """Computes the digest of a step's content: equal for two tries of one step, however their clients spell it."""
    return digest_without(request.SerializeToString(deterministic=True), _NOT_CONTENT)


def _deadline(arrival_ns: int, timeout_ms: int, deadline_ns: int | None) -> int | None:
    if timeout_ms == 0:
        return deadline_ns
    timeout_at_ns = arrival_ns + timeout_ms * 1_000_000
    return timeout_at_ns if deadline_ns is None else min(timeout_at_ns, deadline_ns)


class StepIdentity(Protocol):
    """What an answer repeats of its step, so that the step itself need not be kept until then."""

    @property
    def step_id(self) -> int: ...  # noqa: D102
    @property
    def client_tag(self) -> int: ...  # noqa: D102


def encode_result(step: StepIdentity, result: StepResult, worker_epoch: int) -> pb.ExecuteStepResponse:
    """Hot path: makes the answer to a step that was executed in `worker_epoch`."""
    graph, timings = result.graph, result.timings
    return pb.ExecuteStepResponse(
        worker_epoch=worker_epoch,
        step_id=step.step_id,
        client_tag=step.client_tag,
        sampled_counts=result.sampled_counts.tolist(),
        sampled_ids=result.sampled_ids.tolist(),
        logprobs=None if result.logprobs is None else _encode_logprobs(result.logprobs),
        prompt_logprobs=None if result.prompt_logprobs is None else encode_prompt_logprobs(result.prompt_logprobs),
        sequence_errors=[
            pb.SequenceError(index=failure.index, code=failure.code.name, message=failure.message)
            for failure in result.sequence_errors
        ],
        tainted_block_ids=result.tainted_block_ids.tolist(),
        graph=pb.GraphExecution(
            mode=graph_mode_name(graph.mode),
            padded_tokens=graph.padded_tokens,
            padded_sequences=graph.padded_sequences,
            compiled=graph.compiled,
            fallback_reason=graph.fallback_reason,
        ),
        timings_ns=pb.StepTimings(
            queue=timings.queue_ns,
            prepare=timings.prepare_ns,
            forward=timings.forward_ns,
            sample=timings.sample_ns,
            total=timings.total_ns,
        ),
    )


def _encode_logprobs(logprobs: SampledLogprobs) -> pb.Logprobs:
    return pb.Logprobs(
        modes=logprobs.processed.astype(np.int32).tolist(),
        counts=logprobs.counts.tolist(),
        token_ids=logprobs.token_ids.tolist(),
        values=logprobs.values.tolist(),
        ranks=logprobs.ranks.tolist(),
    )


def parse_reset_kv_cache(request: pb.ResetKvCacheRequest) -> int:
    """Returns the epoch that the caller wants to end.

    Raises:
        InvalidStepError: there is none, or a field that this worker does not know.
    """
    violations = Violations()
    if request.worker_epoch == 0:
        violations.add("worker_epoch", "found 0, expected the epoch to end (WorkerInfo.worker_epoch)")
    refuse_unknown_fields(request.SerializeToString(), _RESET_SCHEMA, violations)
    violations.raise_if_any()
    return request.worker_epoch


def encode_reset_kv_cache(worker_epoch: int) -> pb.ResetKvCacheResponse:
    """Makes the answer to ResetKvCache: the new epoch."""
    return pb.ResetKvCacheResponse(worker_epoch=worker_epoch)
