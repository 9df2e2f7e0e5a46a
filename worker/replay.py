"""Executes recorded steps again, and compares what they came to."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from modelworker.worker.arrays import IndexArray
from modelworker.worker.batch import SamplingBatch, StepBatch
from modelworker.worker.engine import Engine
from modelworker.worker.errors import SetupError, WorkerError
from modelworker.worker.recording import ExecutedStep, RecordingFile, ReleasedSequences, read_steps
from modelworker.worker.replay_logprobs import LogprobsComparison
from modelworker.worker.result import StepResult
from modelworker.worker.step_runner import PLAIN_WAY
from modelworker.worker.wire import encode_result, parse_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A token, a row or the tainted blocks of a step that came out otherwise.

    Attributes:
        file: name of the recording.
        step: of the recording, from 1.
        step_id: of the step; 0: unsequenced.
        row: of the step; None: its tainted blocks differ.
        position: of the token in its sequence; None: the rows differ in something else.
        recorded: what was recorded: a token id, or in words.
        replayed: likewise, what came now.
        margin: of a plainly greedy row (no bias, penalty or mask), by how much the logit of the replayed token is above that of the
            recorded one, computed by plain modules; None: not known, or not what decided. A small one is a near tie, which another
            order of summation decides otherwise.
    """

    file: str
    step: int
    step_id: int
    row: int | None
    position: int | None
    recorded: int | str
    replayed: int | str
    margin: float | None = None

    def __str__(self) -> str:
        step = f"step {self.step}" + (f" (step_id {self.step_id})" if self.step_id else " (unsequenced)")
        row = "" if self.row is None else f", row {self.row}"
        where = row if self.position is None else f"{row}, position {self.position}"
        kind = "token " if self.position is not None else ""
        margin = "" if self.margin is None else f"; its logit is {self.margin:.4g} higher (plain modules)"
        return f"{self.file}: {step}{where}: recorded {kind}{self.recorded}, replayed {kind}{self.replayed}{margin}"


@dataclass(kw_only=True, slots=True)
class ReplayReport:
    """What executing recordings again came to.

    Attributes:
        num_files: recordings.
        num_steps: executed again.
        num_tokens: compared.
        num_differing_steps: steps in which anything differs.
        first: the first difference.
        logprobs: of sampled tokens.
        prompt_logprobs: of tokens that the router sent.
        notes: what a reader of the result should know.
    """

    num_files: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    num_differing_steps: int = 0
    first: Difference | None = None
    logprobs: LogprobsComparison = field(default_factory=LogprobsComparison)
    prompt_logprobs: LogprobsComparison = field(default_factory=LogprobsComparison)
    notes: list[str] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        """Whether all tokens, errors of rows and tainted blocks came out as recorded. Logprobs don't count: they are reported."""
        return self.first is None


class _Place(NamedTuple):
    """The first place in a step where two answers differ.

    `token` counts the tokens of the row; None: something else of it differs. `row` is None where the tainted blocks do.
    """

    row: int | None
    token: int | None
    recorded: int | str
    replayed: int | str


def replay_files(
    engine: Engine, files: Sequence[RecordingFile], *, advance: Callable[[int], None] = lambda _: None
) -> ReplayReport:
    """Executes recordings one after the other, each as an epoch of its own.

    Args:
        engine: of the same weights.
        files: recordings.
        advance: called with 1 after each record.

    Raises:
        SetupError: a recording is damaged, or a step is not one that this engine accepts.
    """
    report = ReplayReport()
    for file in files:
        engine.reset_kv_cache()
        report.num_files += 1
        _replay_file(engine, file, report, advance)
    return report


def _replay_file(engine: Engine, file: RecordingFile, report: ReplayReport, advance: Callable[[int], None]) -> None:
    step_number = 0
    for step in read_steps(file):
        if isinstance(step, str):
            report.notes.append(f"{file.path.name}: the recording ended after step {step_number}, before its epoch: {step}")
        elif isinstance(step, ReleasedSequences):
            engine.set_time(step.time_ns)
            engine.release_sequences(step.sequence_ids)
        else:
            step_number += 1
            _replay_step(engine, step, file.path.name, step_number, report)
        advance(1)
    if file.is_cut_off:
        report.notes.append(f"{file.path.name}: the last record is cut off: the worker was killed while it was written")


def _replay_step(engine: Engine, step: ExecutedStep, file: str, number: int, report: ReplayReport) -> None:
    where = f"{file}: step {number}"
    batch, result = _execute(engine, step, where)
    report.num_steps += 1
    if step.answer is None:
        report.notes.append(f"{where} failed after launch when it was recorded" + ("" if result is None else ", and did not now"))
    elif result is None:
        raise SetupError(f"{where} fails now, and did not when it was recorded")
    else:
        _compare(engine, batch, step, encode_result(batch, result, batch.worker_epoch), file, number, report)


def _execute(engine: Engine, step: ExecutedStep, where: str) -> tuple[StepBatch, StepResult | None]:
    """Executes a step as it was executed; where it failed then and fails now, there is no result."""
    try:
        batch = parse_step(step.request, engine.description, arrival_ns=time.monotonic_ns(), deadline_ns=None)
    except WorkerError as error:
        raise SetupError(f"{where} is refused by this engine: {error}") from error
    engine.seed_open_rows(step.seed)
    engine.set_time(step.time_ns)
    try:
        return batch, engine.step(batch)
    except Exception as error:  # what a recorded fault was, or a step that fails only now
        if step.answer is None:
            return batch, None
        raise SetupError(f"{where} fails now, and did not when it was recorded: {type(error).__name__}: {error}") from error


def _compare(
    engine: Engine, batch: StepBatch, step: ExecutedStep, replayed: Any, file: str, number: int, report: ReplayReport
) -> None:
    recorded: Any = step.answer
    report.num_tokens += len(recorded.sampled_ids)
    report.logprobs.add_sampled(recorded, replayed)
    report.prompt_logprobs.add_prompt(recorded, replayed)
    place = _first_place(recorded, replayed)
    if place is None:
        return
    report.num_differing_steps += 1
    if report.first is not None:
        return
    position = hidden_row = margin = None
    if place.row is not None and place.token is not None:
        draft_lens = step.request.draft_lens
        draft_len = draft_lens[place.row] if draft_lens else 0
        position = int(batch.seq_lens[place.row]) - draft_len + place.token
        hidden_row = int(batch.query_starts[place.row + 1]) - 1 - draft_len + place.token
        if _is_plainly_greedy(batch.sampling, place.row):
            margin = _margin(engine, batch, step, hidden_row, place)
    report.first = Difference(
        file=file,
        step=number,
        step_id=step.request.step_id,
        row=place.row,
        position=position,
        recorded=place.recorded,
        replayed=place.replayed,
        margin=margin,
    )


def _first_place(recorded: Any, replayed: Any) -> _Place | None:
    """Returns the first difference of two answers, by rows: tokens, then errors; after all rows, tainted blocks."""
    pairs = zip(_rows_of(recorded), _rows_of(replayed), strict=True)
    for row, (old, new) in enumerate(pairs):
        if old.tokens != new.tokens:
            token = next((i for i, (a, b) in enumerate(zip(old.tokens, new.tokens, strict=False)) if a != b), None)
            if token is None:  # One has more of them.
                token = min(len(old.tokens), len(new.tokens))
            return _Place(row, token, _token_at(old.tokens, token), _token_at(new.tokens, token))
        if old.error != new.error:
            return _Place(row, None, old.error or "no error", new.error or "no error")
    old_blocks, new_blocks = _tainted_blocks(recorded), _tainted_blocks(replayed)
    return None if old_blocks == new_blocks else _Place(None, None, old_blocks, new_blocks)


def _tainted_blocks(answer: Any) -> str:
    return f"tainted blocks {list(answer.tainted_block_ids)}" if answer.tainted_block_ids else "no tainted blocks"


class _Row(NamedTuple):
    tokens: list[int]
    error: str


def _rows_of(answer: Any) -> Iterator[_Row]:
    errors = {error.index: f"error {error.code}" for error in answer.sequence_errors}
    start = 0
    for row, count in enumerate(answer.sampled_counts):
        yield _Row(list(answer.sampled_ids[start : start + count]), errors.get(row, ""))
        start += count


def _token_at(tokens: Sequence[int], index: int) -> int | str:
    return tokens[index] if index < len(tokens) else "none"


def _is_plainly_greedy(sampling: SamplingBatch | None, row: int) -> bool:
    """Whether the largest logit is the row's token: nothing is drawn, and no logit changed."""
    if sampling is None:
        return True
    lists = (sampling.allowed, sampling.banned, None if sampling.bias is None else sampling.bias.tokens)
    has_list = any(each is not None and each.counts[row] > 0 for each in lists)
    is_masked = sampling.grammar is not None and row in sampling.grammar.rows
    return bool(sampling.temperature[row] == 0 and not sampling.has_penalties[row] and not has_list and not is_masked)


def _margin(engine: Engine, batch: StepBatch, step: ExecutedStep, hidden_row: int, place: _Place) -> float | None:
    """Returns by how much the logit of the replayed token is above that of the recorded one, by plain modules.

    The step is executed once more for it, and the KV cache left as it was. Not known where that can't be: tokens from feedback, or
    blocks that the step itself changes before it reads them.
    """
    request = step.request
    is_plain_step = not request.HasField("block_copies") and not request.zero_block_ids and min(request.token_ids) >= 0
    if not is_plain_step or not isinstance(place.recorded, int) or not isinstance(place.replayed, int):
        return None
    blocks = np.unique(batch.slots(engine.description.kv_cache.block_size) // engine.description.kv_cache.block_size)
    with torch.inference_mode():
        kept = _copy_blocks(engine, blocks)
        hidden, _ = engine.runner.decode(batch, engine.runner.stage(batch, None), PLAIN_WAY)
        logits = engine.model.compute_logits(hidden[hidden_row : hidden_row + 1])[0]
        for cache, blocks_before in kept:
            cache[torch.from_numpy(blocks).to(cache.device)] = blocks_before
        return float(logits[place.replayed] - logits[place.recorded])


def _copy_blocks(engine: Engine, blocks: IndexArray) -> list[tuple[torch.Tensor, torch.Tensor]]:
    caches = [cache for layer in engine.kv_cache.layers for cache in layer]
    return [(cache, cache[torch.from_numpy(blocks).to(cache.device)].clone()) for cache in caches]
