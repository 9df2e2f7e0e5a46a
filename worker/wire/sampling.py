"""Parses and checks how a step samples: `SamplingParams`, and what comes with it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.arrays import BoolArray
from modelworker.worker.batch import SamplingBatch
from modelworker.worker.description import WorkerDescription
from modelworker.worker.wire.checks import StepFields
from modelworker.worker.wire.token_lists import check_history, parse_grammar, parse_history, parse_logit_bias, parse_token_lists
from modelworker.worker.wire.violations import Violations, check_optional_length

_MIN_TEMPERATURE = np.float32(1e-5)
_MAX_NUM_LOGPROBS = 20

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parameter:
    """One array: its neutral value, which values are valid (None: all) and how that is said. NaN is never valid."""

    name: str
    dtype: type[np.generic]
    neutral: float
    is_valid: Callable[[Array], BoolArray] | None = None
    expected: str = ""


# Ranges are written so that a NaN, which compares false to everything, falls outside.
_PARAMETERS = (
    _Parameter(
        name="temperature",
        dtype=np.float32,
        neutral=0.0,
        is_valid=lambda values: (values == 0) | ((values >= _MIN_TEMPERATURE) & (values < np.inf)),
        expected="0 (greedy) or a finite value of at least 1e-5",
    ),
    _Parameter(name="top_k", dtype=np.int32, neutral=0, is_valid=lambda values: values >= 0, expected="at least 0 (0 is off)"),
    _Parameter(
        name="top_p",
        dtype=np.float32,
        neutral=1.0,
        is_valid=lambda values: (values > 0) & (values <= 1),
        expected="above 0 and at most 1 (1 is off)",
    ),
    _Parameter(
        name="min_p",
        dtype=np.float32,
        neutral=0.0,
        is_valid=lambda values: (values >= 0) & (values < 1),
        expected="at least 0 (0 is off) and below 1",
    ),
    _Parameter(name="seed", dtype=np.uint64, neutral=0),
    _Parameter(name="has_seed", dtype=np.bool_, neutral=False),
    *(
        _Parameter(
            name=name,
            dtype=np.float32,
            neutral=0.0,
            is_valid=lambda values: (values >= -2) & (values <= 2),
            expected="-2 .. 2 (0 is off)",
        )
        for name in ("presence", "frequency")
    ),
    _Parameter(
        name="repetition",
        dtype=np.float32,
        neutral=1.0,
        is_valid=lambda values: (values > 0) & (values < np.inf),
        expected="a finite value above 0 (1 is off)",
    ),
    _Parameter(
        name="num_logprobs",
        dtype=np.int32,
        neutral=-1,
        is_valid=lambda values: (values >= -1) & (values <= _MAX_NUM_LOGPROBS),
        expected=f"-1 (none) .. {_MAX_NUM_LOGPROBS}",
    ),
    _Parameter(
        name="logprobs_mode",
        dtype=np.int32,
        neutral=pb.LOGPROBS_MODE_RAW,
        is_valid=lambda values: (values == pb.LOGPROBS_MODE_RAW) | (values == pb.LOGPROBS_MODE_PROCESSED),
        expected="0 (RAW) or 1 (PROCESSED)",
    ),
)


def parse_sampling(fields: StepFields, description: WorkerDescription, violations: Violations) -> SamplingBatch | None:
    """Makes the sampling parameters of a step; what is wrong with them goes to `violations`, and the result is then meaningless.

    Returns:
        None if every row is greedy, and none wants logprobs or changes its logits.
    """
    request, num_sequences = fields.request, fields.num_sequences
    if not any(request.HasField(name) for name in ("sampling", "allowed_ids", "banned_ids", "grammar", "logit_bias", "history")):
        return None
    arrays = {parameter.name: _parse_array(parameter, request.sampling, num_sequences, violations) for parameter in _PARAMETERS}
    sampling = SamplingBatch(
        temperature=arrays["temperature"],
        top_k=np.where(arrays["top_k"] > description.model.vocab_size, np.int32(0), arrays["top_k"]),
        top_p=arrays["top_p"],
        min_p=arrays["min_p"],
        seed=arrays["seed"],
        has_seed=arrays["has_seed"],
        presence=arrays["presence"],
        frequency=arrays["frequency"],
        repetition=arrays["repetition"],
        num_logprobs=arrays["num_logprobs"],
        processed_logprobs=arrays["logprobs_mode"] == pb.LOGPROBS_MODE_PROCESSED,
        allowed=parse_token_lists("allowed_ids", fields, description, violations),
        banned=parse_token_lists("banned_ids", fields, description, violations),
        grammar=parse_grammar(fields, description, violations),
        bias=parse_logit_bias(fields, description, violations),
        history=parse_history(fields, description, violations),
    )
    if violations.is_empty:
        check_history(fields, sampling, violations)
    return sampling if _asks_for_something(sampling) else None


def _asks_for_something(sampling: SamplingBatch) -> bool:
    return bool(
        np.count_nonzero(sampling.temperature)
        or np.count_nonzero(sampling.num_logprobs >= 0)
        or any(part is not None for part in (sampling.allowed, sampling.banned, sampling.grammar, sampling.bias))
        or np.count_nonzero(sampling.has_penalties)
    )


def _parse_array(parameter: _Parameter, sampling: pb.SamplingParams, num_sequences: int, violations: Violations) -> Array:
    values: Array = np.array(getattr(sampling, parameter.name), dtype=parameter.dtype)
    path = f"sampling.{parameter.name}"
    if not check_optional_length(path, values, num_sequences, violations):
        return np.full(num_sequences, parameter.neutral, parameter.dtype)
    if parameter.is_valid is not None:
        valid = parameter.is_valid(values)
        if np.count_nonzero(valid) < num_sequences:
            violations.add_entries(
                path, np.flatnonzero(~valid), lambda row: f"row {row}: found {values[row]}, expected {parameter.expected}"
            )
    return values
