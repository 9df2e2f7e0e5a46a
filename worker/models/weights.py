"""Fills a model from a checkpoint: every parameter exactly once, one tensor at a time.

The model says what it needs (`CheckpointSlot`), and the checkpoint has to hold exactly that: what is missing, left over or
misshapen stops the start before anything is read.
"""

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from modelworker.ops.cpu.packing import WeightArena
from modelworker.worker.errors import CheckpointError
from modelworker.worker.models.causal_lm import CausalLM
from modelworker.worker.models.checkpoint import Checkpoint
from modelworker.worker.models.layer import CheckpointSlot, Layer
from modelworker.worker.models.safetensors_file import SafetensorsFile, TensorEntry

_logger = logging.getLogger(__name__)

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"

# Buffers that older versions of training code saved along with the weights. They are computed here, so nothing is lost.
_IGNORED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "self_attn.masked_bias")


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """What was loaded.

    Attributes:
        digest: "sha256:..." over the names, dtypes, shapes and bytes of the tensors that the model uses, however they are divided
            into files; "" where none was asked for.
        num_bytes: read from the checkpoint.
        num_parameters: of the model on this rank, a tied head counted once.
    """

    digest: str
    num_bytes: int
    num_parameters: int


def load_weights(
    model: CausalLM,
    checkpoint: Checkpoint,
    *,
    device: torch.device,
    progress: Callable[[int], None] = lambda num_bytes: None,
    digest: bool = True,
) -> LoadedWeights:
    """Allocates the model's parameters on a device and fills them.

    A tensor in another floating-point type than the model's is converted. A tied head may be absent, or present and equal; where it
    differs from the embedding, the model is untied and both are used, as transformers does.

    Args:
        model: as `build_model` made it; changed in place.
        checkpoint: its weights.
        device: where the parameters go.
        progress: called with the number of bytes read since the last call, `checkpoint.num_bytes` in all.
        digest: whether to compute a digest, which needs all the bytes of the tensors even where a rank uses a part of them.

    Raises:
        CheckpointError: the checkpoint doesn't hold exactly what the model needs.
    """
    tensors, slots = match_weights(model, checkpoint)
    _materialize(model, device)
    progress(checkpoint.num_bytes - sum(tensors[name].num_bytes for name in slots))
    digests: dict[str, str] = {}
    by_file = defaultdict(list)
    for name in slots:
        by_file[tensors[name].path].append(name)
    with ThreadPoolExecutor(1, thread_name_prefix="weights-digest") as hasher:
        for path, names in by_file.items():
            with SafetensorsFile(path) as file:
                for name in sorted(names, key=lambda name: tensors[name].start):
                    entry = tensors[name]
                    pending = hasher.submit(_sha256, file.bytes_of(entry)) if digest else None
                    _fill(model, slots[name], file.tensor(entry))
                    if pending:
                        digests[name] = pending.result()
                    file.release(entry)
                    progress(entry.num_bytes)
    # Before they are packed, which rounds sizes up.
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    arena = WeightArena()
    for module in model.modules():
        if isinstance(module, Layer):
            module.process_after_loading(device, arena)
    return LoadedWeights(
        digest=_combine(tensors, digests) if digest else "",
        num_bytes=sum(tensors[name].num_bytes for name in slots),
        num_parameters=num_parameters,
    )


def match_weights(
    model: CausalLM, checkpoint: Checkpoint, *, compare_heads: bool = True
) -> tuple[Mapping[str, TensorEntry], Mapping[str, CheckpointSlot]]:
    """Holds what a model needs against what a checkpoint has, by the headers of its files.

    Args:
        model: as `build_model` made it. Its head is untied where the checkpoint has another one than the embedding.
        checkpoint: its weights.
        compare_heads: whether a head beside a tied embedding is read to learn if they are equal. Otherwise no data is read at all,
            and they count as equal where their types and shapes are.

    Returns:
        The tensors to load, and where each one that the model uses goes, both by name.

    Raises:
        CheckpointError: the checkpoint doesn't hold exactly what the model needs.
    """
    tensors = _resolve_tied_head(model, checkpoint, compare_heads)
    return tensors, _match(model, checkpoint.source, tensors)


def _resolve_tied_head(model: CausalLM, checkpoint: Checkpoint, compare: bool) -> Mapping[str, TensorEntry]:
    """Decides what a tied model's embedding and head are, and returns the tensors to load, without buffers that mean nothing."""
    tensors = {name: entry for name, entry in checkpoint.tensors.items() if not name.endswith(_IGNORED)}
    ignored = len(checkpoint.tensors) - len(tensors)
    if ignored:
        _logger.info("%s: ignored %d saved buffers, e.g. of RoPE, that are computed anyway", checkpoint.source, ignored)
    if not model.has_tied_head or _HEAD not in tensors:
        return tensors
    if _EMBEDDING not in tensors:
        _logger.info("%s: the tied embedding stands there as %s only", checkpoint.source, _HEAD)
        tensors[_EMBEDDING] = tensors.pop(_HEAD)
    elif _are_equal(tensors[_EMBEDDING], tensors[_HEAD], compare):
        del tensors[_HEAD]
    else:
        _logger.warning(
            "%s: config.json ties the head to the embedding, but %s differs from %s: both are used, not tied",
            checkpoint.source,
            _HEAD,
            _EMBEDDING,
        )
        with torch.device("meta"):
            model.untie_head()
    return tensors


def _are_equal(first: TensorEntry, second: TensorEntry, compare: bool) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    if not compare:
        return True
    with SafetensorsFile(first.path) as first_file, SafetensorsFile(second.path) as second_file:
        # Not by `==` of the views: that takes 3.7 s for 256 MiB, and no other thread gets a turn meanwhile.
        one, other = (
            torch.frombuffer(file.bytes_of(entry), dtype=torch.uint8)
            for file, entry in ((first_file, first), (second_file, second))
        )
        return torch.equal(one, other)


def _match(model: CausalLM, source: Path, tensors: Mapping[str, TensorEntry]) -> dict[str, CheckpointSlot]:
    """Holds what the model needs against what the checkpoint has. Returns the slots by the tensors' names."""
    slots = {slot.name: slot for slot in model.checkpoint_slots()}
    _check_coverage(model, list(model.checkpoint_slots()))
    missing = [name for name in slots if name not in tensors]
    if missing:
        raise CheckpointError(f"{source}: {_some(missing)} missing, but the model needs {'it' if len(missing) == 1 else 'them'}")
    extra = [name for name in tensors if name not in slots]
    if extra:
        raise CheckpointError(
            f"{tensors[extra[0]].path}: {_some(extra)} in the file, but not part of the model that config.json describes"
        )
    for name, slot in slots.items():
        entry = tensors[name]
        if entry.shape != slot.shape:
            raise CheckpointError(f"{entry.path}: {name}: expected the shape {list(slot.shape)}, found {list(entry.shape)}")
        if not entry.is_loadable:
            raise CheckpointError(f"{entry.path}: {name}: expected the dtype F32, BF16 or F16, found {entry.dtype}")
    return slots


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"


def _check_coverage(model: nn.Module, slots: list[CheckpointSlot]) -> None:
    """The slots of each parameter fill it from end to end, and no tensor is named twice: else the model's code is wrong."""
    names = [slot.name for slot in slots]
    by_parameter = defaultdict(list)
    for slot in slots:
        if slot.parameter is not None:
            by_parameter[slot.parameter].append(slot)
    covered = set()
    for parameter, parts in by_parameter.items():
        end = 0
        for part in sorted(parts, key=lambda part: part.target_start):
            if part.target_start != end:
                raise AssertionError(
                    f"{parameter}: the part {part.name} starts at {part.target_start}, the part before ends at {end}"
                )
            end += part.length
        tensor = model.get_parameter(parameter)
        if end != tensor.shape[parts[0].dim]:
            raise AssertionError(f"{parameter}: parts fill {end} of {tensor.shape[parts[0].dim]}")
        covered.add(parameter)
    left = {name for name, _ in model.named_parameters()} - covered
    if left or len(set(names)) < len(names):
        raise AssertionError(
            f"parameters that nothing fills: {sorted(left)}; tensors named: {len(names)}, different: {len(set(names))}"
        )


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Gives every parameter memory; parameters that are shared stay shared."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                # Not `empty_like`: of a tensor without memory torch computes the layout in Python, and loads sympy for it, 0.6 s.
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                made[parameter] = nn.Parameter(empty, requires_grad=False)
            module.register_parameter(name, made[parameter])


def _fill(model: nn.Module, slot: CheckpointSlot, tensor: Tensor) -> None:
    if slot.parameter is None:
        return
    target = model.get_parameter(slot.parameter).narrow(slot.dim, slot.target_start, slot.length)
    target.copy_(tensor.narrow(slot.dim, slot.source_start, slot.length))


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _combine(tensors: Mapping[str, TensorEntry], digests: Mapping[str, str]) -> str:
    lines = [f"{name} {tensors[name].dtype} {list(tensors[name].shape)} {digests[name]}\n" for name in sorted(digests)]
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()
