"""A tiny model in an engine, sequences in its cache, and what transformers computes for each of their positions."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor

from modelworker.graphs.dispatch import Choice, Reason
from modelworker.graphs.settings import RuntimeMode
from modelworker.graphs.shapes import GraphKey, fits, step_shape
from modelworker.worker.batch import StepBatch
from modelworker.worker.check_batch import CheckRow, CheckSampling, make_check_batch
from modelworker.worker.counters import Counters
from modelworker.worker.engine import Engine
from modelworker.worker.result import StepResult
from modelworker.worker.settings import ExecutionSettings, KvCacheSettings, ModelSettings, OpsSettings, StepSettings, WorkerSettings
from modelworker.worker.step_runner import PLAIN_WAY, StepRunner, Way
from modelworker_testing.engines import engine_of, tiny_settings
from modelworker_testing.paged_runs import VOCAB_SIZE
from modelworker_testing.tiny_models import save_reference

NUM_SEQUENCES = 17
LENGTH = 20
BLOCK_SIZE = 4
DECODE_QUERY_LENS = (1, 2, 4)
MAX_TOKENS = 128
GARBAGE = 10**9

COMPILED = Way(Choice(None, Reason.NONE))

_SMALLEST_GAP = 1e-3
_BLOCKS_EACH = LENGTH // BLOCK_SIZE


class Row(NamedTuple):
    """Tokens `context_len` .. `context_len + query_len` of a sequence."""

    sequence: int
    context_len: int
    query_len: int


class ModeWorld:
    """Runs steps over any tokens of the sequences, from a cache that holds their context and otherwise NaN.

    Attributes:
        engine: with the model.
        sequences: [NUM_SEQUENCES, LENGTH], token ids.
        hidden: [NUM_SEQUENCES, LENGTH, hidden_size], after the final norm, of transformers.
        logits: [NUM_SEQUENCES, LENGTH, vocab_size], of transformers.
        tables: [NUM_SEQUENCES, blocks], scattered.
    """

    def __init__(self, engine: Engine, reference: transformers.PreTrainedModel) -> None:
        self.engine = engine
        self.sequences, self.hidden, self.logits = _decisive_sequences(reference)
        order = torch.randperm(NUM_SEQUENCES * _BLOCKS_EACH, generator=torch.Generator().manual_seed(11)) + 1
        self.tables = order.view(NUM_SEQUENCES, _BLOCKS_EACH).numpy().astype(np.int32)
        self._caches = [cache for layer in engine.kv_cache.layers for cache in layer]
        self._widest_step()
        for sequence in range(NUM_SEQUENCES):
            engine.step_as(self.batch([Row(sequence, 0, LENGTH)]), PLAIN_WAY)
        self.filled = [cache.clone() for cache in self._caches]

    @property
    def greedy(self) -> Tensor:
        """[NUM_SEQUENCES, LENGTH]: the most probable token after each position."""
        return self.logits.argmax(-1)

    def batch(self, rows: Sequence[Row], *, spare_blocks: int = 0, sampling: CheckSampling | None = None) -> StepBatch:
        """Makes a step; block tables are as long as their rows need, and `spare_blocks` longer where there are more."""
        return make_check_batch(
            [
                CheckRow(
                    token_ids=self.sequences[row.sequence, row.context_len : row.context_len + row.query_len]
                    .numpy()
                    .astype(np.int32),
                    context_len=row.context_len,
                    blocks=self.tables[row.sequence, : -(-(row.context_len + row.query_len) // BLOCK_SIZE) + spare_blocks],
                )
                for row in rows
            ],
            sampling,
        )

    def ways(self, batch: StepBatch) -> dict[str, Way]:
        """The ways to run a step: plain, compiled, every FULL graph that fits, and the smallest and the largest PIECEWISE one."""
        # A graph for drafts computes a chunk of that length as well.
        draft_lens = np.where(batch.context_lens > 0, batch.query_lens - 1, 0)
        shape = step_shape(batch.query_lens, batch.context_lens, draft_lens, DECODE_QUERY_LENS)
        fitting = [key for key in self.engine.runner.captured if fits(key, shape)]
        pieces = sorted((key for key in fitting if key.mode is RuntimeMode.PIECEWISE), key=lambda key: key.num_tokens)
        keys = [*(key for key in fitting if key.mode is RuntimeMode.FULL), *pieces[:1], *pieces[1:][-1:]]
        found = {"eager": PLAIN_WAY}
        if self.engine.description.execution.optimization_level > 0:
            found["compiled"] = COMPILED
        return found | {str(key): Way(Choice(key, Reason.NONE)) for key in keys}

    def run(self, rows: Sequence[Row], way: Way, *, spare_blocks: int = 0) -> StepResult:
        """Runs a step that wants logprobs, and checks what it wrote.

        What it wrote must be near what is right in the slots of its tokens, and nothing anywhere else. Before the step, static
        buffers and the outputs of its graph hold garbage.
        """
        batch = self.batch(rows, spare_blocks=spare_blocks, sampling=CheckSampling())
        before = self._prepare(rows, way)
        result = self.engine.step_as(batch, way)
        self._check_writes(rows, before)
        return result

    def run_decoder(self, rows: Sequence[Row], way: Way) -> Tensor:
        """Does the same with the decoder alone, and returns its hidden states, those of padded tokens included."""
        runner, key = self.engine.runner, way.choice.key
        batch = self.batch(rows)
        before = self._prepare(rows, way)
        with torch.inference_mode():
            inputs = runner.stage(batch, key)
            hidden = runner.decode(batch, inputs, way).hidden_states if key is None else runner.replay(key, inputs)[0]
            hidden = hidden.clone()
        self._check_writes(rows, before)
        return hidden

    def expected_hidden(self, rows: Sequence[Row]) -> Tensor:
        """[num_tokens, hidden_size] of transformers."""
        return torch.cat([self.hidden[row.sequence, row.context_len : row.context_len + row.query_len] for row in rows])

    def expected_logprobs(self, rows: Sequence[Row]) -> Tensor:
        """[num_rows] of transformers: of the most probable token after the last one of each row."""
        return self.logits.log_softmax(-1).amax(-1)[
            [row.sequence for row in rows], [row.context_len + row.query_len - 1 for row in rows]
        ]

    def expected_tokens(self, rows: Sequence[Row]) -> list[int]:
        """Of transformers, after the last token of each row."""
        return [int(self.greedy[row.sequence, row.context_len + row.query_len - 1]) for row in rows]

    def _widest_step(self) -> None:
        """Makes the buffers regard all columns of their tables as used: poisoned ones must be cleared."""
        runner = self.engine.runner
        width = runner.stage(self.batch([Row(0, 0, 1)]), None).block_tables.shape[1]
        row = CheckRow(token_ids=np.zeros(1, np.int32), context_len=0, blocks=np.arange(1, width + 1, dtype=np.int32))
        runner.stage(make_check_batch([row]), None)

    def _slots(self, rows: Sequence[Row], *, written: bool) -> tuple[Tensor, Tensor]:
        """Blocks and offsets of the rows' new tokens, or of their contexts."""
        blocks, offsets = [], []
        for sequence, context_len, query_len in rows:
            positions = range(context_len, context_len + query_len) if written else range(context_len)
            blocks += [int(self.tables[sequence, position // BLOCK_SIZE]) for position in positions]
            offsets += [position % BLOCK_SIZE for position in positions]
        return torch.tensor(blocks, dtype=torch.long), torch.tensor(offsets, dtype=torch.long)

    def _prepare(self, rows: Sequence[Row], way: Way) -> list[Tensor]:
        """Leaves only the rows' contexts in the cache, poisons what a graph uses, and returns a copy of the cache."""
        with torch.inference_mode():
            poison(self.engine.runner, way.choice.key)
        blocks, offsets = self._slots(rows, written=False)
        for cache, filled in zip(self._caches, self.filled, strict=True):
            cache.fill_(torch.nan)
            cache[blocks, :, offsets] = filled[blocks, :, offsets]
        return [cache.clone() for cache in self._caches]

    def _check_writes(self, rows: Sequence[Row], before: Sequence[Tensor]) -> None:
        blocks, offsets = self._slots(rows, written=True)
        tolerance = 1e-4 if before[0].dtype == torch.float32 else 0.25
        for cache, old, filled in zip(self._caches, before, self.filled, strict=True):
            right = filled[blocks, :, offsets]
            torch.testing.assert_close(cache[blocks, :, offsets], right, atol=tolerance, rtol=tolerance)
            untouched = cache.clone()
            untouched[blocks, :, offsets] = old[blocks, :, offsets]
            bits = torch.int32 if cache.dtype == torch.float32 else torch.int16
            assert torch.equal(untouched.view(bits), old.view(bits)), "keys or values were written outside of the step's slots"


def poison(runner: StepRunner, key: GraphKey | None) -> None:
    """Fills all static buffers with garbage, and the outputs of a graph with NaN."""
    if key is not None:
        inputs = runner.stage_blank(key)
        for output in runner.replay(key, inputs):
            output.fill_(torch.nan)
        torch.empty(0, dtype=torch.int32).set_(inputs.token_ids.untyped_storage()).fill_(GARBAGE)  # type: ignore[call-overload]


def _decisive_sequences(reference: transformers.PreTrainedModel) -> tuple[Tensor, Tensor, Tensor]:
    """Returns random sequences and what transformers computes for them.

    No two logits of it are so near to each other that another order of summation may choose the other token.
    """
    for seed in range(100):
        sequences = torch.randint(VOCAB_SIZE, (NUM_SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode():
            hidden = reference.model(sequences, use_cache=False).last_hidden_state
            logits: Tensor = reference.lm_head(hidden)
        best = logits.topk(2).values
        if float((best[..., 0] - best[..., 1]).min()) > _SMALLEST_GAP:
            return sequences, hidden, logits
    raise AssertionError("every set of sequences has a near tie")


def mode_settings(
    *,
    dtype: str = "float32",
    custom_ops: tuple[str, ...] = (),
    decode_query_lens: tuple[int, ...] = DECODE_QUERY_LENS,
    **execution: Any,
) -> Callable[[Path], WorkerSettings]:
    """Settings with room for the sequences."""

    def settings(model: Path) -> WorkerSettings:
        return replace(
            tiny_settings(model),
            model=ModelSettings(model=str(model), dtype=dtype),
            kv_cache=KvCacheSettings(block_size=BLOCK_SIZE, num_blocks=NUM_SEQUENCES * _BLOCKS_EACH + 2),
            step=StepSettings(max_sequences=NUM_SEQUENCES, max_tokens_per_step=MAX_TOKENS),
            ops=OpsSettings(custom_ops=custom_ops),
            execution=ExecutionSettings(decode_query_lens=decode_query_lens, **execution),
        )

    return settings


@contextlib.contextmanager
def mode_world(
    directory: Path,
    settings: Callable[[Path], WorkerSettings],
    architecture: str = "LlamaForCausalLM",
    *,
    counters: Counters | None = None,
    **config: Any,
) -> Iterator[ModeWorld]:
    """Makes a random model, and an engine that serves it."""
    reference = save_reference(directory, architecture, **config)
    with engine_of(directory, settings, counters) as engine:
        yield ModeWorld(engine, reference)
