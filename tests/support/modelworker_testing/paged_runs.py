"""Our models, loaded as the worker does and run over a small paged cache. Imports no transformers."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from modelworker.ops.op_settings import OpSettings
from modelworker.worker.models import (
    AttentionMetadata,
    CausalLM,
    Checkpoint,
    ModelConfig,
    TensorParallel,
    build_model,
    load_model_config,
    load_weights,
)

VOCAB_SIZE = 101
BLOCK_SIZE = 4


def load_ours(
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    max_model_len: int | None = None,
    parallel: TensorParallel | None = None,
    ops: OpSettings | None = None,
) -> CausalLM:
    """Loads a directory as the worker does."""
    config = load_model_config(directory)
    model = build_model(config, dtype=dtype, max_model_len=max_model_len, parallel=parallel, ops=ops)
    load_weights(model, Checkpoint.open(directory), device=torch.device("cpu"))
    return model


class PagedCache:
    """The KV cache of a few sequences, whose blocks lie scattered in a pool that holds NaN wherever nothing was written."""

    def __init__(self, config: ModelConfig, *, num_kv_heads: int, num_sequences: int, max_len: int, dtype: torch.dtype) -> None:
        width = -(-max_len // BLOCK_SIZE)
        num_blocks = num_sequences * width + 1
        shape = (num_blocks, num_kv_heads, BLOCK_SIZE, config.head_dim)
        self.caches = [
            (torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype)) for _ in config.windows
        ]
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(2)) + 1
        self.tables = order.view(num_sequences, width).to(torch.int32)

    def step(self, context_lens: Sequence[int], query_lens: Sequence[int]) -> tuple[Tensor, AttentionMetadata]:
        """Positions [num_tokens] and the attention's arguments of a step."""
        positions, slots, starts = [], [], [0]
        for row, (context, query) in enumerate(zip(context_lens, query_lens, strict=True)):
            for position in range(context, context + query):
                positions.append(position)
                slots.append(int(self.tables[row, position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE)
            starts.append(starts[-1] + query)
        seq_lens = [context + query for context, query in zip(context_lens, query_lens, strict=True)]
        attention = AttentionMetadata(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(seq_lens, dtype=torch.int32),
            self.tables,
            torch.tensor(slots, dtype=torch.int64),
        )
        return torch.tensor(positions, dtype=torch.int32), attention


@torch.inference_mode()
def run_ours(
    model: CausalLM, prompts: Sequence[Tensor], *, chunk: int | None = None, num_kv_heads: int | None = None
) -> list[Tensor]:
    """Final hidden states [length, hidden_size] of each prompt: all in one step, or `chunk` tokens of each prompt a step."""
    config: ModelConfig = model.config  # type: ignore[assignment]
    lengths = [len(prompt) for prompt in prompts]
    cache = PagedCache(
        config,
        num_kv_heads=num_kv_heads or config.num_kv_heads,
        num_sequences=len(prompts),
        max_len=max(lengths),
        dtype=next(model.parameters()).dtype,
    )
    hidden: list[list[Tensor]] = [[] for _ in prompts]
    done = [0] * len(prompts)
    while done != lengths:
        query_lens = [min(chunk or length, length - start) for start, length in zip(done, lengths, strict=True)]
        positions, attention = cache.step(done, query_lens)
        pieces = [
            prompt[start : start + query].to(torch.int32) for prompt, start, query in zip(prompts, done, query_lens, strict=True)
        ]
        states = model(torch.cat(pieces), positions, attention, cache.caches)
        for row, part in enumerate(states.split(query_lens)):
            hidden[row].append(part)
        done = [start + query for start, query in zip(done, query_lens, strict=True)]
    return [torch.cat(parts) for parts in hidden]


@torch.inference_mode()
def our_logits(
    model: CausalLM, prompts: Sequence[Tensor], *, chunk: int | None = None, num_kv_heads: int | None = None
) -> list[Tensor]:
    """Logits [length, vocab_size] of each prompt."""
    return [model.compute_logits(hidden) for hidden in run_ours(model, prompts, chunk=chunk, num_kv_heads=num_kv_heads)]


def random_prompt(length: int, seed: int = 0) -> Tensor:
    """Random token ids [length]."""
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed + length))
