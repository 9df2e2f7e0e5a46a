"""Faults that captured graphs could have, planted so that only the graphs are wrong."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from modelworker.graphs.full import FullGraphs
from modelworker.graphs.piecewise import PiecewiseGraphs, Stage
from modelworker.ops.activation import SiluAndMul
from modelworker.worker import capture
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.step_buffers import RunDecoder, StepInputs

Fault = Callable[[RunDecoder, CausalLM, KvCache], RunDecoder]
"""Makes a wrong decoder of a right one, its model and its cache."""
StageFault = Callable[[int, Stage], Stage]
"""Makes a wrong stage of a right one; the index counts from the end, -1 is the last."""
LAST_PIECE = -1


def with_inputs(change: Callable[[StepInputs, KvCache], StepInputs]) -> Fault:
    """A graph that reads something else than it was given."""
    return lambda run, _model, kv_cache: lambda *inputs: run(*change(StepInputs(*inputs), kv_cache))


def wrong_rope_row(inputs: StepInputs, _kv_cache: KvCache) -> StepInputs:
    """Of the first token alone."""
    first = torch.arange(len(inputs.positions)) == 0
    return inputs._replace(positions=inputs.positions + first.to(torch.int32))


def slot_that_wraps(inputs: StepInputs, kv_cache: KvCache) -> StepInputs:
    num_slots = kv_cache.num_blocks * kv_cache.geometry.block_size
    return inputs._replace(slots=inputs.slots.remainder(num_slots))


def dropped_mutation(inputs: StepInputs, _kv_cache: KvCache) -> StepInputs:
    return inputs._replace(slots=torch.full_like(inputs.slots, -1))


def stale_block_column(run: RunDecoder, _model: CausalLM, _kv_cache: KvCache) -> RunDecoder:
    """The second column is that of the step before."""
    before = torch.zeros(64, dtype=torch.int32)

    def stale(*tensors: Tensor) -> Sequence[Tensor]:
        inputs = StepInputs(*tensors)
        num_sequences = len(inputs.block_tables)
        tables = inputs.block_tables.clone()
        tables[:, 1] = before[:num_sequences]
        before[:num_sequences].copy_(inputs.block_tables[:, 1])
        return run(*inputs._replace(block_tables=tables))

    return stale


def no_value_at_length_zero(run: RunDecoder, _model: CausalLM, _kv_cache: KvCache) -> RunDecoder:
    """Padded rows are 0 / 0."""

    def divided(*tensors: Tensor) -> Sequence[Tensor]:
        (hidden,) = run(*tensors)
        lengths = StepInputs(*tensors).seq_lens[:, None]
        return (hidden * (lengths / lengths),)

    return divided


def other_layers_cache(_run: RunDecoder, model: CausalLM, kv_cache: KvCache) -> RunDecoder:
    def swapped(*tensors: Tensor) -> Sequence[Tensor]:
        inputs = StepInputs(*tensors)
        return (model(inputs.token_ids, inputs.positions, inputs.attention, kv_cache.layers[::-1]),)

    return swapped


@contextmanager
def instead(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replaces a method of one module."""
    setattr(module, name, function)
    try:
        yield
    finally:
        delattr(module, name)


def swapped_gate_and_up(run: RunDecoder, model: CausalLM, _kv_cache: KvCache) -> RunDecoder:
    act = [module for module in model.modules() if isinstance(module, SiluAndMul)][-1]

    def swapped(*tensors: Tensor) -> Sequence[Tensor]:
        def exchange(gate_up: Tensor) -> Any:
            gate, up = gate_up.chunk(2, dim=-1)
            return SiluAndMul.forward(act, torch.cat((up, gate), dim=-1))

        with instead(act, "forward", exchange):
            return run(*tensors)

    return swapped


def zeroed_residual(run: RunDecoder, model: Any, _kv_cache: KvCache) -> RunDecoder:
    norm = model.model.layers[-1].input_layernorm
    add = norm.add

    def zeroed(*tensors: Tensor) -> Sequence[Tensor]:
        with instead(norm, "add", lambda x, residual: add(x, residual.zero_())):
            return run(*tensors)

    return zeroed


def missing_kernel(run: RunDecoder, model: Any, _kv_cache: KvCache) -> RunDecoder:
    """The lists go without an activation: what follows reads what there was before anything was captured."""
    mlp = model.model.layers[0].mlp
    # As large as what other tokens leave, so that nothing gives it away but being wrong.
    left = mlp.act(mlp.gate_up_proj(torch.randn_like(next(model.parameters()).new_empty(64, mlp.gate_up_proj.in_features))))

    def without(*tensors: Tensor) -> Sequence[Tensor]:
        with instead(mlp.act, "forward", lambda gate_up: left[: len(gate_up)]):
            return run(*tensors)

    return without


def of_one_size(num_tokens: int, fault: Fault) -> Fault:
    def sometimes(run: RunDecoder, model: CausalLM, kv_cache: KvCache) -> RunDecoder:
        wrong = fault(run, model, kv_cache)
        return lambda *inputs: (wrong if len(inputs[0]) == num_tokens else run)(*inputs)

    return sometimes


FULL_FAULTS: Mapping[str, Fault] = {
    "a wrong RoPE row": with_inputs(wrong_rope_row),
    "a stale block column": stale_block_column,
    "slot -1 that wraps": with_inputs(slot_that_wraps),
    "a dropped mutation": with_inputs(dropped_mutation),
    "padding of length 0 that isn't finite": no_value_at_length_zero,
    "swapped gate and up": swapped_gate_and_up,
    "another layer's cache": other_layers_cache,
    "a zeroed residual": zeroed_residual,
    "a kernel that is missing from the list": missing_kernel,
    "a wrong RoPE row in the graph of one size": of_one_size(16, with_inputs(wrong_rope_row)),
}


def plant_in_full_graphs(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Lets FULL graphs capture a decoder that is wrong; what runs without them is sound."""
    parts: list[tuple[CausalLM, KvCache]] = []
    plain_decoder = capture.plain_decoder

    def remember(model: CausalLM, kv_cache: KvCache) -> RunDecoder:
        parts.append((model, kv_cache))
        return plain_decoder(model, kv_cache)

    monkeypatch.setattr(capture, "plain_decoder", remember)
    monkeypatch.setattr(capture, "FullGraphs", lambda run: FullGraphs(fault(run, *parts[-1])))


def without_store(_index: int, stage: Stage) -> Stage:
    """Every token of the cache update goes nowhere."""
    if "store_kv" not in stage.name:
        return stage

    def run(tensors: list[Tensor]) -> Sequence[Tensor]:
        return stage.run([torch.full_like(tensor, -1) if tensor.dtype == torch.int64 else tensor for tensor in tensors])

    return dataclasses.replace(stage, run=run)


def attention_over_the_first_cache() -> StageFault:
    first: list[Tensor] = []

    def change(_index: int, stage: Stage) -> Stage:
        if "paged_attention" not in stage.name:
            return stage

        def run(tensors: list[Tensor]) -> Sequence[Tensor]:
            caches = [tensor for tensor in tensors if tensor.dim() == 4]
            first.extend(caches if not first else ())
            replaced = iter(first)
            return stage.run([next(replaced) if tensor.dim() == 4 else tensor for tensor in tensors])

        return dataclasses.replace(stage, run=run)

    return change


def piece_of_zeroed_activations(index: int, stage: Stage) -> Stage:
    """In the last piece, what was computed before it is lost."""
    if index != LAST_PIECE:
        return stage

    def run(tensors: list[Tensor]) -> Sequence[Tensor]:
        return stage.run(
            [tensor.mul(0) if tensor.is_inference() and tensor.dtype.is_floating_point else tensor for tensor in tensors]
        )

    return dataclasses.replace(stage, run=run)


PIECEWISE_FAULTS: Mapping[str, Callable[[], StageFault]] = {
    "a dropped mutation": lambda: without_store,
    "another layer's cache": attention_over_the_first_cache,
    "lost activations": lambda: piece_of_zeroed_activations,
}


def plant_in_piecewise_graphs(monkeypatch: pytest.MonkeyPatch, fault: StageFault) -> None:
    """Lets PIECEWISE graphs have stages that are wrong."""

    def wrong(stages: Sequence[Stage], **others: Any) -> PiecewiseGraphs:
        return PiecewiseGraphs([fault(index - len(stages), stage) for index, stage in enumerate(stages)], **others)

    monkeypatch.setattr(capture, "PiecewiseGraphs", wrong)
