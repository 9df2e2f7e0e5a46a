"""Which graph runs a step, and why not a better one."""

import logging
from collections.abc import Sequence
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from modelworker.graphs.settings import CaptureMode, GraphSettings, RuntimeMode
from modelworker.graphs.shapes import GraphKey, StepShape, fits
from modelworker.graphs.sizes import gaps, graph_keys

_logger = logging.getLogger(__name__)


class Reason(StrEnum):
    """Why a step did not run in the next better mode than the one that it ran in, as its response says it.

    A step that ran PIECEWISE is told why not FULL; one without a graph why not PIECEWISE or, where mixed batches have no graphs by
    the settings, why not FULL. Where compiled code is out of service, a step without a graph is told why it isn't compiled.
    """

    NONE = ""
    """The best mode that the settings offer ran."""
    EMPTY = "empty"
    """The step has no tokens: there was nothing to run."""
    DISABLED = "disabled"
    """By the settings, nothing is captured."""
    NO_KERNELS = "no_kernels"
    """There are no kernels that graphs could be made of; the worker's degradations say why."""
    NOT_COMPILED = "not_compiled"
    """The graphs that were asked for are of compiled pieces, and there are none; the worker's degradations say why."""
    NOT_DECODE = "not_decode"
    """A row has no context, or a query length which is none of decode: it prefills. FULL serves decode rows only."""
    NOT_UNIFORM = "not_uniform"
    """Every row decodes, but not all with the same query length."""
    OVER_MAX = "over_max"
    """The step is larger than the largest graph."""
    NOT_CAPTURED = "not_captured"
    """The mode is in the settings, but capturing it failed at the start."""
    FAILED_SELF_CHECK = "failed_self_check"
    """The mode gave other results than eager mode at the start, and is not served."""


class Choice(NamedTuple):
    """How a step runs.

    Attributes:
        key: of the graph; None: without one, unpadded.
        reason: why no better mode.
    """

    key: GraphKey | None
    reason: Reason

    @property
    def mode(self) -> RuntimeMode:
        """The run-time mode."""
        return RuntimeMode.NONE if self.key is None else self.key.mode


class Dispatcher:
    """Chooses a graph for each step.

    Args:
        settings: what is captured.
        why_none: what steps are told where the settings' mode is NONE.

    Attributes:
        settings: what is captured.
        keys: of all graphs, in the order of capture.
    """

    def __init__(self, settings: GraphSettings, *, why_none: Reason = Reason.DISABLED) -> None:
        self.settings = settings
        self.keys = graph_keys(settings)
        self._why_none = why_none
        self._obstacles: dict[RuntimeMode, Reason] = {}
        self._candidates = _candidates(self.keys)
        self._has_told = False
        self._gaps = gaps(settings)

    def choose(self, shape: StepShape) -> Choice:
        """Hot path: returns the graph that runs a step, FULL before PIECEWISE, the smallest that fits; none, if none does."""
        if shape.num_tokens < len(self._candidates):
            for key in self._candidates[shape.num_tokens]:
                if fits(key, shape):
                    return Choice(key, Reason.NONE if key.mode is RuntimeMode.FULL else self._why_not_full(shape))
        return Choice(None, self._why_no_graph(shape))

    def disable(self, mode: RuntimeMode, reason: Reason) -> None:
        """Takes all graphs of a mode out of service, or, of mode NONE, the compiled code."""
        self._obstacles.setdefault(mode, reason)
        self._candidates = _candidates([key for key in self.keys if key.mode not in self._obstacles])

    @property
    def disabled(self) -> dict[RuntimeMode, Reason]:
        """The modes that are out of service, and why."""
        return dict(self._obstacles)

    @property
    def served_mode(self) -> CaptureMode:
        """What is left of the settings' mode without the modes that are out of service."""
        mixed = self.settings.mode.mixed_mode
        mixed = RuntimeMode.NONE if mixed in self._obstacles else mixed
        decode = self.settings.mode.decode_mode
        # A decode that has no graph of its own runs as any other batch.
        decode = mixed if decode in self._obstacles else decode
        return next(mode for mode in CaptureMode if (mode.decode_mode, mode.mixed_mode) == (decode, mixed))

    def _why_not_full(self, shape: StepShape) -> Reason:
        if self.settings.mode.decode_mode is not RuntimeMode.FULL:
            return Reason.NONE
        if shape.uniform_query_len is None:
            return Reason.NOT_UNIFORM if shape.all_decode else Reason.NOT_DECODE
        return self._obstacles.get(RuntimeMode.FULL, Reason.OVER_MAX)

    def _why_no_graph(self, shape: StepShape) -> Reason:
        mode = self.settings.mode
        if shape.num_tokens == 0:
            return Reason.EMPTY
        if mode.mixed_mode is not RuntimeMode.NONE:
            reason = self._obstacles.get(mode.mixed_mode, Reason.OVER_MAX)
        elif mode.decode_mode is not RuntimeMode.NONE:
            reason = self._why_not_full(shape)
        else:
            reason = self._why_none
        if reason is Reason.OVER_MAX and not self._has_told:
            self._has_told = True
            self._tell_of_larger(shape)
        return self._obstacles.get(RuntimeMode.NONE, reason)

    def _tell_of_larger(self, shape: StepShape) -> None:
        """Says that a step has no graph that is large enough; what default sizes leave out, they leave out on purpose."""
        kinds = (None, shape.uniform_query_len)
        is_chosen = any(gap.is_chosen for gap in self._gaps if gap.uniform_query_len in kinds)
        level = logging.WARNING if is_chosen else logging.INFO
        _logger.log(level, "a step of %d tokens, %d sequences is larger than the largest graph", *shape[:2])


def _candidates(keys: Sequence[GraphKey]) -> tuple[tuple[GraphKey, ...], ...]:
    """Returns, for each number of tokens from 0, the smallest graph of each kind that could run it, best kind first."""

    def kind(key: GraphKey) -> tuple[int, bool, int]:
        return (-key.mode, key.uniform_query_len is None, key.uniform_query_len or 0)

    largest = max((key.num_tokens for key in keys), default=0)
    table: list[list[GraphKey]] = [[] for _ in range(largest + 1)]
    for _, group in groupby(sorted(keys, key=lambda key: (kind(key), key.num_tokens)), key=kind):
        smallest = 1
        for key in group:
            step = key.uniform_query_len or 1
            for num_tokens in range(-(-smallest // step) * step, key.num_tokens + 1, step):
                table[num_tokens].append(key)
            smallest = key.num_tokens + 1
    return tuple(map(tuple, table))
