"""Models: configuration, layers, decoders and the loading of weights."""

from modelworker.worker.models.causal_lm import AttentionMetadata, CausalLM, KvCaches
from modelworker.worker.models.checkpoint import Checkpoint
from modelworker.worker.models.config import ModelConfig
from modelworker.worker.models.registry import build_model, load_model_config
from modelworker.worker.models.tensor_parallel import TensorParallel
from modelworker.worker.models.weights import LoadedWeights, load_weights

__all__ = [
    "AttentionMetadata",
    "CausalLM",
    "Checkpoint",
    "KvCaches",
    "LoadedWeights",
    "ModelConfig",
    "TensorParallel",
    "build_model",
    "load_model_config",
    "load_weights",
]
