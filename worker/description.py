"""What a worker says of itself: everything in WorkerInfo that does not change from step to step."""

from collections.abc import Mapping
from dataclasses import dataclass

from modelworker.worker.result import GraphMode


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """The served model."""

    name: str
    architecture: str
    weights_digest: str
    config_digest: str
    eos_token_ids: tuple[int, ...]
    dtype: str
    vocab_size: int
    max_model_len: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KvCacheDescription:
    """Geometry of the KV cache. `num_blocks` includes the null block 0."""

    dtype: str
    layout_fingerprint: str
    block_size: int
    num_blocks: int
    bytes_per_block: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimits:
    """What a step, a message and the queue may be at most."""

    max_sequences: int
    max_tokens_per_step: int
    max_steps_in_flight: int
    max_message_bytes: int
    max_feedback_sequences: int
    lease_idle_ms: int
    max_replays: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedSize:
    """One captured graph. 0 sequences or query length: any."""

    mode: GraphMode
    num_tokens: int
    num_sequences: int
    uniform_query_len: int
    cost_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionDescription:
    """Where and how steps run."""

    device: str
    device_name: str
    optimization_level: int
    graph_mode: str
    captured: tuple[CapturedSize, ...]
    attention: str
    num_threads: int
    tensor_parallel_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfCheck:
    """Result of the check that runs before readiness."""

    passed: bool
    findings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Degradation:
    """Something that runs slower or otherwise than it should on this machine."""

    reason: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OpDescription:
    """An op or layer: the implementation in use ("" = not used by the model), why, and the others that there are."""

    name: str
    implementation: str
    reason: str
    alternatives: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerDescription:
    """Everything that a scheduler must know and that stays as it is after start-up."""

    model: ModelDescription
    kv_cache: KvCacheDescription
    limits: StepLimits
    execution: ExecutionDescription
    self_check: SelfCheck
    degradations: tuple[Degradation, ...]
    versions: Mapping[str, str]
    ops: tuple[OpDescription, ...] = ()
