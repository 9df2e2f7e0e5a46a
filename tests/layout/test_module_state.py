"""No module keeps state of its own: what changes lives in objects that are made at the start and passed."""

import ast
import re
from collections.abc import Iterator

import pytest

Sources = dict[str, ast.Module]

# Registries that have to be reachable from a decorator, and the op libraries, which live as long as the process.
NAMED_EXCEPTIONS = {
    "modelworker.ops.library.LIBRARY",
    "modelworker.ops.library.TRITON_LIBRARY",
    "modelworker.ops.registry.OPS",
    "modelworker.ops.registry.REPLACEMENTS",
}

_CONSTANT = re.compile(r"_{0,2}[A-Z][A-Z0-9_]*")
_SPECIAL = {"__all__"}
_STATEFUL_CALLS = {
    *(
        "Barrier",
        "BoundedSemaphore",
        "Condition",
        "ContextVar",
        "Counter",
        "Counters",
        "Event",
        "Library",
        "Lock",
        "Queue",
        "RLock",
        "Registry",
    ),
    *("Random", "Semaphore", "SimpleQueue", "ThreadPoolExecutor", "WeakKeyDictionary", "WeakSet", "WeakValueDictionary"),
    *("bytearray", "count", "cycle", "defaultdict", "deque", "iter", "local"),
}
_CACHES = {"cache", "lru_cache"}
_CONTAINER_CALLS = {"dict", "list", "set", "OrderedDict"}
_CONTAINERS = ast.Dict | ast.DictComp | ast.List | ast.ListComp | ast.Set | ast.SetComp
_MUTATORS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove", "reverse"),
    *("setdefault", "sort", "update"),
}


def _called(node: ast.AST | None) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _top_level(tree: ast.Module) -> Iterator[tuple[str, ast.expr, int]]:
    """Names bound at the top of a module, inside its `if` and `try` too."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        statement = todo.pop(0)
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            todo += [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.stmt | ast.ExceptHandler)]
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
            if isinstance(target, ast.Name):
                yield target.id, statement.value, statement.lineno


def _mutations(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The names on which something is stored, deleted or called that changes a container."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from ((name, node.lineno) for name in node.names)
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, ast.Store | ast.Del)
            and isinstance(node.value, ast.Name | ast.Attribute)
        ):
            yield _last_name(node.value), node.lineno
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
            yield _last_name(node.func.value), node.lineno
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name | ast.Attribute):
            yield _last_name(node.target), node.lineno


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def module_state(sources: Sources) -> list[str]:
    """Finds what could change at run time, and constants that are changed somewhere."""
    constants, found = {}, []
    for module, tree in sources.items():
        for name, value, line in _top_level(tree):
            where = f"{module}:{line} {name}"
            if name in _SPECIAL or f"{module}.{name}" in NAMED_EXCEPTIONS:
                continue
            if _called(value) in _STATEFUL_CALLS:
                found.append(f"{where} is a {_called(value)}")
            elif isinstance(value, _CONTAINERS) or _called(value) in _CONTAINER_CALLS:
                if _CONSTANT.fullmatch(name):
                    constants[name] = where
                else:
                    found.append(f"{where} is a container that is not named as a constant")
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                found.append(f"{module}:{node.lineno} global {', '.join(node.names)}")
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                caches = {_called(item) or _last_name(item) for item in node.decorator_list} & _CACHES
                found += [f"{module}:{node.lineno} {node.name} keeps a {cache} for the life of the process" for cache in caches]
    for module, tree in sources.items():
        found += [f"{module}:{line} changes {constants[name]}" for name, line in _mutations(tree) if name in constants]
    return found


def test_no_module_keeps_mutable_state(sources: Sources) -> None:
    assert module_state(sources) == []


@pytest.mark.parametrize(
    "text",
    [
        "cache = {}",
        "cache: dict[str, int] = dict()",
        "if True:\n  seen = set()",
        "try:\n  import torch\nexcept ImportError:\n  missing = []",
        "import threading\nLOCK = threading.Lock()",
        "from modelworker.ops.registry import Registry\nMODELS = Registry('the model')",
        "from itertools import count\nIDS = count()",
        "from contextvars import ContextVar\nSTEP = ContextVar('step')",
        "from collections import defaultdict\nBY_NAME = defaultdict(list)",
        "import functools\n@functools.lru_cache(maxsize=1)\ndef f(): ...",
        "from functools import cache\n@cache\ndef f(): ...",
        "epoch = 0\ndef reset():\n  global epoch\n  epoch = 1",
        "TABLE = {}\ndef register(name):\n  TABLE[name] = 1",
        "TABLE = []\ndef register(name):\n  TABLE.append(name)",
        "TABLE = {}\ndef forget(name):\n  del TABLE[name]",
        "TABLE = set()\ndef widen(names):\n  global TABLE\n  TABLE |= names",
    ],
)
def test_state_in_a_module_is_found(text: str) -> None:
    assert module_state({"modelworker.worker.planted": ast.parse(text)})


def test_a_constant_that_another_module_changes_is_found() -> None:
    planted = {
        "modelworker.worker.one": "UNITS = {'K': 1024}",
        "modelworker.worker.other": "from modelworker.worker import one\none.UNITS.update(M=1)",
    }
    assert module_state({name: ast.parse(text) for name, text in planted.items()})


@pytest.mark.parametrize(
    "text",
    [
        "UNITS = {'K': 1024}",
        "_NAMES = ['a']\ndef f():\n  names = list(_NAMES)\n  names.append('b')",
        "__all__ = ['f']",
        "import logging\n_logger = logging.getLogger(__name__)",
        "SIZES = (1, 2)",
        "def f():\n  seen = {}\n  seen['a'] = 1",
    ],
)
def test_constants_and_local_containers_are_allowed(text: str) -> None:
    assert module_state({"modelworker.worker.planted": ast.parse(text)}) == []
