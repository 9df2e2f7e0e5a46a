"""Encodes what a worker says of itself."""

from collections.abc import Mapping

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.description import (
    ExecutionDescription,
    KvCacheDescription,
    ModelDescription,
    OpDescription,
    StepLimits,
    WorkerDescription,
)
from modelworker.worker.fencing import FenceState
from modelworker.worker.result import GraphMode
from modelworker.worker.wire.capabilities import CAPABILITIES


def encode_worker_info(description: WorkerDescription, state: FenceState, counters: Mapping[str, int]) -> pb.WorkerInfo:
    """Makes WorkerInfo of what stays (`description`) and what changes (`state`, `counters`)."""
    return pb.WorkerInfo(
        worker_epoch=state.worker_epoch,
        next_step_id=state.next_step_id,
        last_executed_step_id=state.last_executed_step_id,
        lease_holder=state.lease_holder,
        capabilities=CAPABILITIES,
        model=_encode_model(description.model),
        kv_cache=_encode_kv_cache(description.kv_cache),
        limits=_encode_limits(description.limits),
        execution=_encode_execution(description.execution),
        self_check=pb.SelfCheck(passed=description.self_check.passed, findings=description.self_check.findings),
        degradations=[
            pb.Degradation(reason=degradation.reason, message=degradation.message) for degradation in description.degradations
        ],
        versions=description.versions,
        counters=counters,
        ops=[_encode_op(op) for op in description.ops],
    )


def _encode_model(model: ModelDescription) -> pb.ModelInfo:
    return pb.ModelInfo(
        name=model.name,
        architecture=model.architecture,
        weights_digest=model.weights_digest,
        config_digest=model.config_digest,
        eos_token_ids=model.eos_token_ids,
        dtype=model.dtype,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        num_parameters=model.num_parameters,
    )


def _encode_kv_cache(kv_cache: KvCacheDescription) -> pb.KvCacheInfo:
    return pb.KvCacheInfo(
        dtype=kv_cache.dtype,
        layout_fingerprint=kv_cache.layout_fingerprint,
        block_size=kv_cache.block_size,
        num_blocks=kv_cache.num_blocks,
        bytes_per_block=kv_cache.bytes_per_block,
    )


def _encode_limits(limits: StepLimits) -> pb.WorkerLimits:
    return pb.WorkerLimits(
        max_sequences=limits.max_sequences,
        max_tokens_per_step=limits.max_tokens_per_step,
        max_steps_in_flight=limits.max_steps_in_flight,
        max_message_bytes=limits.max_message_bytes,
        max_feedback_sequences=limits.max_feedback_sequences,
        lease_idle_ms=limits.lease_idle_ms,
        max_replays=limits.max_replays,
    )


def _encode_execution(execution: ExecutionDescription) -> pb.ExecutionInfo:
    return pb.ExecutionInfo(
        device=execution.device,
        device_name=execution.device_name,
        optimization_level=execution.optimization_level,
        graph_mode=execution.graph_mode,
        captured=[
            pb.CapturedSize(
                mode=graph_mode_name(size.mode),
                num_tokens=size.num_tokens,
                num_sequences=size.num_sequences,
                uniform_query_len=size.uniform_query_len,
                cost_ms=size.cost_ms,
            )
            for size in execution.captured
        ],
        attention=execution.attention,
        num_threads=execution.num_threads,
        tensor_parallel_size=execution.tensor_parallel_size,
    )


def _encode_op(op: OpDescription) -> pb.OpInfo:
    return pb.OpInfo(name=op.name, implementation=op.implementation, reason=op.reason, alternatives=op.alternatives)


def graph_mode_name(mode: GraphMode) -> str:
    """Names a graph mode as the protocol does."""
    return f"GRAPH_MODE_{mode.name}"
