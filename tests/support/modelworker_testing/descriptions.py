"""What workers and engines without a real model say of themselves."""

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


def describe_engine(
    name: str, *, vocab_size: int, max_model_len: int, kv_cache: KvCacheDescription, limits: StepLimits
) -> WorkerDescription:
    """An engine that runs its steps eagerly on the CPU, and whose model has nothing but a vocabulary and a length."""
    return WorkerDescription(
        model=ModelDescription(
            name=name,
            architecture=f"{name.title()}ForCausalLM",
            weights_digest="sha256:00",
            config_digest="sha256:00",
            eos_token_ids=(2,),
            dtype="float32",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_layers=1,
            hidden_size=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=1,
            num_parameters=0,
        ),
        kv_cache=kv_cache,
        limits=limits,
        execution=ExecutionDescription(
            device="cpu",
            device_name="",
            optimization_level=0,
            graph_mode="NONE",
            captured=(),
            attention=name,
            num_threads=1,
            tensor_parallel_size=1,
        ),
        self_check=SelfCheck(passed=True, findings=()),
        degradations=(),
        versions={"modelworker": "0.1.0"},
    )
