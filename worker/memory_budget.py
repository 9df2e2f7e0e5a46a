"""How the memory that the weights leave is shared out: KV cache, graphs, and the largest step.

Graphs come last, but what they need is known only once they are captured. So it is estimated before the KV cache is sized, and the
estimate is held against what they took.
"""

import logging
from dataclasses import dataclass

import torch

from modelworker.graphs.settings import GraphSettings
from modelworker.graphs.sizes import graph_keys
from modelworker.ops.triton_library import TritonLibrary
from modelworker.worker.description import Degradation
from modelworker.worker.errors import SettingsError
from modelworker.worker.models.config import ModelConfig
from modelworker.worker.plan import activation_bytes, judge_memory
from modelworker.worker.terminal import format_bytes

_logger = logging.getLogger(__name__)

# Pools grow by huge pages, and on a GPU by segments of the same size.
_PAGE_BYTES = 2 * 2**20
# Attention on a CPU splits a long context into so many parts at most, each with a sum, a maximum and a vector in fp32 for each
# head.
_MAX_CONTEXT_PARTS = 16
# A driver keeps an instantiated graph's kernels and their arguments: in the order of 10 KiB for each.
_KERNELS_PER_LAYER = 16
_DRIVER_BYTES_PER_KERNEL = 16 * 1024


def graph_bytes(
    settings: GraphSettings, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, triton: TritonLibrary | None
) -> int:
    """Estimates, rather too high than too low, what all graphs take together.

    They share one pool, which the largest fills: its activations, and the parts of its attention. On a GPU there is what the driver
    keeps of every graph.

    Args:
        settings: what is captured.
        config: of the model.
        dtype: in which it computes.
        device: where.
        triton: kernels of the GPU; None: there are none.
    """
    keys = graph_keys(settings)
    if not keys:
        return 0
    activations = activation_bytes(max(key.num_tokens for key in keys), config, dtype=dtype)
    # Between PIECEWISE graphs attention runs outside of them.
    attending = [key for key in keys if key.num_sequences is not None]
    if triton is None:
        sequences = max((key.num_sequences or 0 for key in attending), default=0)
        parts = sequences * _MAX_CONTEXT_PARTS * config.num_heads * (config.head_dim + 16) * 4
    else:
        tokens = max((key.num_tokens for key in attending), default=0)
        parts = triton.attention_workspace_bytes(tokens, num_heads=config.num_heads, head_dim=config.head_dim)
    driver = len(keys) * config.num_layers * _KERNELS_PER_LAYER * _DRIVER_BYTES_PER_KERNEL if device.type == "cuda" else 0
    return (activations + parts + driver + _PAGE_BYTES - 1) // _PAGE_BYTES * _PAGE_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """What is free once the model is loaded, and for what.

    Attributes:
        free_bytes: of all that follows.
        kv_cache_bytes: of the KV cache.
        graph_bytes: of all graphs, as they were estimated.
        step_bytes: of the largest step, as it was estimated.
    """

    free_bytes: int
    kv_cache_bytes: int
    graph_bytes: int
    step_bytes: int

    def judge_graphs(self, taken_bytes: int) -> tuple[tuple[str, ...], tuple[Degradation, ...]]:
        """Holds what the graphs took against the estimate.

        Args:
            taken_bytes: by all graphs; 0: nothing was captured.

        Returns:
            what there is to say of it, and what is degraded: the largest step may lack memory.

        Raises:
            SettingsError: KV cache and graphs together are more than was free: steps would lack memory sooner or later.
        """
        left = self.free_bytes - self.kv_cache_bytes - max(taken_bytes, 0)
        degradations = judge_memory(self.step_bytes, left)
        if taken_bytes == 0:
            return (), degradations
        text = f"graphs take {format_bytes(taken_bytes)}, and were estimated to take {format_bytes(self.graph_bytes)}"
        if left < 0:
            raise SettingsError(
                f"{text}; with the KV cache of {format_bytes(self.kv_cache_bytes)} that is more than the "
                f"{format_bytes(self.free_bytes)} that were free: lower --kv-cache-memory (or --kv-cache-fraction, --num-blocks), "
                "--max-sequences, or the sizes in --decode-graph-sizes and --mixed-graph-sizes"
            )
        if taken_bytes > self.graph_bytes:
            text += ": the KV cache was sized for less"
            _logger.warning(text)
        else:
            _logger.info(text)
        return (text,), degradations
