"""What runs before readiness: every kind of step once, so that the first real one is not slow, and checks of what came out."""

import time
from dataclasses import dataclass

import numpy as np
import torch

from modelworker.worker.batch import BoolArray, Int32Array, SamplingBatch, StepBatch, StepResult
from modelworker.worker.description import Degradation, SelfCheck
from modelworker.worker.engine import Engine
from modelworker.worker.errors import SetupError
from modelworker.worker.progress import Progress

# The same prompt in one step and in chunks goes through products of other shapes, which sum in another order. Logprobs of the most
# probable token were seen to differ by up to 2e-6 in fp32 and 0.07 in bf16; a wrong position or block moves them by whole units.
_LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
_PROMPT_LEN = 45
_CHUNK_LEN = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """What the checks found."""

    self_check: SelfCheck
    degradations: tuple[Degradation, ...]


def check_products(dtype: torch.dtype, device: torch.device) -> str:
    """Checks that products accumulate in fp32: a sum of 1024 ones, added up in bf16, ends at 256.

    Raises:
        SetupError: they don't.
    """
    ones = torch.ones(1024, dtype=dtype, device=device)
    result = (ones.view(1, -1) @ ones.view(-1, 1)).item()
    if result != 1024:
        raise SetupError(f"self-check: ones(1, 1024) @ ones(1024, 1) in {dtype} is {result:g}, expected 1024; use --dtype float32")
    return f"products accumulate in fp32 ({dtype})"


def warm_up_and_check(engine: Engine, progress: Progress) -> CheckReport:
    """Runs prefills and decodes of the sizes at the limits, and compares a chunked prompt with the same prompt in one step.

    The KV cache is zero afterwards.

    Raises:
        SetupError: the two disagree.
    """
    random = np.random.default_rng(0)
    findings, degradations = [], []
    with progress.stage("warming up", total=3, unit="steps") as advance:
        for batch in _warm_up_batches(engine, random):
            begun = time.perf_counter()
            engine.step(batch)
            findings.append(
                f"{batch.num_tokens} tokens of {batch.num_sequences} sequences ran in {1000 * (time.perf_counter() - begun):.1f} ms"
            )
            advance(1)
    with progress.stage("checking itself"):
        whole, chunked = _compare_chunked(engine, random)
    if whole is None or chunked is None:
        degradations.append(
            Degradation(
                reason="non_finite_logits",
                message="the model gives NaN or infinity for a prompt of random tokens: check the weights",
            )
        )
    else:
        tolerance = _LOGPROB_TOLERANCE[engine.description.model.dtype]
        difference = abs(whole - chunked)
        if difference > tolerance:
            raise SetupError(
                f"self-check: a prompt in chunks and in one step give logprobs {chunked:.4f} and {whole:.4f}, "
                f"which differ by more than {tolerance}"
            )
        findings.append(f"a prompt in chunks and in one step agree within {difference:.1e} (bound {tolerance})")
    engine.reset_kv_cache()
    return CheckReport(self_check=SelfCheck(passed=not degradations, findings=tuple(findings)), degradations=tuple(degradations))


def _warm_up_batches(engine: Engine, random: np.random.Generator) -> list[StepBatch]:
    limits, model, cache = engine.description.limits, engine.description.model, engine.description.kv_cache
    prompt_len = min(limits.max_tokens_per_step, model.max_model_len)
    num_rows = min(limits.max_sequences, limits.max_tokens_per_step, cache.num_blocks - 1)
    num_blocks = -(-prompt_len // cache.block_size)
    rows = np.arange(1, num_rows + 1, dtype=np.int32)
    return [
        _batch(engine, random, query_lens=[prompt_len], context_lens=[0], tables=[np.arange(1, num_blocks + 1, dtype=np.int32)]),
        _batch(
            engine,
            random,
            query_lens=[1] * num_rows,
            context_lens=[0] * num_rows,
            tables=[rows[i : i + 1] for i in range(num_rows)],
        ),
        _batch(engine, random, query_lens=[1], context_lens=[0], tables=[rows[:1]]),
    ]


def _compare_chunked(engine: Engine, random: np.random.Generator) -> tuple[float | None, float | None]:
    """Returns the logprob of the most probable token after a prompt, run whole and in chunks over reversed blocks."""
    cache = engine.description.kv_cache
    prompt_len = min(_PROMPT_LEN, engine.description.model.max_model_len, engine.description.limits.max_tokens_per_step)
    table = np.arange(1, -(-prompt_len // cache.block_size) + 1, dtype=np.int32)
    tokens = random.integers(0, engine.description.model.vocab_size, prompt_len, dtype=np.int32)
    whole = engine.step(_batch(engine, random, query_lens=[prompt_len], context_lens=[0], tables=[table], tokens=tokens))
    engine.reset_kv_cache()
    for start in range(0, prompt_len, _CHUNK_LEN):
        chunk = tokens[start : start + _CHUNK_LEN]
        chunked = engine.step(
            _batch(engine, random, query_lens=[len(chunk)], context_lens=[start], tables=[table[::-1]], tokens=chunk)
        )
    return _logprob(whole), _logprob(chunked)


def _logprob(result: StepResult) -> float | None:
    return float(result.logprobs.values[0]) if result.logprobs is not None and result.logprobs.values.size else None


def _batch(
    engine: Engine,
    random: np.random.Generator,
    *,
    query_lens: list[int],
    context_lens: list[int],
    tables: list[Int32Array],
    tokens: Int32Array | None = None,
) -> StepBatch:
    num_rows = len(query_lens)

    def filled(value: float, dtype: type[np.generic]) -> np.ndarray:
        return np.full(num_rows, value, dtype)

    if tokens is None:
        tokens = random.integers(0, engine.description.model.vocab_size, sum(query_lens), dtype=np.int32)
    sample: BoolArray = np.ones(num_rows, np.bool_)
    return StepBatch(
        step_id=0,
        worker_epoch=0,
        router_id=0,
        client_tag=0,
        arrival_ns=time.monotonic_ns(),
        deadline_ns=None,
        digest=b"",
        traceparent="",
        query_lens=np.array(query_lens, np.int32),
        context_lens=np.array(context_lens, np.int32),
        token_ids=tokens,
        block_counts=np.array([len(table) for table in tables], np.int32),
        block_ids=np.concatenate(tables),
        sample=sample,
        sampling=SamplingBatch(
            temperature=filled(0, np.float32),
            top_k=filled(0, np.int32),
            top_p=filled(1, np.float32),
            min_p=filled(0, np.float32),
            seed=filled(0, np.uint64),
            has_seed=filled(0, np.bool_),
            num_logprobs=filled(0, np.int32),
            processed_logprobs=filled(0, np.bool_),
        ),
    )
