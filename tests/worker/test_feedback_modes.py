"""Tokens that are fed back, in every way to run a step: they are the tokens, and one that is missing spoils nothing else."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from modelworker.worker.arrays import BoolArray, Int32Array
from modelworker.worker.batch import FEEDBACK_TOKEN, StepBatch
from modelworker.worker.errors import PreconditionError
from modelworker.worker.result import SequenceErrorCode, StepResult
from modelworker.worker.step_runner import PLAIN_WAY, Way
from modelworker_testing.mode_world import BLOCK_SIZE, ModeWorld, Row, mode_settings, mode_world

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

CONTEXTS = (4, 7, 8, 13)
FAILED = 1
ROWS = [Row(sequence, context_len, 1) for sequence, context_len in enumerate(CONTEXTS)]
# A prompt beside them keeps the step out of FULL graphs.
MIXED_ROWS = [*ROWS, Row(9, 0, 3)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModeWorld]:
    with mode_world(tmp_path_factory.mktemp("llama"), mode_settings()) as made:
        yield made


def caches_of(world: ModeWorld) -> list[Tensor]:
    return [cache for layer in world.engine.kv_cache.layers for cache in layer]


def sequenced(batch: StepBatch, rows: Sequence[Row], token_ids: Int32Array) -> StepBatch:
    return dataclasses.replace(
        batch, step_id=1, sequence_ids=np.array([100 + row.sequence for row in rows], np.uint64), token_ids=token_ids
    )


def run_step_before(world: ModeWorld, rows: Sequence[Row], *, fails: bool) -> Int32Array:
    """Samples the token that each row feeds back; in a full cache, of which row FAILED may hold NaN. Returns the tokens."""
    world.engine.feedback.clear()
    caches = caches_of(world)
    for cache, filled in zip(caches, world.filled, strict=True):
        cache.copy_(filled)
        if fails:
            cache[int(world.tables[rows[FAILED].sequence, 0]), :, 0] = torch.nan
    before = [Row(row.sequence, row.context_len - 1, 1) for row in rows if row.context_len]
    batch = world.batch(before)
    result = world.engine.step_as(sequenced(batch, before, batch.token_ids), PLAIN_WAY)
    assert len(result.sequence_errors) == int(fails)
    expected = [world.greedy[row.sequence, row.context_len].item() for row in before]
    assert result.sampled_ids.tolist() == [token for index, token in enumerate(expected) if not (fails and index == FAILED)]
    for cache, filled in zip(caches, world.filled, strict=True):
        cache.copy_(filled)
    return np.array(expected, np.int32)


def with_tokens(batch: StepBatch, tokens: Int32Array) -> Int32Array:
    """The tokens of a step, of which those of the rows that decode are others."""
    replaced = batch.token_ids.copy()
    replaced[: len(tokens)] = tokens
    return replaced


def written_by(world: ModeWorld, rows: Sequence[Row]) -> BoolArray:
    """[num_blocks, block_size]: the slots of the rows' new tokens."""
    slots = np.zeros((len(world.filled[0]), BLOCK_SIZE), np.bool_)
    for sequence, context_len, query_len in rows:
        for position in range(context_len, context_len + query_len):
            slots[world.tables[sequence, position // BLOCK_SIZE], position % BLOCK_SIZE] = True
    return slots


def each_way(world: ModeWorld, rows: Sequence[Row]) -> list[Way]:
    ways = world.ways(world.batch(rows))
    assert any("FULL" in name for name in ways) == (rows is ROWS)
    assert any("PIECEWISE" in name for name in ways)
    return list(ways.values())


@pytest.mark.parametrize("rows", [ROWS, MIXED_ROWS], ids=["decode", "mixed"])
def test_fed_back_tokens_give_what_the_tokens_themselves_give(world: ModeWorld, rows: list[Row]) -> None:
    batch = world.batch(rows)
    for way in each_way(world, rows):
        outcomes: list[tuple[StepResult, list[Tensor]]] = []
        for is_fed_back in (False, True):
            tokens = run_step_before(world, rows, fails=False)
            given = np.full(len(tokens), FEEDBACK_TOKEN, np.int32) if is_fed_back else tokens
            result = world.engine.step_as(sequenced(batch, rows, with_tokens(batch, given)), way)
            outcomes.append((result, [cache.clone() for cache in caches_of(world)]))
        (explicit, explicit_caches), (fed_back, fed_back_caches) = outcomes
        assert len(explicit.sampled_ids) == len(rows)
        assert fed_back.sampled_ids.tolist() == explicit.sampled_ids.tolist()
        assert fed_back.graph == explicit.graph
        assert all(map(torch.equal, fed_back_caches, explicit_caches))


@pytest.mark.parametrize("rows", [ROWS, MIXED_ROWS], ids=["decode", "mixed"])
def test_a_row_whose_token_was_never_sampled_fails_alone_and_writes_nan_only(world: ModeWorld, rows: list[Row]) -> None:
    batch = world.batch(rows)
    others = torch.from_numpy(written_by(world, [row for index, row in enumerate(rows) if index != FAILED]))
    spoiled = torch.from_numpy(written_by(world, [rows[FAILED]]))
    for way in each_way(world, rows):
        tokens = run_step_before(world, rows, fails=False)
        expected = world.engine.step_as(sequenced(batch, rows, with_tokens(batch, tokens)), way)
        good_caches = [cache.clone() for cache in caches_of(world)]
        num_fed_back = len(run_step_before(world, rows, fails=True))
        given = np.full(num_fed_back, FEEDBACK_TOKEN, np.int32)
        result = world.engine.step_as(sequenced(batch, rows, with_tokens(batch, given)), way)

        assert [(failure.index, failure.code) for failure in result.sequence_errors] == [
            (FAILED, SequenceErrorCode.FEEDBACK_SOURCE_FAILED)
        ]
        assert result.sampled_counts.tolist() == [int(index != FAILED) for index in range(len(rows))]
        assert result.sampled_ids.tolist() == np.delete(expected.sampled_ids, FAILED).tolist()
        row = rows[FAILED]
        assert result.tainted_block_ids.tolist() == [world.tables[row.sequence, row.context_len // BLOCK_SIZE]]
        for cache, good, filled in zip(caches_of(world), good_caches, world.filled, strict=True):
            by_slot, good_by_slot, filled_by_slot = (tensor.transpose(1, 2) for tensor in (cache, good, filled))
            assert by_slot[spoiled].isnan().all()
            assert torch.equal(by_slot[others], good_by_slot[others])
            assert torch.equal(by_slot[~spoiled & ~others], filled_by_slot[~spoiled & ~others])


def test_a_row_that_reads_what_a_row_without_a_token_should_have_written_fails_too(world: ModeWorld) -> None:
    """It shares the block of the failed row, so that only NaN in the slot tells it that there is no token."""
    run_step_before(world, ROWS, fails=True)
    row = ROWS[FAILED]
    batch = world.batch([row, Row(row.sequence, row.context_len + 1, 1)])
    table = world.tables[row.sequence]
    batch = dataclasses.replace(
        sequenced(batch, [row, Row(9, 0, 1)], np.array([FEEDBACK_TOKEN, 5], np.int32)),
        # The second row's own token goes to another block.
        block_counts=np.array([2, 3], np.int32),
        block_ids=np.array([*table[:2], *table[:3]], np.int32),
    )
    assert row.context_len + 1 == 2 * BLOCK_SIZE
    result = world.engine.step_as(batch, PLAIN_WAY)
    assert [failure.code for failure in result.sequence_errors] == [
        SequenceErrorCode.FEEDBACK_SOURCE_FAILED,
        SequenceErrorCode.NON_FINITE_LOGITS,
    ]


def test_a_refused_step_changes_neither_cache_nor_table(world: ModeWorld) -> None:
    tokens = run_step_before(world, ROWS, fails=False)
    batch = world.batch(ROWS)
    given = np.full(len(tokens), FEEDBACK_TOKEN, np.int32)
    wrong = dataclasses.replace(
        sequenced(batch, ROWS, given),
        context_lens=batch.context_lens + np.array([0, 0, 1, 0], np.int32),
        finished_sequence_ids=np.array([100], np.uint64),
        zero_block_ids=np.array([1], np.int32),
        copy_source_ids=np.array([2], np.int32),
        copy_destination_ids=np.array([3], np.int32),
    )
    with pytest.raises(PreconditionError, match=r"row 0 \(2 rows in all\): .* no token is kept for it"):
        world.engine.step_as(wrong, PLAIN_WAY)
    assert all(map(torch.equal, caches_of(world), world.filled))
    assert len(world.engine.step_as(sequenced(batch, ROWS, given), PLAIN_WAY).sampled_ids) == len(ROWS)


def test_a_reset_forgets_the_sampled_tokens_and_a_release_those_of_its_sequences(world: ModeWorld) -> None:
    run_step_before(world, ROWS, fails=False)
    assert world.engine.release_sequences(np.array([100, 101, 4711], np.uint64)) == 2
    assert len(world.engine.feedback) == len(ROWS) - 2
    world.engine.reset_kv_cache()
    assert len(world.engine.feedback) == 0
    for cache, filled in zip(caches_of(world), world.filled, strict=True):
        cache.copy_(filled)


def test_blocks_are_zeroed_and_copied_before_the_step_reads_and_writes_them(world: ModeWorld) -> None:
    """A row goes on in a copy of another's blocks: it gives the same token, and the other's blocks stay as they are."""
    row = ROWS[1]
    free = sorted(set(range(1, len(world.filled[0]))) - set(world.tables.ravel().tolist()))
    spare = [*free, *world.tables[16, :2].tolist()][:2]
    original = world.tables[row.sequence, :2].tolist()
    batch = world.batch([row])
    for way in world.ways(batch).values():
        run_step_before(world, ROWS, fails=False)
        expected = world.engine.step_as(batch, way)
        run_step_before(world, ROWS, fails=False)
        copied = dataclasses.replace(
            batch,
            block_ids=np.array(spare, np.int32),
            zero_block_ids=np.array(spare, np.int32),
            copy_source_ids=np.array(original, np.int32),
            copy_destination_ids=np.array(spare, np.int32),
        )
        result = world.engine.step_as(copied, way)
        assert result.sampled_ids.tolist() == expected.sampled_ids.tolist()
        for cache, filled in zip(caches_of(world), world.filled, strict=True):
            untouched = [block for block in range(len(filled)) if block not in spare]
            assert torch.equal(cache[untouched], filled[untouched])
            assert torch.equal(cache[spare[0]], filled[original[0]])
            assert torch.equal(cache[spare[1], :, :3], filled[original[1], :, :3])
