"""What the header of a recording says of the worker."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from modelworker.worker.description import WorkerDescription
from modelworker.worker.settings import WorkerSettings


def as_chosen(settings: WorkerSettings, description: WorkerDescription) -> WorkerSettings:
    """Puts what was chosen at start in the place of what was left open, so that another machine chooses the same."""
    model = Path(settings.model.model)
    return replace(
        settings,
        model=replace(
            settings.model,
            model=str(model.resolve()) if model.exists() else settings.model.model,
            dtype=description.model.dtype,
            max_model_len=description.model.max_model_len,
        ),
        kv_cache=replace(settings.kv_cache, num_blocks=description.kv_cache.num_blocks),
        device=replace(
            settings.device, device=description.execution.device.partition(":")[0], threads=description.execution.num_threads
        ),
    )


def facts_of(description: WorkerDescription) -> dict[str, Any]:
    """Returns what decides, beside the settings, what a worker computes; as headers have it."""
    model, execution = description.model, description.execution
    return {
        "model": model.name,
        "architecture": model.architecture,
        "weights_digest": model.weights_digest,
        "config_digest": model.config_digest,
        "device_name": execution.device_name,
        "attention": execution.attention,
        "optimization_level": execution.optimization_level,
        "graph_mode": execution.graph_mode,
        "ops": {op.name: op.implementation for op in description.ops if op.implementation},
        "versions": dict(description.versions),
    }
