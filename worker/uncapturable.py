"""Steps that are known not to fit into a graph, so that nobody tries."""

from collections.abc import Sequence

import torch
from torch import Tensor

from modelworker.graphs.backend import GraphBackend, Replay, UnknownKeyError
from modelworker.graphs.shapes import GraphKey
from modelworker.ops.custom_op import NATIVE
from modelworker.ops.report import report_ops
from modelworker.worker.compiled_decoder import CompiledDecoder
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.step_buffers import RunDecoder, StepInputs

_BY_TOKEN = ("token_ids", "positions", "slots")
# Their native forms index by lengths and slots, which the host has to know.
_HOST_OPS = ("paged_attention", "store_kv")


class UncapturableError(Exception):
    """A step does something that a graph can't hold."""


def full_obstacle(model: CausalLM, device: torch.device) -> str:
    """Says why a whole step can't be captured on a device; "" where it can be tried.

    A capture that CUDA would end with an error is better never begun: before torch 2.13 the allocator takes it to be under way from
    then on, and the next call that frees cached memory fails.
    """
    if device.type != "cuda":
        return ""
    native = [report.name for report in report_ops(model) if report.name in _HOST_OPS and report.implementation.startswith(NATIVE)]
    return f"native code reads a step's values on the host: {', '.join(native)}" if native else ""


def piecewise_obstacle(compiled: CompiledDecoder) -> str:
    """Says why the pieces of a decoder can't be captured; "" where they can be.

    A piece is captured for a number of tokens, and replayed for any number of sequences.
    """
    by_sequence = {slot: name for slot, name in enumerate(StepInputs._fields) if name not in _BY_TOKEN}
    slots = {slot for stage in compiled.stages if stage.is_piece for slot in stage.inputs}
    read = [name for slot, name in by_sequence.items() if slot in slots]
    return f"a piece reads {', '.join(read)}, whose sizes follow the sequences of a step" if read else ""


class Uncapturable:
    """A program of graphs that can be run, but not captured.

    Args:
        run: computes a step.
        obstacle: to its capture.
    """

    def __init__(self, run: RunDecoder, obstacle: str) -> None:
        self._run = run
        self._obstacle = obstacle

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        """Runs a step without a graph."""
        return self._run(*inputs)

    def capture(self, key: GraphKey, inputs: Sequence[Tensor], backend: GraphBackend) -> None:
        """Refuses.

        Raises:
            UncapturableError: always, with the obstacle.
        """
        raise UncapturableError(self._obstacle)

    def replay(self, key: GraphKey, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Refuses.

        Raises:
            UnknownKeyError: always: no key is captured.
        """
        raise UnknownKeyError(f"no graph was captured for {key}")

    def replays(self, key: GraphKey) -> Sequence[Replay]:
        """Returns nothing: there are no graphs."""
        return ()

    def close(self) -> None:
        """Does nothing: there are no graphs."""
