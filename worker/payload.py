"""Request bodies for load tests: unsequenced steps of one shape, whose block tables fit a worker.

The context of a body's sequences is whatever the worker's KV cache holds there: such a step takes the time of a real one, but its
tokens mean nothing.
"""

from dataclasses import dataclass

import numpy as np

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.client import StepSampling, WorkerInfo, build_step
from modelworker.worker.errors import SettingsError


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerShape:
    """What bodies have to fit; a None is not known and not checked.

    Attributes:
        vocab_size: token ids are 0 .. vocab_size - 1.
        block_size: tokens per KV cache block.
        num_blocks: KV cache blocks, the null block 0 included.
        max_model_len: largest context + query length.
        max_sequences: largest number of sequences in a step.
        max_tokens_per_step: largest number of new tokens in a step.
        max_message_bytes: largest message.
        capabilities: optional fields that the worker implements.
    """

    vocab_size: int
    block_size: int
    num_blocks: int
    max_model_len: int | None = None
    max_sequences: int | None = None
    max_tokens_per_step: int | None = None
    max_message_bytes: int | None = None
    capabilities: frozenset[str] | None = None

    @classmethod
    def of(cls, info: WorkerInfo) -> "WorkerShape":
        """Reads the shape of a running worker."""
        return cls(
            vocab_size=info.model.vocab_size,
            block_size=info.kv_cache.block_size,
            num_blocks=info.kv_cache.num_blocks,
            max_model_len=info.model.max_model_len,
            max_sequences=info.limits.max_sequences,
            max_tokens_per_step=info.limits.max_tokens_per_step,
            max_message_bytes=info.limits.max_message_bytes,
            capabilities=frozenset(info.capabilities),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingShape:
    """How every row samples. None leaves a parameter out of the body, which makes it neutral; all None: no sampling parameters.

    Attributes:
        temperature: 0 = greedy.
        top_k: 0 = off.
        top_p: 1 = off.
        min_p: 0 = off.
        seed: of the first row; the others have the numbers after it.
        num_logprobs: 0 = of the chosen token.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    num_logprobs: int | None = None

    @property
    def fields(self) -> set[str]:
        """The fields of `SamplingParams` that the body sets."""
        names = {
            name for name in ("temperature", "top_k", "top_p", "min_p", "seed", "num_logprobs") if getattr(self, name) is not None
        }
        return names | {"has_seed"} if "seed" in names else names


@dataclass(frozen=True, kw_only=True, slots=True)
class PayloadShape:
    """The step that a body asks for: `num_sequences` rows, each with `query_len` new tokens after `context_len` cached ones."""

    num_sequences: int
    query_len: int = 1
    context_len: int = 0
    sample: bool = True
    sampling: SamplingShape = SamplingShape()

    @property
    def num_tokens(self) -> int:
        """New tokens of the step."""
        return self.num_sequences * self.query_len

    def blocks_per_sequence(self, block_size: int) -> int:
        """Length of each row's block table."""
        return -(-(self.context_len + self.query_len) // block_size)


def check_payload(shape: PayloadShape, worker: WorkerShape) -> None:
    """Checks that a worker would execute the step.

    Raises:
        SettingsError: it would not; names every limit that is exceeded and every field that it does not implement.
    """
    seq_len = shape.context_len + shape.query_len
    table = shape.blocks_per_sequence(worker.block_size)
    num_usable = worker.num_blocks - 1
    amounts = (
        (shape.num_sequences, worker.max_sequences, "sequences", "max_sequences"),
        (shape.num_tokens, worker.max_tokens_per_step, "new tokens (sequences x query length)", "max_tokens_per_step"),
        (seq_len, worker.max_model_len, "tokens in a sequence (context + query length)", "max_model_len"),
        (shape.num_sequences * table, num_usable, f"KV cache blocks (sequences x {table})", "num_blocks - 1"),
    )
    problems = [
        f"found {found:,} {what}, expected at most {limit:,} ({name})"
        for found, limit, what, name in amounts
        if limit is not None and found > limit
    ]
    if worker.capabilities is not None:
        missing = sorted(_capabilities(shape) - worker.capabilities)
        problems += [f"the worker does not implement {name}" for name in missing]
    if problems:
        raise SettingsError(f"the worker would refuse these steps: {'; '.join(problems)}")


def _capabilities(shape: PayloadShape) -> set[str]:
    """Names of the capabilities that the body needs."""
    needed = {f"sampling.{name}" for name in shape.sampling.fields} | {"client_tag"}
    return needed if shape.sample else needed | {"sample"}


def build_payload(shape: PayloadShape, worker: WorkerShape, number: int) -> pb.ExecuteStepRequest:
    """Builds a body. The same arguments give the same body, another `number` other tokens, blocks and `client_tag`.

    Args:
        shape: what `check_payload` accepts for this worker.
        worker: what the body has to fit.
        number: of the body, 1 or more; becomes its `client_tag`.

    Raises:
        SettingsError: the body is larger than a message may be.
    """
    generator = np.random.default_rng(number)
    rows = shape.num_sequences
    table = shape.blocks_per_sequence(worker.block_size)
    request = build_step(
        query_lens=np.full(rows, shape.query_len),
        context_lens=np.full(rows, shape.context_len),
        token_ids=generator.integers(worker.vocab_size, size=shape.num_tokens),
        block_counts=np.full(rows, table),
        # All different, in no order: as the tables of a cache look that has been in use for a while.
        block_ids=1 + generator.choice(worker.num_blocks - 1, size=rows * table, replace=False),
        sample=None if shape.sample else [False] * rows,
        sampling=_sampling(shape.sampling, rows),
        client_tag=number,
    )
    if worker.max_message_bytes is not None and request.ByteSize() > worker.max_message_bytes:
        raise SettingsError(
            f"the worker would refuse these steps: found a message of {request.ByteSize():,} bytes, "
            f"expected at most {worker.max_message_bytes:,} (max_message_bytes)"
        )
    return request


def _sampling(shape: SamplingShape, rows: int) -> StepSampling | None:
    if not shape.fields:
        return None
    seed = shape.seed
    return StepSampling(
        temperature=None if shape.temperature is None else [shape.temperature] * rows,
        top_k=None if shape.top_k is None else [shape.top_k] * rows,
        top_p=None if shape.top_p is None else [shape.top_p] * rows,
        min_p=None if shape.min_p is None else [shape.min_p] * rows,
        seed=None if seed is None else [(seed + row) % 2**64 for row in range(rows)],
        has_seed=None if seed is None else [True] * rows,
        num_logprobs=None if shape.num_logprobs is None else [shape.num_logprobs] * rows,
    )
