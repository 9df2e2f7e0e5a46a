from google.protobuf import any_pb2 as _any_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogprobsMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOGPROBS_MODE_RAW: _ClassVar[LogprobsMode]
    LOGPROBS_MODE_PROCESSED: _ClassVar[LogprobsMode]

class SequenceErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEQUENCE_ERROR_CODE_UNSPECIFIED: _ClassVar[SequenceErrorCode]
    NON_FINITE_LOGITS: _ClassVar[SequenceErrorCode]
    NO_ALLOWED_TOKEN: _ClassVar[SequenceErrorCode]
    FEEDBACK_SOURCE_FAILED: _ClassVar[SequenceErrorCode]
    NON_FINITE_HIDDEN_STATE: _ClassVar[SequenceErrorCode]

class GraphMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAPH_MODE_NONE: _ClassVar[GraphMode]
    GRAPH_MODE_PIECEWISE: _ClassVar[GraphMode]
    GRAPH_MODE_FULL: _ClassVar[GraphMode]
LOGPROBS_MODE_RAW: LogprobsMode
LOGPROBS_MODE_PROCESSED: LogprobsMode
SEQUENCE_ERROR_CODE_UNSPECIFIED: SequenceErrorCode
NON_FINITE_LOGITS: SequenceErrorCode
NO_ALLOWED_TOKEN: SequenceErrorCode
FEEDBACK_SOURCE_FAILED: SequenceErrorCode
NON_FINITE_HIDDEN_STATE: SequenceErrorCode
GRAPH_MODE_NONE: GraphMode
GRAPH_MODE_PIECEWISE: GraphMode
GRAPH_MODE_FULL: GraphMode

class ExecuteStepRequest(_message.Message):
    __slots__ = ("worker_epoch", "router_id", "step_id", "client_tag", "timeout_ms", "traceparent", "sequence_ids", "query_lens", "context_lens", "token_ids", "draft_lens", "block_counts", "block_ids", "sample", "sampling", "history", "logit_bias", "allowed_ids", "banned_ids", "grammar", "prompt_logprobs", "next_prompt_ids", "zero_block_ids", "block_copies", "finished_sequence_ids", "draft_probabilities", "lora_index", "return_hidden")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_TAG_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    QUERY_LENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    HISTORY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    ZERO_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COPIES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    LORA_INDEX_FIELD_NUMBER: _ClassVar[int]
    RETURN_HIDDEN_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    router_id: int
    step_id: int
    client_tag: int
    timeout_ms: int
    traceparent: str
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    query_lens: _containers.RepeatedScalarFieldContainer[int]
    context_lens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_lens: _containers.RepeatedScalarFieldContainer[int]
    block_counts: _containers.RepeatedScalarFieldContainer[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    sample: _containers.RepeatedScalarFieldContainer[bool]
    sampling: SamplingParams
    history: TokenHistory
    logit_bias: LogitBias
    allowed_ids: TokenIdLists
    banned_ids: TokenIdLists
    grammar: GrammarMasks
    prompt_logprobs: _containers.RepeatedScalarFieldContainer[bool]
    next_prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    zero_block_ids: _containers.RepeatedScalarFieldContainer[int]
    block_copies: BlockCopies
    finished_sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_probabilities: DraftProbabilities
    lora_index: _containers.RepeatedScalarFieldContainer[int]
    return_hidden: bool
    def __init__(self, worker_epoch: _Optional[int] = ..., router_id: _Optional[int] = ..., step_id: _Optional[int] = ..., client_tag: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., query_lens: _Optional[_Iterable[int]] = ..., context_lens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., draft_lens: _Optional[_Iterable[int]] = ..., block_counts: _Optional[_Iterable[int]] = ..., block_ids: _Optional[_Iterable[int]] = ..., sample: _Optional[_Iterable[bool]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., history: _Optional[_Union[TokenHistory, _Mapping]] = ..., logit_bias: _Optional[_Union[LogitBias, _Mapping]] = ..., allowed_ids: _Optional[_Union[TokenIdLists, _Mapping]] = ..., banned_ids: _Optional[_Union[TokenIdLists, _Mapping]] = ..., grammar: _Optional[_Union[GrammarMasks, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[bool]] = ..., next_prompt_ids: _Optional[_Iterable[int]] = ..., zero_block_ids: _Optional[_Iterable[int]] = ..., block_copies: _Optional[_Union[BlockCopies, _Mapping]] = ..., finished_sequence_ids: _Optional[_Iterable[int]] = ..., draft_probabilities: _Optional[_Union[DraftProbabilities, _Mapping]] = ..., lora_index: _Optional[_Iterable[int]] = ..., return_hidden: _Optional[bool] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "has_seed", "presence", "frequency", "repetition", "num_logprobs", "logprobs_mode")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    HAS_SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_MODE_FIELD_NUMBER: _ClassVar[int]
    temperature: _containers.RepeatedScalarFieldContainer[float]
    top_k: _containers.RepeatedScalarFieldContainer[int]
    top_p: _containers.RepeatedScalarFieldContainer[float]
    min_p: _containers.RepeatedScalarFieldContainer[float]
    seed: _containers.RepeatedScalarFieldContainer[int]
    has_seed: _containers.RepeatedScalarFieldContainer[bool]
    presence: _containers.RepeatedScalarFieldContainer[float]
    frequency: _containers.RepeatedScalarFieldContainer[float]
    repetition: _containers.RepeatedScalarFieldContainer[float]
    num_logprobs: _containers.RepeatedScalarFieldContainer[int]
    logprobs_mode: _containers.RepeatedScalarFieldContainer[LogprobsMode]
    def __init__(self, temperature: _Optional[_Iterable[float]] = ..., top_k: _Optional[_Iterable[int]] = ..., top_p: _Optional[_Iterable[float]] = ..., min_p: _Optional[_Iterable[float]] = ..., seed: _Optional[_Iterable[int]] = ..., has_seed: _Optional[_Iterable[bool]] = ..., presence: _Optional[_Iterable[float]] = ..., frequency: _Optional[_Iterable[float]] = ..., repetition: _Optional[_Iterable[float]] = ..., num_logprobs: _Optional[_Iterable[int]] = ..., logprobs_mode: _Optional[_Iterable[_Union[LogprobsMode, str]]] = ...) -> None: ...

class TokenHistory(_message.Message):
    __slots__ = ("prompt_lens", "output_lens", "token_ids")
    PROMPT_LENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    prompt_lens: _containers.RepeatedScalarFieldContainer[int]
    output_lens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt_lens: _Optional[_Iterable[int]] = ..., output_lens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("counts", "token_ids", "values")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenIdLists(_message.Message):
    __slots__ = ("counts", "token_ids")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GrammarMasks(_message.Message):
    __slots__ = ("rows", "bitmasks")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    BITMASKS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    bitmasks: bytes
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., bitmasks: _Optional[bytes] = ...) -> None: ...

class BlockCopies(_message.Message):
    __slots__ = ("source_ids", "destination_ids")
    SOURCE_IDS_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_IDS_FIELD_NUMBER: _ClassVar[int]
    source_ids: _containers.RepeatedScalarFieldContainer[int]
    destination_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, source_ids: _Optional[_Iterable[int]] = ..., destination_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DraftProbabilities(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ExecuteStepResponse(_message.Message):
    __slots__ = ("worker_epoch", "step_id", "client_tag", "sampled_counts", "sampled_ids", "logprobs", "prompt_logprobs", "sequence_errors", "tainted_block_ids", "graph", "timings_ns")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_TAG_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_COUNTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ERRORS_FIELD_NUMBER: _ClassVar[int]
    TAINTED_BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAPH_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_NS_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    step_id: int
    client_tag: int
    sampled_counts: _containers.RepeatedScalarFieldContainer[int]
    sampled_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: Logprobs
    prompt_logprobs: PromptLogprobs
    sequence_errors: _containers.RepeatedCompositeFieldContainer[SequenceError]
    tainted_block_ids: _containers.RepeatedScalarFieldContainer[int]
    graph: GraphExecution
    timings_ns: StepTimings
    def __init__(self, worker_epoch: _Optional[int] = ..., step_id: _Optional[int] = ..., client_tag: _Optional[int] = ..., sampled_counts: _Optional[_Iterable[int]] = ..., sampled_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., sequence_errors: _Optional[_Iterable[_Union[SequenceError, _Mapping]]] = ..., tainted_block_ids: _Optional[_Iterable[int]] = ..., graph: _Optional[_Union[GraphExecution, _Mapping]] = ..., timings_ns: _Optional[_Union[StepTimings, _Mapping]] = ...) -> None: ...

class ExecuteStepsResponse(_message.Message):
    __slots__ = ("step_id", "client_tag", "ok", "error")
    STEP_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_TAG_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    step_id: int
    client_tag: int
    ok: ExecuteStepResponse
    error: Status
    def __init__(self, step_id: _Optional[int] = ..., client_tag: _Optional[int] = ..., ok: _Optional[_Union[ExecuteStepResponse, _Mapping]] = ..., error: _Optional[_Union[Status, _Mapping]] = ...) -> None: ...

class Status(_message.Message):
    __slots__ = ("code", "message", "details")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    details: _containers.RepeatedCompositeFieldContainer[_any_pb2.Any]
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., details: _Optional[_Iterable[_Union[_any_pb2.Any, _Mapping]]] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("modes", "counts", "token_ids", "values", "ranks")
    MODES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    modes: _containers.RepeatedScalarFieldContainer[LogprobsMode]
    counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, modes: _Optional[_Iterable[_Union[LogprobsMode, str]]] = ..., counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("counts", "token_ids", "values", "ranks")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceError(_message.Message):
    __slots__ = ("index", "code", "message")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    index: int
    code: SequenceErrorCode
    message: str
    def __init__(self, index: _Optional[int] = ..., code: _Optional[_Union[SequenceErrorCode, str]] = ..., message: _Optional[str] = ...) -> None: ...

class GraphExecution(_message.Message):
    __slots__ = ("mode", "padded_tokens", "padded_sequences", "compiled", "fallback_reason")
    MODE_FIELD_NUMBER: _ClassVar[int]
    PADDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PADDED_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    COMPILED_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_REASON_FIELD_NUMBER: _ClassVar[int]
    mode: GraphMode
    padded_tokens: int
    padded_sequences: int
    compiled: bool
    fallback_reason: str
    def __init__(self, mode: _Optional[_Union[GraphMode, str]] = ..., padded_tokens: _Optional[int] = ..., padded_sequences: _Optional[int] = ..., compiled: _Optional[bool] = ..., fallback_reason: _Optional[str] = ...) -> None: ...

class StepTimings(_message.Message):
    __slots__ = ("queue", "prepare", "forward", "sample", "total")
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    queue: int
    prepare: int
    forward: int
    sample: int
    total: int
    def __init__(self, queue: _Optional[int] = ..., prepare: _Optional[int] = ..., forward: _Optional[int] = ..., sample: _Optional[int] = ..., total: _Optional[int] = ...) -> None: ...

class GetWorkerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_epoch", "next_step_id", "last_executed_step_id", "lease_holder", "capabilities", "model", "kv_cache", "limits", "execution", "self_check", "degradations", "versions", "counters", "ops")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_EXECUTED_STEP_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_HOLDER_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_FIELD_NUMBER: _ClassVar[int]
    SELF_CHECK_FIELD_NUMBER: _ClassVar[int]
    DEGRADATIONS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    OPS_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    next_step_id: int
    last_executed_step_id: int
    lease_holder: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    model: ModelInfo
    kv_cache: KvCacheInfo
    limits: WorkerLimits
    execution: ExecutionInfo
    self_check: SelfCheck
    degradations: _containers.RepeatedCompositeFieldContainer[Degradation]
    versions: _containers.ScalarMap[str, str]
    counters: _containers.ScalarMap[str, int]
    ops: _containers.RepeatedCompositeFieldContainer[OpInfo]
    def __init__(self, worker_epoch: _Optional[int] = ..., next_step_id: _Optional[int] = ..., last_executed_step_id: _Optional[int] = ..., lease_holder: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ..., kv_cache: _Optional[_Union[KvCacheInfo, _Mapping]] = ..., limits: _Optional[_Union[WorkerLimits, _Mapping]] = ..., execution: _Optional[_Union[ExecutionInfo, _Mapping]] = ..., self_check: _Optional[_Union[SelfCheck, _Mapping]] = ..., degradations: _Optional[_Iterable[_Union[Degradation, _Mapping]]] = ..., versions: _Optional[_Mapping[str, str]] = ..., counters: _Optional[_Mapping[str, int]] = ..., ops: _Optional[_Iterable[_Union[OpInfo, _Mapping]]] = ...) -> None: ...

class OpInfo(_message.Message):
    __slots__ = ("name", "implementation", "reason", "alternatives")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IMPLEMENTATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ALTERNATIVES_FIELD_NUMBER: _ClassVar[int]
    name: str
    implementation: str
    reason: str
    alternatives: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., implementation: _Optional[str] = ..., reason: _Optional[str] = ..., alternatives: _Optional[_Iterable[str]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "architecture", "weights_digest", "config_digest", "eos_token_ids", "dtype", "vocab_size", "max_model_len", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "num_parameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    weights_digest: str
    config_digest: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    vocab_size: int
    max_model_len: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., weights_digest: _Optional[str] = ..., config_digest: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., num_layers: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_heads: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., num_parameters: _Optional[int] = ...) -> None: ...

class KvCacheInfo(_message.Message):
    __slots__ = ("dtype", "layout_fingerprint", "block_size", "num_blocks", "bytes_per_block")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    layout_fingerprint: str
    block_size: int
    num_blocks: int
    bytes_per_block: int
    def __init__(self, dtype: _Optional[str] = ..., layout_fingerprint: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., bytes_per_block: _Optional[int] = ...) -> None: ...

class WorkerLimits(_message.Message):
    __slots__ = ("max_sequences", "max_tokens_per_step", "max_steps_in_flight", "max_message_bytes", "max_feedback_sequences", "lease_idle_ms", "max_replays")
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_FEEDBACK_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLAYS_FIELD_NUMBER: _ClassVar[int]
    max_sequences: int
    max_tokens_per_step: int
    max_steps_in_flight: int
    max_message_bytes: int
    max_feedback_sequences: int
    lease_idle_ms: int
    max_replays: int
    def __init__(self, max_sequences: _Optional[int] = ..., max_tokens_per_step: _Optional[int] = ..., max_steps_in_flight: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_feedback_sequences: _Optional[int] = ..., lease_idle_ms: _Optional[int] = ..., max_replays: _Optional[int] = ...) -> None: ...

class ExecutionInfo(_message.Message):
    __slots__ = ("device", "device_name", "optimization_level", "graph_mode", "captured", "attention", "num_threads", "tensor_parallel_size")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    OPTIMIZATION_LEVEL_FIELD_NUMBER: _ClassVar[int]
    GRAPH_MODE_FIELD_NUMBER: _ClassVar[int]
    CAPTURED_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    device: str
    device_name: str
    optimization_level: int
    graph_mode: str
    captured: _containers.RepeatedCompositeFieldContainer[CapturedSize]
    attention: str
    num_threads: int
    tensor_parallel_size: int
    def __init__(self, device: _Optional[str] = ..., device_name: _Optional[str] = ..., optimization_level: _Optional[int] = ..., graph_mode: _Optional[str] = ..., captured: _Optional[_Iterable[_Union[CapturedSize, _Mapping]]] = ..., attention: _Optional[str] = ..., num_threads: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ...) -> None: ...

class CapturedSize(_message.Message):
    __slots__ = ("mode", "num_tokens", "num_sequences", "uniform_query_len", "cost_ms")
    MODE_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    UNIFORM_QUERY_LEN_FIELD_NUMBER: _ClassVar[int]
    COST_MS_FIELD_NUMBER: _ClassVar[int]
    mode: GraphMode
    num_tokens: int
    num_sequences: int
    uniform_query_len: int
    cost_ms: float
    def __init__(self, mode: _Optional[_Union[GraphMode, str]] = ..., num_tokens: _Optional[int] = ..., num_sequences: _Optional[int] = ..., uniform_query_len: _Optional[int] = ..., cost_ms: _Optional[float] = ...) -> None: ...

class SelfCheck(_message.Message):
    __slots__ = ("passed", "findings")
    PASSED_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    passed: bool
    findings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, passed: _Optional[bool] = ..., findings: _Optional[_Iterable[str]] = ...) -> None: ...

class Degradation(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class ReleaseSequencesRequest(_message.Message):
    __slots__ = ("worker_epoch", "router_id", "sequence_ids")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    router_id: int
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_epoch: _Optional[int] = ..., router_id: _Optional[int] = ..., sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseSequencesResponse(_message.Message):
    __slots__ = ("num_released",)
    NUM_RELEASED_FIELD_NUMBER: _ClassVar[int]
    num_released: int
    def __init__(self, num_released: _Optional[int] = ...) -> None: ...

class ResetKvCacheRequest(_message.Message):
    __slots__ = ("worker_epoch",)
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    def __init__(self, worker_epoch: _Optional[int] = ...) -> None: ...

class ResetKvCacheResponse(_message.Message):
    __slots__ = ("worker_epoch",)
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    def __init__(self, worker_epoch: _Optional[int] = ...) -> None: ...

class ExportKvBlocksRequest(_message.Message):
    __slots__ = ("worker_epoch", "block_ids")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, worker_epoch: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ExportKvBlocksResponse(_message.Message):
    __slots__ = ("layout_fingerprint", "block")
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    layout_fingerprint: str
    block: KvBlock
    def __init__(self, layout_fingerprint: _Optional[str] = ..., block: _Optional[_Union[KvBlock, _Mapping]] = ...) -> None: ...

class ImportKvBlocksRequest(_message.Message):
    __slots__ = ("worker_epoch", "layout_fingerprint", "block")
    WORKER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    worker_epoch: int
    layout_fingerprint: str
    block: KvBlock
    def __init__(self, worker_epoch: _Optional[int] = ..., layout_fingerprint: _Optional[str] = ..., block: _Optional[_Union[KvBlock, _Mapping]] = ...) -> None: ...

class ImportKvBlocksResponse(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class KvBlock(_message.Message):
    __slots__ = ("block_id", "layer", "dtype", "shape", "data")
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    block_id: int
    layer: int
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, block_id: _Optional[int] = ..., layer: _Optional[int] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...
