"""What this worker implements of the protocol's optional rpcs and fields, by the names that `WorkerInfo.capabilities` carries.

A field is named by its path in `ExecuteStepRequest`. A field that is neither required nor named here is refused when it is set
(`unbuilt`), so what a worker promises and what it accepts can't drift apart.
"""

RPC_CAPABILITIES: tuple[str, ...] = ("GetWorkerInfo", "ExecuteStep", "ExecuteSteps", "ReleaseSequences", "ResetKvCache")

FIELD_CAPABILITIES: tuple[str, ...] = (
    "worker_epoch",
    "router_id",
    "step_id",
    "client_tag",
    "timeout_ms",
    "traceparent",
    "sequence_ids",  # and token id -1: the last token sampled for the sequence
    "sample",
    "sampling.temperature",
    "sampling.top_k",
    "sampling.top_p",
    "sampling.min_p",
    "sampling.seed",
    "sampling.has_seed",
    "sampling.presence",
    "sampling.frequency",
    "sampling.repetition",
    "sampling.num_logprobs",
    "sampling.logprobs_mode",
    "zero_block_ids",
    "block_copies",
    "finished_sequence_ids",
    "draft_lens",
    "history",
    "logit_bias",
    "allowed_ids",
    "banned_ids",
    "grammar",
    "prompt_logprobs",
    "next_prompt_ids",
)

CAPABILITIES: tuple[str, ...] = RPC_CAPABILITIES + FIELD_CAPABILITIES
