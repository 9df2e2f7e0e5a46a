"""Our models as the compiler gets them: a function of a step's tensors, over a small paged cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import modelworker.ops.attention
import modelworker.worker.models.llama
from modelworker.compiler.model_source import ModelSource
from modelworker.compiler.program import StepInput
from modelworker.ops.catalog import splitting_ops
from modelworker.ops.cpu.library import CpuLibrary
from modelworker.ops.op_settings import OpSettings
from modelworker.worker.models import AttentionMetadata, CausalLM
from modelworker_testing.checkpoints import TINY, llama_tensors, save_checkpoint
from modelworker_testing.paged_runs import VOCAB_SIZE, PagedCache, load_ours

MAX_LEN = 64
NUM_SEQUENCES = 4

STEP_INPUTS: Mapping[str, StepInput] = {
    "token_ids": StepInput(("num_tokens",), torch.int32),
    "positions": StepInput(("num_tokens",), torch.int32),
    "query_starts": StepInput(("num_sequences + 1",), torch.int32),
    "seq_lens": StepInput(("num_sequences",), torch.int32),
    "block_tables": StepInput(("num_sequences", "table_width"), torch.int32),
    "slots": StepInput(("num_tokens",), torch.int64),
}

MAX_SIZES: Mapping[str, int] = {"num_tokens": 256, "num_sequences": 8, "num_sequences + 1": 9, "table_width": 16}

Lengths = Sequence[tuple[int, int]]
"""Of each sequence of a step, its context length and its query length."""


@dataclass(frozen=True, slots=True, eq=False)
class CompilableModel:
    """A model with its cache.

    Attributes:
        model: ours.
        cache: of a few sequences.
        source: for the compiler.
    """

    model: CausalLM
    cache: PagedCache
    source: ModelSource
    _initial: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def step(self, lengths: Lengths) -> tuple[Tensor, ...]:
        """Makes the inputs of a step of the first sequences, in the order of `STEP_INPUTS`."""
        positions, attention = self.cache.step([context for context, _ in lengths], [query for _, query in lengths])
        attention = attention._replace(block_tables=attention.block_tables[: len(lengths)])
        generator = torch.Generator().manual_seed(len(positions))
        token_ids = torch.randint(VOCAB_SIZE, (len(positions),), generator=generator, dtype=torch.int32)
        return token_ids, positions, *attention

    def run(self, function: Any, steps: Sequence[Lengths]) -> tuple[list[Tensor], list[Tensor]]:
        """Runs steps on a fresh cache, and returns their results and what the caches hold then."""
        for (keys, values), (initial_keys, initial_values) in zip(self.cache.caches, self._initial, strict=True):
            keys.copy_(initial_keys)
            values.copy_(initial_values)
        with torch.no_grad():
            results = [function(*self.step(lengths)).clone() for lengths in steps]
        return results, [cache.clone() for pair in self.cache.caches for cache in pair]


def make_compilable(
    directory: Path, *, dtype: torch.dtype = torch.float32, kernels: CpuLibrary | None = None, **config: Any
) -> CompilableModel:
    """Makes a tiny Llama with random weights.

    Args:
        directory: where its checkpoint is written.
        dtype: in which it computes.
        kernels: the C++ kernels; None: its ops are native.
        config: what differs from `TINY`.
    """
    values = {**TINY, **config}
    return load_compilable(save_checkpoint(directory, values, llama_tensors(values)), dtype=dtype, kernels=kernels)


def load_compilable(directory: Path, *, dtype: torch.dtype, kernels: CpuLibrary | None = None) -> CompilableModel:
    """Loads a checkpoint."""
    model = load_ours(directory, dtype=dtype, ops=OpSettings(compiles=True, kernels=kernels))
    config: Any = model.config
    cache = PagedCache(config, num_kv_heads=config.num_kv_heads, num_sequences=NUM_SEQUENCES, max_len=MAX_LEN, dtype=dtype)

    def forward(token_ids: Tensor, positions: Tensor, *attention: Tensor) -> Tensor:
        hidden: Tensor = model(token_ids, positions, AttentionMetadata(*attention), cache.caches)
        return hidden

    bound = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for layer, (keys, values) in enumerate(cache.caches):
        bound |= {f"key_cache.{layer}": keys, f"value_cache.{layer}": values}
    folders = (Path(modelworker.worker.models.llama.__file__).parent, Path(modelworker.ops.attention.__file__).parent)
    source = ModelSource(
        function=forward,
        inputs=STEP_INPUTS,
        bound=bound,
        splitting_ops=splitting_ops(kernels),
        op_namespaces=("modelworker", *((kernels.level.namespace,) if kernels else ())),
        identity={"config": config.digest, "dtype": str(dtype)},
        sources=tuple(path for folder in folders for path in folder.glob("*.py")),
        max_sizes=MAX_SIZES,
    )
    initial = [(keys.clone(), values.clone()) for keys, values in cache.caches]
    return CompilableModel(model, cache, source, initial)
