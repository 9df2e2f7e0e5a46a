"""What runs before readiness: every kind of step once, so that the first real one is not slow, and checks of what came out."""

import time

import numpy as np
import torch

from modelworker.worker.arrays import Int32Array
from modelworker.worker.batch import StepBatch
from modelworker.worker.check_batch import CheckRow, CheckSampling, make_check_batch
from modelworker.worker.description import SelfCheck
from modelworker.worker.engine import Engine
from modelworker.worker.errors import SetupError
from modelworker.worker.progress import Progress
from modelworker.worker.result import StepResult
from modelworker.worker.step_buffers import NULL_BLOCK

# The same tokens in one step and in chunks go through products of other shapes, which sum in another order. Logprobs of the most
# probable token were seen to differ by up to 2e-6 in fp32 and 0.07 in bf16; a wrong position or block moves them by whole units.
_LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}
_CHUNK_LEN = 7
_NUM_CHUNKS = 6
_NUM_DECODES = 3
# All tokens that start-up uses: enough to tell positions apart.
_NUM_TOKEN_IDS = 16
_WITH_LOGPROBS = CheckSampling()
# What the blocks at hand hold before one run and before the other: whoever reads what no token was written to sees a difference,
# for of two opposite keys one gets a high score.
_GARBAGE = (8.0, -8.0)


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


def warm_up_and_check(engine: Engine, progress: Progress) -> SelfCheck:
    """Runs prefills and decodes of the sizes at the limits, and compares a prompt in chunks and decodes with the same in one step.

    The KV cache is zero afterwards.

    Raises:
        SetupError: the two disagree, or the model computes NaN or infinity.
    """
    random = np.random.default_rng(0)
    findings = []
    batches = _warm_up_batches(engine, random)
    with progress.stage("warming up", total=len(batches), unit="steps") as advance:
        for batch in batches:
            begun = time.perf_counter()
            _succeeded(engine, engine.step(batch))
            findings.append(
                f"{batch.num_tokens} tokens of {batch.num_sequences} sequences ran in {1000 * (time.perf_counter() - begun):.1f} ms"
            )
            advance(1)
    engine.reset_kv_cache()
    with progress.stage("checking itself"):
        difference = _compare_chunks_and_decodes(engine, random)
    tolerance = _LOGPROB_TOLERANCE[engine.description.model.dtype]
    if difference > tolerance:
        raise SetupError(
            f"self-check: logprobs of a prompt in chunks and decodes differ by {difference:.4f} from those of the same prompt in "
            f"one step, more than {tolerance}: this build computes wrong results on this machine"
        )
    findings.append(f"a prompt in chunks and decodes and in one step agree within {difference:.1e} (bound {tolerance})")
    engine.reset_kv_cache()
    return SelfCheck(passed=True, findings=tuple(findings))


def _succeeded(engine: Engine, result: StepResult) -> StepResult:
    if result.sequence_errors:
        dtype = engine.description.model.dtype
        raise SetupError(f"self-check: {result.sequence_errors[0].message}: the weights are damaged, or overflow in {dtype}")
    return result


def _warm_up_batches(engine: Engine, random: np.random.Generator) -> list[StepBatch]:
    """The longest prompt, the largest decode, and a decode of one sequence with every filter of sampling."""
    limits, model, cache = engine.description.limits, engine.description.model, engine.description.kv_cache
    prompt_len = min(limits.max_tokens_per_step, model.max_model_len)
    num_rows = min(limits.max_sequences, limits.max_tokens_per_step, cache.num_blocks - 1)
    num_blocks = -(-prompt_len // cache.block_size)
    blocks = [np.array([block + 1], np.int32) for block in range(num_rows)]
    prompt = _tokens(engine, random, prompt_len)
    # Without context, a token is a prompt.
    context = min(1, cache.block_size - 1, model.max_model_len - 1)
    return [
        make_check_batch([_row(prompt, 0, np.arange(1, num_blocks + 1, dtype=np.int32))], _WITH_LOGPROBS),
        make_check_batch([_row(_tokens(engine, random, 1), context, block) for block in blocks], _WITH_LOGPROBS),
        make_check_batch([_row(_tokens(engine, random, 1), context, block) for block in blocks]),
        make_check_batch(
            [_row(_tokens(engine, random, 1), context, blocks[0])],
            CheckSampling(temperature=0.8, top_k=50, top_p=0.9, min_p=0.01),
        ),
    ]


def _compare_chunks_and_decodes(engine: Engine, random: np.random.Generator) -> float:
    """Returns by how much logprobs differ between whole prompts and the same tokens in chunks and decodes, over blocks in reverse.

    The last tokens are decoded in steps with a chunk of another sequence, as real steps mix them; the very last one alone.
    """
    model, cache = engine.description.model, engine.description.kv_cache
    longest = min(_CHUNK_LEN * _NUM_CHUNKS + _NUM_DECODES, model.max_model_len, engine.description.limits.max_tokens_per_step)
    lengths = [length for length in range(longest - _NUM_DECODES + 1, longest + 1) if length > 0]
    per_sequence = -(-longest // cache.block_size)
    tables = (np.arange(2 * per_sequence, dtype=np.int32) % (cache.num_blocks - 1) + 1).reshape(2, per_sequence)
    tokens = _tokens(engine, random, longest)
    _fill(engine, tables, _GARBAGE[0])
    whole = []
    for length in lengths:
        batch = make_check_batch([_row(tokens[:length], 0, tables[0])], _WITH_LOGPROBS)
        whole.append(_logprob(_succeeded(engine, engine.step(batch)), row=0))
    _fill(engine, tables, _GARBAGE[1])
    table, other = tables[0][::-1], tables[1]
    chunked, start = [], 0
    while start < longest:
        # The tokens before the first compared length in chunks, the rest one by one.
        length = max(min(_CHUNK_LEN, lengths[0] - 1 - start), 1)
        rows = [_row(tokens[start : start + length], start, table)]
        if length == 1 and start + 1 < longest and not set(table) & set(other):
            rows.append(_row(tokens[:_CHUNK_LEN], 0, other))
        result = _succeeded(engine, engine.step(make_check_batch(rows, _WITH_LOGPROBS)))
        start += length
        if start in lengths:
            chunked.append(_logprob(result, row=0))
    return max(abs(a - b) for a, b in zip(whole, chunked, strict=True))


def _fill(engine: Engine, tables: Int32Array, value: float) -> None:
    """Fills the null block and those of some tables."""
    blocks = torch.tensor([NULL_BLOCK, *np.unique(tables)])
    with torch.inference_mode():
        for layer in engine.kv_cache.layers:
            for cache in layer:
                cache[blocks] = value


def _tokens(engine: Engine, random: np.random.Generator, count: int) -> Int32Array:
    vocabulary = np.linspace(0, engine.description.model.vocab_size - 1, _NUM_TOKEN_IDS).astype(np.int32)
    return random.choice(vocabulary, count)


def _row(tokens: Int32Array, context_len: int, blocks: Int32Array) -> CheckRow:
    return CheckRow(token_ids=tokens, context_len=context_len, blocks=blocks)


def _logprob(result: StepResult, *, row: int) -> float:
    assert result.logprobs is not None, "every row of the check asks for logprobs"
    return float(result.logprobs.values[row])
