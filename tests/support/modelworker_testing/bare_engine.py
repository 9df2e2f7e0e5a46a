"""Engines on a machine that has torch and little else: any device, seeded random weights that are made there, no checkpoint."""

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelworker.compiler.counters import CompileCounters
from modelworker.ops.cpu.packing import WeightArena
from modelworker.worker.counters import Counters
from modelworker.worker.cpu_kernels import CpuKernels
from modelworker.worker.decoder_setup import DecoderParts, prepare_decoder
from modelworker.worker.describe import describe_execution, describe_limits, describe_model, describe_versions
from modelworker.worker.description import SelfCheck, WorkerDescription
from modelworker.worker.engine import Engine
from modelworker.worker.execution_plan import plan_execution
from modelworker.worker.feedback import FeedbackTable
from modelworker.worker.kv_cache import KvCache
from modelworker.worker.machine import read_machine
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.models.config import ModelConfig
from modelworker.worker.models.layer import Layer
from modelworker.worker.models.registry import build_model, load_model_config
from modelworker.worker.models.weights import LoadedWeights
from modelworker.worker.op_plan import missing_kernels, plan_ops
from modelworker.worker.plan import free_bytes_of, plan_kv_cache
from modelworker.worker.progress import LogProgress
from modelworker.worker.settings import WorkerSettings
from modelworker.worker.step_buffers import StepBuffers

Fill = Callable[[CausalLM, torch.device], None]
"""Gives every parameter of a model made on the meta device its memory and values."""


def build_bare_engine(
    settings: WorkerSettings,
    *,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: CpuKernels,
    fill: Fill | None = None,
) -> Engine:
    """Makes an engine as start-up does, of a model that needs no checkpoint. Keys and values in its cache are random.

    Args:
        settings: of the worker; those of model and device are not read.
        config: of the model.
        dtype: in which it computes.
        device: where.
        kernels: of the CPU.
        fill: makes the weights; None: `fill_randomly`.
    """
    plan = plan_execution(settings.execution, settings.step)
    with torch.no_grad():
        ops = plan_ops(settings.ops, device, kernels, compiles=plan.compiles, backend=plan.compiler)
        max_model_len = config.max_model_len
        model = build_model(config, dtype=dtype, max_model_len=max_model_len, ops=ops)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        (fill or fill_randomly)(model, device)
        kv_plan = plan_kv_cache(
            settings, config, dtype=dtype, max_model_len=max_model_len, free_bytes=free_bytes_of(device, read_machine())
        )
        kv_cache = KvCache(kv_plan.geometry, kv_plan.num_blocks, device)
        buffers = StepBuffers(
            max_tokens=settings.step.max_tokens_per_step,
            max_sequences=settings.step.max_sequences,
            max_blocks=-(-max_model_len // kv_plan.geometry.block_size),
            device=device,
        )
        parts = DecoderParts(
            model=model,
            kv_cache=kv_cache,
            buffers=buffers,
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
            kernels=kernels,
            triton=ops.triton,
            device=device,
            identity={"config": config.digest},
        )
        decoder = prepare_decoder(plan, parts, settings, CompileCounters(), LogProgress())
        for layer in kv_cache.layers:
            for cache in layer:
                cache.normal_()
        description = WorkerDescription(
            model=describe_model(
                settings.model,
                config,
                model,
                dtype,
                LoadedWeights(digest="", num_bytes=0, num_parameters=num_parameters),
                max_model_len,
            ),
            kv_cache=kv_cache.describe(),
            limits=describe_limits(settings),
            execution=describe_execution(device, torch.get_num_threads(), model, decoder),
            self_check=SelfCheck(passed=True, findings=decoder.findings),
            degradations=(*kernels.degradations, *missing_kernels(ops), *decoder.degradations),
            versions=describe_versions(device),
        )
        feedback = FeedbackTable.of(
            description.limits,
            max_model_len=max_model_len,
            idle_seconds=settings.feedback.feedback_idle_seconds,
            counters=Counters(),
        )
        return Engine(
            model=model,
            kv_cache=kv_cache,
            runner=decoder.runner,
            feedback=feedback,
            description=description,
            device=device,
        )


def model_config_of(fields: Mapping[str, Any]) -> ModelConfig:
    """Reads the fields of a config.json."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(dict(fields)))
        return load_model_config(Path(directory))


def fill_randomly(model: CausalLM, device: torch.device, seed: int = 0) -> None:
    """Makes weights on the device, the same for the same seed and kind of device: products keep the size of what they are given."""
    generator = torch.Generator(device).manual_seed(seed)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                values = torch.empty_like(parameter, device=device)
                if parameter.ndim == 1:
                    values.normal_(1.0, 0.1, generator=generator)
                else:
                    values.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
                made[parameter] = nn.Parameter(values, requires_grad=False)
            module.register_parameter(name, made[parameter])
    arena = WeightArena()
    for module in model.modules():
        if isinstance(module, Layer):
            module.process_after_loading(device, arena)
