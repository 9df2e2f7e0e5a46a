"""Code that Inductor generated for a piece, taken out of Inductor's hands: kept as text and bytes, run without importing Inductor.

Inductor's generated module imports much of Inductor, looks its C++ kernels up in a cache of its own, and tests the CPU's vector
instructions in a child process before it does. A worker that starts on compiled code needs none of that: what is kept is the
generated function `call` with what it uses, and the shared objects that were built for it.
"""

import ast
import importlib.machinery
import importlib.util
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelworker.compiler.environment import environment

_ENTRY = "call"
_COMPILER = "async_compile"
_EXTERN_KERNELS = "extern_kernels"
_EXTENSION = "kernel"
# Where an extension looks for the function that it gets at a tensor's data with.
_DATA_POINTER = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"


@dataclass(frozen=True, slots=True)
class GeneratedCode:
    """The code of a piece.

    Attributes:
        source: of a Python module with a function `call` of a list of tensors.
        kernels: by the names under which the module uses them, shared objects; each is a Python extension with a function `kernel`.
    """

    source: str
    kernels: Mapping[str, bytes]


def extract_code(source: str, namespace: Mapping[str, Any]) -> GeneratedCode:
    """Takes what is needed to run out of a module that Inductor generated and loaded.

    Args:
        source: of the module.
        namespace: of the loaded module.
    """
    kernels: dict[str, bytes] = {}
    kept: list[ast.stmt] = []
    for statement in ast.parse(source).body:
        name = _cpp_kernel_of(statement)
        if name is None:
            kept.append(statement)
        else:
            kernels[name] = Path(namespace[name].__self__.__file__).read_bytes()
    module = _PlainTorch(namespace.get(_EXTERN_KERNELS)).visit(ast.Module(kept, []))
    module.body = _needed(module.body)
    return GeneratedCode(ast.unparse(ast.fix_missing_locations(module)), kernels)


def load_code(code: GeneratedCode) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Loads a piece's code and returns its function `call`.

    Raises:
        ImportError: a kernel is no shared object for this machine.
    """
    namespace: dict[str, Any] = {name: _load_kernel(name, library) for name, library in code.kernels.items()}
    exec(compile(code.source, "<generated code of a piece>", "exec"), namespace)
    return namespace[_ENTRY]  # type: ignore[no-any-return]


def data_pointer_told() -> AbstractContextManager[None]:
    """Tells extensions that are loaded meanwhile an address in this process, in the one place where they look for it."""
    address: int = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    return environment(**{_DATA_POINTER: str(address)})


def _load_kernel(name: str, library: bytes) -> Callable[..., Any]:
    """Loads an extension from memory, so that what runs is what was verified, and returns its function."""
    # The descriptor stays open: the loader knows libraries by their paths, so that of a loaded one must never name another.
    descriptor = os.memfd_create(name)
    with os.fdopen(descriptor, "wb", closefd=False) as file:
        file.write(library)
    loader = importlib.machinery.ExtensionFileLoader(_EXTENSION, f"/proc/self/fd/{descriptor}")
    with data_pointer_told():
        module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(_EXTENSION, loader, origin=loader.path))
        loader.exec_module(module)
    return module.kernel  # type: ignore[no-any-return]


def _cpp_kernel_of(statement: ast.stmt) -> str | None:
    """Returns NAME of `NAME = async_compile.cpp_pybinding(...)`."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=name)], value=ast.Call(func=ast.Attribute(value=ast.Name(id=compiler), attr=attribute))
        ):
            return name if (compiler, attribute) == (_COMPILER, "cpp_pybinding") else None
    return None


class _PlainTorch(ast.NodeTransformer):
    """Names torch's own functions where Inductor has them under a name of its own."""

    def __init__(self, extern_kernels: Any) -> None:
        self._extern_kernels = extern_kernels

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        match node.value:
            case ast.Name(id=name) if name == _EXTERN_KERNELS and hasattr(torch, node.attr):
                if getattr(torch, node.attr) is getattr(self._extern_kernels, node.attr, None):
                    node.value = ast.Name("torch", ast.Load())
        return node


def _needed(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Returns the statements on which `call` depends."""
    compiles = any(_compiles_something(statement) for statement in statements)
    needed: list[ast.stmt] = []
    names = {_ENTRY}
    for statement in reversed(statements):
        bound = _names_bound(statement)
        mentions = _names_mentioned(statement)
        if names & bound or (compiles and _COMPILER in mentions and not isinstance(statement, ast.FunctionDef)):
            names |= mentions
            needed.append(_with_names(statement, names))
    return needed[::-1]


def _compiles_something(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name == _COMPILER
    return False


def _names_bound(statement: ast.stmt) -> set[str]:
    match statement:
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
    return set()


def _names_mentioned(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _with_names(statement: ast.stmt, names: set[str]) -> ast.stmt:
    """Returns an import of only those names."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        statement.names = [alias for alias in statement.names if (alias.asname or alias.name).partition(".")[0] in names]
    return statement
