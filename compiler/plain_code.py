"""A piece as code that calls its ops one by one, as text: whoever records ops sees them, and nothing has to be compiled."""

import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import fx

from modelworker.compiler.errors import CompileError
from modelworker.compiler.generated_code import GeneratedCode

_CALL = """

def call(arguments):
    return forward(None, *arguments)
"""


def plain_code(module: fx.GraphModule) -> GeneratedCode:
    """Writes a piece's graph down as a Python module with a function `call` of a list of tensors.

    Raises:
        CompileError: the graph holds an object that no import statement names.
    """
    code = module.graph.python_code("self")
    names = set(re.findall(r"\b\w+\b", code.src))
    imports = [_import(name, value) for name, value in _used(code.globals, names).items()]
    return GeneratedCode("\n".join(sorted(imports)) + "\n" + code.src + _CALL, {})


def _used(values: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def _import(name: str, value: Any) -> str:
    """Returns a statement that binds a name to a value."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, float):
        return f"from math import {name}"
    if value is type(None):
        return f"{name} = type(None)"
    module, qualified = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module is None or not qualified.isidentifier():
        raise CompileError(f"a piece holds {value!r}, which can't be written down")
    return f"from {module} import {qualified} as {name}"
