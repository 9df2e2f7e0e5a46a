"""Every op of the catalog on the device, against references that are computed in fp64 on the CPU."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from modelworker.ops.attention_spec import attention_variant
from modelworker.ops.catalog import CATALOG
from modelworker.ops.kernels.geometry import AttentionGeometry, attention_tiles
from modelworker.ops.kernels.paged_attention import architecture, launch_attention_forms
from modelworker.ops.op_spec import RETURNED, TOKEN_COUNTS, Implementation, OpSpec, SampleShape, returned_at
from modelworker.ops.triton_library import load_triton

pytestmark = pytest.mark.cuda
Arguments = Mapping[str, Any]
# As in conftest.py: kernels of the GPU need one.
ON_CUDA = os.environ.get("MODELWORKER_TEST_DEVICE", "cuda") == "cuda" and torch.cuda.is_available()


def op_of(spec: OpSpec) -> Any:
    return getattr(torch.ops.modelworker, spec.name).default


def cases() -> Iterator[Any]:
    for spec in CATALOG.values():
        registered = Implementation(name="registered", run=op_of(spec))
        for implementation in (*spec.implementations(triton=load_triton() if ON_CUDA else None), registered):
            for dtype in spec.tolerances:
                name = f"{spec.name}-{implementation.name}-{str(dtype).removeprefix('torch.')}"
                yield pytest.param(spec, implementation.run, dtype, id=name)


class Moved:
    """Arguments on a device: what shares memory there is what shared memory before, at the same places."""

    def __init__(self, arguments: Arguments, device: torch.device) -> None:
        self._device = device
        self._memories: dict[int, Tensor] = {}
        self.arguments = {name: self._move(value) for name, value in arguments.items()}
        self.before = {address: memory.cpu() for address, memory in self._memories.items()}

    def _move(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.numel() == 0:
            return value.to(self._device)
        storage = value.untyped_storage()
        if storage.data_ptr() not in self._memories:
            self._memories[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8).set_(storage).to(self._device)
        memory = self._memories[storage.data_ptr()].view(value.dtype)
        return memory.as_strided(value.shape, value.stride(), value.storage_offset())

    def changed(self) -> dict[int, Tensor]:
        """Which bytes are others than before, by the address that they had on the host."""
        return {address: self.before[address] != memory.cpu() for address, memory in self._memories.items()}


def mutated(spec: OpSpec) -> set[str]:
    infos = {argument.name: argument.alias_info for argument in op_of(spec)._schema.arguments}
    return {name for name, info in infos.items() if info is not None and info.is_write}


def may_change(host: Arguments, expected: Mapping[str, Tensor], names: set[str]) -> dict[int, Tensor]:
    """Which bytes the reference changes, by address."""
    masks: dict[int, Tensor] = {}
    for name in names:
        argument = host[name]
        if argument.numel() == 0:
            continue
        storage = argument.untyped_storage()
        elements = torch.zeros(storage.nbytes() // argument.itemsize, dtype=torch.bool)
        before, after = argument.double(), expected[name]
        changes = (before != after) & ~(before.isnan() & after.isnan())
        elements.as_strided(argument.shape, argument.stride(), argument.storage_offset()).logical_or_(changes)
        mask = masks.setdefault(storage.data_ptr(), torch.zeros(storage.nbytes(), dtype=torch.bool))
        mask.logical_or_(elements.repeat_interleave(argument.itemsize))
    return masks


def results(result: Any) -> dict[str, Tensor]:
    if isinstance(result, Tensor):
        return {RETURNED: result}
    return {returned_at(index): tensor for index, tensor in enumerate(result or ())}


def check(spec: OpSpec, run: Callable[..., Any], shape: SampleShape, device: torch.device) -> None:
    names = [argument.name for argument in op_of(spec)._schema.arguments]
    host = dict(zip(names, spec.sample(shape), strict=True))
    expected = spec.reference(*host.values())
    allowed = may_change(host, expected, mutated(spec))
    moved = Moved(host, device)
    found = results(run(*moved.arguments.values()))
    assert set(found) == {name for name in expected if name.startswith(RETURNED)}
    tolerance = spec.tolerances[shape.dtype]
    for name, wanted in expected.items():
        actual = {**moved.arguments, **found}[name]
        assert actual.device.type == device.type
        torch.testing.assert_close(
            *(actual.cpu().double(), wanted),
            rtol=tolerance.rtol,
            atol=tolerance.atol,
            equal_nan=True,
            msg=lambda text, name=name: f"{shape}, {name}: {text}",
        )
    for address, changed in moved.changed().items():
        assert not (changed & ~allowed.get(address, torch.zeros_like(changed))).any(), f"{shape}: something else was written"


@pytest.mark.parametrize(("spec", "run", "dtype"), list(cases()))
def test_an_op_agrees_with_its_reference_on_the_device_and_writes_nothing_else(
    spec: OpSpec, run: Callable[..., Any], dtype: torch.dtype, device: torch.device
) -> None:
    # What is registered is an implementation behind torch's dispatcher: a few samples show that it is reached.
    counts = (0, 3) if run is op_of(spec) else TOKEN_COUNTS
    shapes = [shape for shape in spec.shapes() if shape.dtype == dtype and shape.num_tokens in counts]
    assert shapes
    with torch.inference_mode():
        for shape in shapes:
            check(spec, run, shape, device)


def test_every_triton_form_is_held_against_its_reference() -> None:
    names = {parameter.id.split("-")[0] for parameter in cases() if "-triton-" in parameter.id}
    assert names == (set(load_triton().names) if ON_CUDA else set())


# Heads, KV heads and head_dim of Llama-3.1-8B, Llama-3.2-1B, SmolLM2-135M and Qwen3-0.6B; blocks as the worker has them.
HEADS = ((32, 8, 128), (32, 8, 64), (9, 3, 64), (16, 8, 128))
ATTENTION = CATALOG["paged_attention"]
# What the worker runs on this device.
IN_USE = ATTENTION.implementations(triton=load_triton() if ON_CUDA else None)[-1].run


def attention_shape(heads: tuple[int, int, int], rows: Any, num_tokens: int, **layer: int) -> SampleShape:
    num_heads, num_kv_heads, head_dim = heads
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": 32}
    variant = attention_variant(rows, **sizes, **layer)  # type: ignore[arg-type]
    return SampleShape(num_tokens=num_tokens, dtype=torch.bfloat16, padding=5, variant=variant)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(
    ("rows", "num_tokens", "layer"),
    [
        *(("decode", 3, {"context_len": context_len}) for context_len in (63, 64, 65, 2047)),
        ("decode", 2, {"context_len": 9000}),
        ("decode", 3, {"context_len": 2047, "window": 1024}),
        ("prefill", 300, {}),
        ("prefill", 30, {"context_len": 1500, "window": 1024}),
        ("mixed", 230, {"context_len": 64}),
    ],
)
def test_attention_of_models_agrees_with_its_reference(
    heads: tuple[int, int, int], rows: str, num_tokens: int, layer: dict[str, int], device: torch.device
) -> None:
    with torch.inference_mode():
        check(ATTENTION, IN_USE, attention_shape(heads, rows, num_tokens, **layer), device)


@pytest.mark.skipif(not (ON_CUDA or triton.knobs.runtime.interpret), reason="Triton kernels need a GPU, or their interpreter")
@pytest.mark.parametrize("heads", [HEADS[0], HEADS[2]], ids=str)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_every_tile_of_attention_agrees_with_the_reference(
    heads: tuple[int, int, int], num_splits: int, device: torch.device
) -> None:
    """Also where the shapes would have chosen another."""
    num_heads, num_kv_heads, head_dim = heads
    group = num_heads // num_kv_heads
    tiles = attention_tiles(architecture(), group=group, head_dim=head_dim, dtype=torch.bfloat16)
    assert len(tiles) == 3
    for tile in tiles:

        def run(query: Tensor, *others: Any, tile: Any = tile) -> None:
            *tensors, _, scale, window, soft_cap = others
            form = AttentionGeometry.of_all(
                tile, group=group, num_tokens=query.shape[0], num_sequences=tensors[4].shape[0], num_splits=num_splits
            )
            launch_attention_forms(query, *tensors, scale, window, soft_cap, (form,))

        with torch.inference_mode():
            check(ATTENTION, run, attention_shape(heads, "mixed", 102, context_len=150), device)
