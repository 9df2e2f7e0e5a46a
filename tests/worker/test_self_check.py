"""The check before readiness has teeth: each planted fault stops the start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelworker.ops.attention import PagedAttention
from modelworker.worker.batch import StepBatch
from modelworker.worker.errors import SetupError
from modelworker.worker.step_buffers import NULL_BLOCK, StepBuffers
from modelworker_testing.checkpoints import TINY, llama_tensors, save_checkpoint, save_tiny
from modelworker_testing.engines import engine_of


def test_a_sound_engine_passes_and_says_what_was_compared(tmp_path: Path) -> None:
    with engine_of(save_tiny(tmp_path)) as engine:
        assert engine.description.self_check.passed
        assert any("agree within" in finding for finding in engine.description.self_check.findings)


def attention_without(is_broken: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    attend = PagedAttention.forward_cpu

    def broken(self: Any, query: Any, keys: Any, values: Any, output: torch.Tensor, starts: torch.Tensor, *rest: Any) -> None:
        attend(self, query, keys, values, output, starts, *rest)
        lengths = starts.diff()
        output[: starts[-1]][is_broken(lengths).repeat_interleave(lengths)] = 0

    return broken


def shifted(values: Callable[[StepBatch], Any], amount: int, *, only_decodes: bool) -> property:
    def of(batch: StepBatch) -> Any:
        moved = np.repeat((batch.query_lens == 1) | (not only_decodes), batch.query_lens) & np.repeat(
            batch.context_lens > 0, batch.query_lens
        )
        return (values(batch) + amount * moved).astype(np.int32)

    return property(of)


@pytest.mark.parametrize(
    "is_broken", [lambda query_len: query_len == 1, lambda query_len: query_len > 1], ids=["decode", "prefill"]
)
def test_attention_that_returns_zeros_for_one_kind_of_row_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_broken: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    monkeypatch.setattr(PagedAttention, "forward_cpu", attention_without(is_broken))
    with pytest.raises(SetupError, match="self-check"), engine_of(save_tiny(tmp_path)):
        pass


@pytest.mark.parametrize("only_decodes", [True, False])
def test_positions_off_by_one_behind_a_context_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_decodes: bool
) -> None:
    original = StepBatch.positions.func
    monkeypatch.setattr(StepBatch, "positions", shifted(original, 1, only_decodes=only_decodes))
    with pytest.raises(SetupError, match="self-check"), engine_of(save_tiny(tmp_path)):
        pass


def test_new_keys_in_the_wrong_slot_stop_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slots = StepBatch.slots

    def one_too_low(batch: StepBatch, block_size: int) -> Any:
        return np.maximum(slots(batch, block_size) - 1, 0)

    monkeypatch.setattr(StepBatch, "slots", one_too_low)
    with pytest.raises(SetupError, match="self-check"), engine_of(save_tiny(tmp_path)):
        pass


def test_attention_over_a_slot_that_no_token_was_written_to_stops_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a block that the row has; both runs would read the same zeros of a fresh cache."""
    stage = StepBuffers.stage

    def one_more(self: Any, batch: StepBatch, block_size: int, **sizes: int) -> None:
        stage(self, batch, block_size, **sizes)
        lengths = self._lens[: batch.num_sequences]
        lengths += lengths % block_size != 0

    monkeypatch.setattr(StepBuffers, "stage", one_more)
    with pytest.raises(SetupError, match="self-check"), engine_of(save_tiny(tmp_path)):
        pass


def test_a_read_of_the_null_block_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables end in it, so that the last tokens of a sequence are taken from there, in both runs."""
    stage_tables = StepBuffers._stage_tables

    def without_last(self: Any, tables: Any, num_sequences: int) -> None:
        stage_tables(self, tables, num_sequences)
        self._tables[: len(tables), 10:] = NULL_BLOCK

    monkeypatch.setattr(StepBuffers, "_stage_tables", without_last)
    with pytest.raises(SetupError, match="self-check"), engine_of(save_tiny(tmp_path)):
        pass


def test_a_model_that_computes_nan_is_not_served(tmp_path: Path) -> None:
    tensors = llama_tensors(TINY)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = float("nan")
    save_checkpoint(tmp_path, TINY, tensors)
    with pytest.raises(SetupError, match=r"NaN or infinity.*weights are damaged"), engine_of(tmp_path):
        pass


def test_a_model_whose_longest_sequence_is_one_token_starts(tmp_path: Path) -> None:
    with engine_of(save_tiny(tmp_path, max_position_embeddings=1)) as engine:
        assert engine.description.model.max_model_len == 1
