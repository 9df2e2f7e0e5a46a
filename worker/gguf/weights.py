"""The tensors of a llama-architecture GGUF file as a safetensors file.

Formats: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and https://github.com/huggingface/safetensors#format.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from modelworker.worker.errors import CheckpointError
from modelworker.worker.gguf.config import ModelGeometry
from modelworker.worker.gguf.file import GgufFile

# Elements dequantized at a time: the importer's memory, whatever the size of the model.
_CHUNK_ELEMENTS = 2**20

_OUTPUT_TYPES = {
    "bfloat16": ("BF16", gguf.GGMLQuantizationType.BF16, 2),
    "float32": ("F32", gguf.GGMLQuantizationType.F32, 4),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTensor:
    """One tensor of the safetensors file and where it comes from; `source` None stands for zeros."""

    name: str
    shape: tuple[int, ...]
    source: str | None
    num_rotated_heads: int = 0

    @property
    def num_elements(self) -> int:
        """How many numbers the tensor holds."""
        return int(np.prod(self.shape, dtype=np.int64))


def plan_weights(file: GgufFile, geometry: ModelGeometry) -> list[PlannedTensor]:
    """Maps every tensor of a LlamaForCausalLM to the file's tensors.

    Raises:
        CheckpointError: a tensor is missing, has another shape, is unknown, or is of a type that can't be dequantized.
    """
    planned = [*_outer_tensors(geometry)]
    for layer in range(geometry.num_layers):
        planned += _layer_tensors(geometry, layer, frozenset(file.tensors))
    known = {tensor.source for tensor in planned} | {"rope_freqs.weight"}
    if unknown := sorted(name for name in file.tensors if name not in known):
        shown = ", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
        raise CheckpointError(f"{file.path}: tensors that a LlamaForCausalLM doesn't have: {shown}")
    for tensor in planned:
        _check_tensor(file, tensor)
    return planned


def _outer_tensors(geometry: ModelGeometry) -> Iterator[PlannedTensor]:
    embedding = (geometry.vocab_size, geometry.hidden_size)
    yield PlannedTensor(name="model.embed_tokens.weight", shape=embedding, source="token_embd.weight")
    yield PlannedTensor(name="model.norm.weight", shape=(geometry.hidden_size,), source="output_norm.weight")
    if not geometry.tied:
        yield PlannedTensor(name="lm_head.weight", shape=embedding, source="output.weight")


def _layer_tensors(geometry: ModelGeometry, layer: int, present: frozenset[str]) -> Iterator[PlannedTensor]:
    hidden, intermediate = geometry.hidden_size, geometry.intermediate_size
    query, key = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    prefix, source = f"model.layers.{layer}", f"blk.{layer}"
    yield PlannedTensor(name=f"{prefix}.input_layernorm.weight", shape=(hidden,), source=f"{source}.attn_norm.weight")
    yield PlannedTensor(name=f"{prefix}.post_attention_layernorm.weight", shape=(hidden,), source=f"{source}.ffn_norm.weight")
    for name, stem, rows, columns, heads, bias in (
        ("self_attn.q_proj", "attn_q", query, hidden, geometry.num_heads, geometry.attention_bias),
        ("self_attn.k_proj", "attn_k", key, hidden, geometry.num_kv_heads, geometry.attention_bias),
        ("self_attn.v_proj", "attn_v", key, hidden, 0, geometry.attention_bias),
        ("self_attn.o_proj", "attn_output", hidden, query, 0, geometry.attention_bias),
        ("mlp.gate_proj", "ffn_gate", intermediate, hidden, 0, geometry.mlp_bias),
        ("mlp.up_proj", "ffn_up", intermediate, hidden, 0, geometry.mlp_bias),
        ("mlp.down_proj", "ffn_down", hidden, intermediate, 0, geometry.mlp_bias),
    ):
        yield PlannedTensor(
            name=f"{prefix}.{name}.weight", shape=(rows, columns), source=f"{source}.{stem}.weight", num_rotated_heads=heads
        )
        if bias:
            # A config has one switch for all biases of a block; those that the file lacks are zeros.
            found = f"{source}.{stem}.bias" if f"{source}.{stem}.bias" in present else None
            yield PlannedTensor(name=f"{prefix}.{name}.bias", shape=(rows,), source=found, num_rotated_heads=heads)


def _check_tensor(file: GgufFile, planned: PlannedTensor) -> None:
    if planned.source is None:
        return
    tensor = file.tensors.get(planned.source)
    if tensor is None:
        raise CheckpointError(f"{file.path}: the tensor {planned.source} is missing")
    shape = tuple(int(size) for size in reversed(tensor.shape))
    if shape != planned.shape:
        raise CheckpointError(f"{file.path}: the tensor {planned.source} has the shape {shape}, expected {planned.shape}")
    try:
        one_block = np.zeros((1, gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]), dtype=np.uint8)
        gguf.dequantize(one_block, tensor.tensor_type)
    except NotImplementedError:
        raise CheckpointError(
            f"{file.path}: the tensor {planned.source} is of the type {tensor.tensor_type.name}, which can't be dequantized"
        ) from None


def write_weights(path: Path, file: GgufFile, planned: list[PlannedTensor], dtype: str, advance: Callable[[int], None]) -> int:
    """Writes the safetensors file, a few rows at a time; returns its size in bytes.

    `advance` is called with every number of elements written.

    Raises:
        CheckpointError: a tensor holds NaN or infinite values.
        OSError: the disk is full, or other trouble with the file.
    """
    code, quantization, item_bytes = _OUTPUT_TYPES[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in planned:
        end = offset + tensor.num_elements * item_bytes
        header[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as out:
        out.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in planned:
            for rows in _rows(file, tensor):
                out.write(gguf.quantize(rows, quantization).tobytes())
                advance(rows.size)
        return out.tell()


def _rows(file: GgufFile, planned: PlannedTensor) -> Iterator[npt.NDArray[np.float32]]:
    """The tensor in fp32, in runs of rows in the order of the checkpoint."""
    num_rows = planned.shape[0]
    num_columns = planned.num_elements // num_rows
    step = max(1, _CHUNK_ELEMENTS // num_columns)
    order = rotated_row_order(num_rows, planned.num_rotated_heads)
    for start in range(0, num_rows, step):
        rows = order[start : start + step]
        if planned.source is None:
            yield np.zeros((rows.size, num_columns), dtype=np.float32)
            continue
        tensor = file.tensors[planned.source]
        # A vector is one run of quantization blocks, so its rows exist only once it is dequantized.
        if len(planned.shape) == 1:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)[rows]
        else:
            values = gguf.dequantize(tensor.data[rows], tensor.tensor_type)
        if not np.isfinite(values).all():
            raise CheckpointError(f"{file.path}: the tensor {planned.source} holds NaN or infinite values: the file is damaged")
        yield np.ascontiguousarray(values, dtype=np.float32)


def rotated_row_order(num_rows: int, num_heads: int) -> npt.NDArray[np.int64]:
    """Which row of a GGUF tensor is each row of the checkpoint's.

    GGUF keeps the rows of q and k so that RoPE rotates neighbours (0,1), (2,3), ...; a checkpoint so that it rotates the halves of
    a head (0,d/2), (1,d/2+1), ... Source: `LlamaModel.permute` in convert_hf_to_gguf.py of llama.cpp. 0 heads: the same order.
    """
    order = np.arange(num_rows, dtype=np.int64)
    if num_heads == 0:
        return order
    return order.reshape(num_heads, num_rows // num_heads // 2, 2).swapaxes(1, 2).reshape(-1)
