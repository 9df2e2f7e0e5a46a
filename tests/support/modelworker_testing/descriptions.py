"""What engines without a real model say of themselves."""

from modelworker.worker.description import (
    ExecutionDescription,
    KvCacheDescription,
    ModelDescription,
    SelfCheck,
    StepLimits,
    WorkerDescription,
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
