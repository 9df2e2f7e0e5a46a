"""FULL graphs."""

import pytest
import torch
from torch import Tensor

from modelworker.graphs.backend import StaleInputError, UnknownKeyError
from modelworker.graphs.cpu_backend import CpuGraphBackend
from modelworker.graphs.full import FullGraphs
from modelworker.graphs.settings import RuntimeMode
from modelworker.graphs.shapes import GraphKey, make_key
from modelworker_testing.aten_recorder import AtenRecorder
from modelworker_testing.noting_backend import NotingBackend


def _key(num_tokens: int) -> GraphKey:
    return make_key(RuntimeMode.FULL, num_tokens, max_sequences=64, uniform_query_len=1)


def _step(tokens: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return torch.outer(tokens, torch.arange(100.0)) * scale, tokens.sum()


def test_every_key_uses_the_memory_of_the_largest_its_outputs_included() -> None:
    recorder = AtenRecorder()
    backend, graphs = CpuGraphBackend(recorder), FullGraphs(_step)
    tokens, scale = torch.zeros(16), torch.ones(1)
    for _ in range(3):
        graphs.capture(_key(16), (tokens, scale), backend)
    largest = backend.num_bytes
    for number in range(3):
        tokens.fill_(number)
        scale.fill_(number + 1)
        recorder.arena.poison()
        table, total = graphs.replay(_key(16), (tokens, scale))
        expected = _step(tokens, scale)
        assert torch.equal(table, expected[0])
        assert torch.equal(total, expected[1])
    graphs.close()
    assert largest == 16 * 100 * 4 * 2 + 100 * 4 + 48 + 64


def test_what_was_not_captured_is_unknown() -> None:
    graphs = FullGraphs(_step)
    with pytest.raises(UnknownKeyError, match="FULL 4 tokens 4 sequences of 1"):
        graphs.replay(_key(4), (torch.ones(4), torch.ones(1)))


def test_another_number_of_inputs_is_refused() -> None:
    graphs = FullGraphs(_step)
    inputs = (torch.ones(4), torch.ones(1))
    graphs.capture(_key(4), inputs, NotingBackend())
    with pytest.raises(StaleInputError, match="captured with 2 inputs, and given 1"):
        graphs.replay(_key(4), inputs[:1])


def test_without_a_graph_the_step_runs_at_any_size() -> None:
    found = FullGraphs(_step)(torch.ones(3), torch.ones(1))
    assert [tensor.shape for tensor in found] == [(3, 100), ()]
