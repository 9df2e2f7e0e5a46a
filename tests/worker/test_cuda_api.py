"""What the code calls of `torch.cuda` exists and takes the arguments, in the oldest torch that is supported and in this one.

A machine without a GPU never runs those calls; here they are found in the source and bound to signatures.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.cuda.memory

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("compiler", "graphs", "ops", "worker", "tests/gpu", "tests/support")

# As in torch 2.11; parameters that came later are missing.
FUNCTIONS = {
    "_sleep": "cycles",
    "CUDAGraph": "keep_graph=False",
    "Event": "enable_timing=False, blocking=False, interprocess=False, external=False",
    "Stream": "device=None, priority=0, **kwargs",
    "current_stream": "device=None",
    "empty_cache": "",
    "get_device_capability": "device=None",
    "get_device_name": "device=None",
    "get_device_properties": "device=None",
    "get_sync_debug_mode": "",
    "graph": "cuda_graph, pool=None, stream=None, capture_error_mode='global'",
    "graph_pool_handle": "",
    "is_available": "",
    "mem_get_info": "device=None",
    "memory_reserved": "device=None",
    "memory_snapshot": "mempool_id=None",
    "set_sync_debug_mode": "debug_mode",
    "stream": "stream",
    "synchronize": "device=None",
}
METHODS = {
    "CUDAGraph.capture_begin": "self, pool=None, capture_error_mode='global'",
    "CUDAGraph.capture_end": "self",
    "CUDAGraph.replay": "self",
    "CUDAGraph.reset": "self",
    "Event.elapsed_time": "self, end_event",
    "Event.record": "self, stream=None",
    "Event.synchronize": "self",
    "Stream.wait_stream": "self, stream",
}
# Names that are a method of nothing else in these folders.
TELLING_METHODS = {"capture_begin": "CUDAGraph", "capture_end": "CUDAGraph", "elapsed_time": "Event", "wait_stream": "Stream"}


class Call(NamedTuple):
    """A call in the source: what is called, and with what arguments."""

    name: str
    num_positional: int
    keywords: tuple[str, ...]
    place: str


def calls() -> Iterator[Call]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and (name := _name(node.func)):
                    keywords = tuple(keyword.arg or "" for keyword in node.keywords)
                    yield Call(name, len(node.args), keywords, f"{path.relative_to(ROOT)}:{node.lineno}")


def _name(function: ast.Attribute) -> str:
    owner = ast.unparse(function.value)
    # The backend of graphs is given the module.
    if owner in ("torch.cuda", "self._cuda", "cuda"):
        return function.attr
    kind = TELLING_METHODS.get(function.attr)
    return f"{kind}.{function.attr}" if kind else ""


CALLS = sorted({call[:3]: call for call in calls()}.values())


def signature_of(parameters: str) -> inspect.Signature:
    namespace: dict[str, Any] = {}
    exec(f"def function({parameters}): ...", namespace)
    return inspect.signature(namespace["function"])


def binds(signature: inspect.Signature, call: Call) -> None:
    own = 1 if "." in call.name else 0
    signature.bind(*[None] * (call.num_positional + own), **dict.fromkeys(call.keywords))


def found_in_torch(name: str) -> Any:
    target: Any = torch.cuda
    for part in name.split("."):
        target = getattr(target, part)
    return target


def test_the_calls_are_those_that_the_table_knows() -> None:
    assert {call.name for call in CALLS} == {*FUNCTIONS, *(f"{kind}.{name}" for name, kind in TELLING_METHODS.items())}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.name}-{call.num_positional}-{'-'.join(call.keywords)}")
def test_a_call_fits_the_oldest_torch_and_this_one(call: Call) -> None:
    binds(signature_of((FUNCTIONS | METHODS)[call.name]), call)
    binds(inspect.signature(found_in_torch(call.name)), call)


@pytest.mark.parametrize("name", [*FUNCTIONS, *METHODS])
def test_this_torch_has_every_parameter_of_the_oldest_one(name: str) -> None:
    now = inspect.signature(found_in_torch(name)).parameters
    for parameter in signature_of((FUNCTIONS | METHODS)[name]).parameters.values():
        assert parameter.name in now
        has_default = parameter.default is not inspect.Parameter.empty
        assert not has_default or now[parameter.name].default is not inspect.Parameter.empty


def test_a_call_with_a_parameter_that_there_is_not_is_found() -> None:
    with pytest.raises(TypeError):
        binds(signature_of(METHODS["CUDAGraph.capture_begin"]), Call("CUDAGraph.capture_begin", 0, ("pool", "mode"), ""))
    with pytest.raises(TypeError):
        binds(inspect.signature(torch.cuda.empty_cache), Call("empty_cache", 1, (), ""))


def test_errors_of_the_device_are_of_classes_that_the_code_catches() -> None:
    """A failed capture raises the first, which the backend takes for a RuntimeError; lack of memory is a class of its own."""
    assert issubclass(torch.AcceleratorError, RuntimeError)
    assert issubclass(torch.OutOfMemoryError, RuntimeError)


def test_products_of_bf16_take_the_dtype_of_their_result() -> None:
    """`linear_float32` on CUDA: mm(input, mat2, out_dtype)."""
    schema = torch.ops.aten.mm.dtype._schema
    assert [argument.name for argument in schema.arguments] == ["self", "mat2", "out_dtype"]
