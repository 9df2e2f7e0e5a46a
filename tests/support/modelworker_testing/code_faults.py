"""Faults that the code of a decoder could have, planted where it is traced, so that plain modules stay sound."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modelworker.ops.activation import SiluAndMul
from modelworker.worker import decoder_setup
from modelworker.worker.compiled_decoder import CompiledDecoder
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.step_buffers import StepInputs
from modelworker_testing.graph_faults import Fault, dropped_mutation, instead, slot_that_wraps, stale_block_column, wrong_rope_row

Decode = Callable[..., Tensor]


def _unchanged(run: Any, _model: CausalLM, _kv_cache: KvCache) -> Any:
    return run


@dataclass(frozen=True, kw_only=True)
class CodeFault:
    """What is wrong with code.

    Attributes:
        function: makes a wrong function of the one that is traced, its model and its cache.
        module: while it is entered, the model is wrong; the trace is made meanwhile.
        run: makes a wrong decoder of the compiled one: what a trace can't hold.
    """

    function: Callable[[Decode, CausalLM, KvCache], Decode] = _unchanged
    module: Callable[[Any], AbstractContextManager[None]] = lambda _model: nullcontext()
    run: Fault = _unchanged


def _reads(change: Callable[[StepInputs, KvCache], StepInputs]) -> CodeFault:
    return CodeFault(function=lambda decode, _model, kv_cache: lambda *inputs: decode(*change(StepInputs(*inputs), kv_cache)))


def _no_value_without_slot(decode: Decode, _model: CausalLM, _kv_cache: KvCache) -> Decode:
    """Padded tokens, of no length, are 0 / 0."""

    def divided(*tensors: Tensor) -> Tensor:
        has_slot = (StepInputs(*tensors).slots >= 0).float()[:, None]
        hidden = decode(*tensors)
        return hidden * (has_slot / has_slot).to(hidden.dtype)

    return divided


def _other_layers_cache(_decode: Decode, model: CausalLM, kv_cache: KvCache) -> Decode:
    def swapped(*tensors: Tensor) -> Tensor:
        inputs = StepInputs(*tensors)
        hidden: Tensor = model(inputs.token_ids, inputs.positions, inputs.attention, kv_cache.layers[::-1])
        return hidden

    return swapped


@contextmanager
def _swapped_gate_and_up(model: CausalLM) -> Iterator[None]:
    act = [module for module in model.modules() if isinstance(module, SiluAndMul)][-1]

    def exchange(gate_up: Tensor) -> Any:
        gate, up = gate_up.chunk(2, dim=-1)
        return SiluAndMul.forward(act, torch.cat((up, gate), dim=-1))

    with instead(act, "forward", exchange):
        yield


@contextmanager
def _zeroed_residual(model: Any) -> Iterator[None]:
    norm = model.model.layers[-1].input_layernorm
    add = norm.add
    with instead(norm, "add", lambda x, residual: add(x, residual.zero_())):
        yield


CODE_FAULTS: Mapping[str, CodeFault] = {
    "a wrong RoPE row": _reads(wrong_rope_row),
    "a stale block column": CodeFault(run=stale_block_column),
    "slot -1 that wraps": _reads(slot_that_wraps),
    "a dropped mutation": _reads(dropped_mutation),
    "padding of length 0 that isn't finite": CodeFault(function=_no_value_without_slot),
    "swapped gate and up": CodeFault(module=_swapped_gate_and_up),
    "another layer's cache": CodeFault(function=_other_layers_cache),
    "a zeroed residual": CodeFault(module=_zeroed_residual),
}


def plant_in_code(monkeypatch: pytest.MonkeyPatch, fault: CodeFault) -> None:
    """Lets code be wrong that runs without a graph."""
    _plant(monkeypatch, fault, lambda _sound, wrong: wrong)


def plant_in_code_of_graphs(monkeypatch: pytest.MonkeyPatch, fault: CodeFault) -> None:
    """Lets the pieces be wrong that graphs are captured of; what runs without a graph is sound."""

    def only_stages(sound: CompiledDecoder, wrong: CompiledDecoder) -> CompiledDecoder:
        return replace(sound, stages=wrong.stages, plain_stages=wrong.plain_stages, bound=wrong.bound, outputs=wrong.outputs)

    _plant(monkeypatch, fault, only_stages)


def _plant(
    monkeypatch: pytest.MonkeyPatch, fault: CodeFault, joined: Callable[[CompiledDecoder, CompiledDecoder], CompiledDecoder]
) -> None:
    parts: list[tuple[CausalLM, KvCache]] = []
    decoder_source, compile_decoder = decoder_setup.decoder_source, decoder_setup.compile_decoder

    def remember(model: CausalLM, kv_cache: KvCache, *others: Any, **options: Any) -> Any:
        parts.append((model, kv_cache))
        return decoder_source(model, kv_cache, *others, **options)

    def compile_wrong(source: Any, settings: Any, **options: Any) -> CompiledDecoder:
        model, kv_cache = parts[-1]
        sound = compile_decoder(source, settings, **options)
        wrong_source = replace(source, function=fault.function(source.function, model, kv_cache))
        with fault.module(model):
            # Its key would be that of the sound one.
            wrong = compile_decoder(wrong_source, settings, **{**options, "cache": None})
        return joined(sound, replace(wrong, run=fault.run(wrong.run, model, kv_cache)))

    monkeypatch.setattr(decoder_setup, "decoder_source", remember)
    monkeypatch.setattr(decoder_setup, "compile_decoder", compile_wrong)
