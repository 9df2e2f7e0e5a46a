"""An engine in this process, without a server: for the commands that run steps themselves."""

import argparse
import logging
import sys

import torch

from modelworker.worker.command_serve import check_model_path, find_model
from modelworker.worker.counters import Counters
from modelworker.worker.cpu_kernels import load_cpu_kernels
from modelworker.worker.engine import Engine
from modelworker.worker.flags import read_settings
from modelworker.worker.machine_limits import LimitProbe
from modelworker.worker.progress import Progress
from modelworker.worker.settings import WorkerSettings
from modelworker.worker.startup import build_engine
from modelworker.worker.terminal import progress_on


def settings_with_model(arguments: argparse.Namespace) -> WorkerSettings:
    """Reads the worker's settings, and ends with a usage error where they name no model."""
    settings = read_settings(WorkerSettings, arguments)
    if not settings.model.model:
        arguments.parser.error("no model: give --model DIR or set MODELWORKER_MODEL")
    return settings


def build_offline_engine(settings: WorkerSettings) -> tuple[Engine, Progress]:
    """Builds the engine that a worker with these settings would have. Progress and warnings go to stderr.

    Raises:
        SetupError: the model can't be found, or the engine not be built.
    """
    check_model_path(settings.model.model)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    progress = progress_on(sys.stderr)
    return build_engine(find_model(settings, progress), progress, Counters()), progress


def limit_probe(engine: Engine, settings: WorkerSettings, progress: Progress) -> LimitProbe:
    """Returns what measures the limits of the engine's device, with the engine's own kernels."""
    device = torch.device(engine.description.execution.device)
    # The engine has loaded them already: they are the same.
    kernels = load_cpu_kernels(settings, device, progress).library
    return LimitProbe(device, getattr(torch, engine.description.model.dtype), kernels)
