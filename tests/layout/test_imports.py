"""Who may import whom. Every rule is a function from the modules to the violations, and is shown a violation that it must find."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

Sources = dict[str, ast.Module]

FOLDERS = ("compiler", "graphs", "ops", "proto", "worker")

# The modules that speak gRPC or handle its messages.
EDGE = re.compile(
    r"modelworker\.worker\.(server|servicer|step_stream|wire(\.\w+)?|interceptor|statuses|call_log|health|reflection|client(\.\w+)?|payload|recording(\.\w+)?|cli|command_\w+)"
)
STRUCTLOG = {f"modelworker.worker.{name}" for name in ("cli", "server", "call_log", "telemetry")}
# `serve` answers liveness before torch is loaded: it loads start-up by name, on the engine thread.
# A warm start compiles nothing: it must not load Dynamo and Inductor, and generated extensions are loaded from memory.
IMPORTLIB = {
    "modelworker.worker.cli",
    "modelworker.worker.command_serve",
    "modelworker.compiler.compile",
    "modelworker.compiler.generated_code",
    # A CPU build of torch comes without Triton: its kernels are loaded where there is a GPU.
    "modelworker.ops.triton_library",
}
# What models share with the worker around them.
WORKER_MODULES_FOR_MODELS = {"modelworker.worker.errors", "modelworker.worker.progress"}
HOT = re.compile(
    r"modelworker\.(ops(\..*)?|graphs(\..*)?|worker\.(models\..*|engine|executor|step_queue|fencing|servicer|step_stream|wire(\.\w+)?|interceptor|batch|result"
    r"|buffers|stage|kv_cache|sampling|random_numbers|counters))"
)
# Loaded on a bare GPU machine, which has torch but neither gRPC nor structlog.
BARE = re.compile(r"modelworker\.(ops|compiler|graphs|worker\.models)(\..*)?|modelworker\.worker\.(engine|startup|executor)")
# A router in Python: what a user installs without the extra `worker`.
ROUTER = re.compile(r"modelworker\.worker\.(client(\.\w+)?|scheduler(\.\w+)?)")
SCHEDULER = re.compile(r"modelworker\.worker\.(scheduler(\.\w+)?)")


@dataclass(frozen=True)
class Import:
    """One import statement's target."""

    target: str
    line: int
    inside_function: bool


def _imports(module: str, tree: ast.Module, known: frozenset[str] = frozenset()) -> Iterator[Import]:
    def walk(node: ast.AST, inside: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(alias.name, child.lineno, inside)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    package = module.split(".")[: -child.level]
                    base = ".".join([*package, *([base] if base else [])])
                for alias in child.names:
                    whole = f"{base}.{alias.name}"
                    yield Import(whole if whole in known or base == "modelworker" else base, child.lineno, inside)
            yield from walk(child, inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    yield from walk(tree, False)


def _all_imports(sources: Sources) -> Iterator[tuple[str, Import]]:
    known = frozenset(sources) | {"modelworker.proto.model_worker_pb2", "modelworker.proto.model_worker_pb2_grpc"}
    for module, tree in sources.items():
        for found in _imports(module, tree, known):
            yield module, found


def _within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _reachable(sources: Sources, *, with_packages: bool = True) -> dict[str, set[str]]:
    """Everything that a module's import loads, itself included; with or without the packages around what it names."""
    edges: dict[str, set[str]] = {module: set() for module in sources}
    for module, found in _all_imports(sources):
        parts = found.target.split(".")
        edges[module] |= {".".join(parts[:length]) for length in range(1 if with_packages else len(parts), len(parts) + 1)}

    def closure(start: str) -> set[str]:
        seen, todo = {start}, [start]
        while todo:
            for target in edges.get(todo.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    todo.append(target)
        return seen

    return {module: closure(module) for module in sources}


def four_folders_import_none_of_each_other(sources: Sources) -> list[str]:
    free = tuple(f"modelworker.{folder}" for folder in ("compiler", "graphs", "ops", "proto"))
    return [
        f"{module}:{found.line} imports {found.target}"
        for module, found in _all_imports(sources)
        for own in free
        if _within(module, own) and _within(found.target, "modelworker") and not _within(found.target, own)
    ]


def models_import_ops_only(sources: Sources) -> list[str]:
    return [
        f"{module}:{found.line} imports {found.target}"
        for module, found in _all_imports(sources)
        if _within(module, "modelworker.worker.models")
        and _within(found.target, "modelworker")
        and not _within(found.target, "modelworker.ops", "modelworker.worker.models")
        and found.target not in WORKER_MODULES_FOR_MODELS
    ]


def grpc_and_messages_stay_at_the_edge(sources: Sources) -> list[str]:
    return [
        f"{module}:{found.line} imports {found.target}"
        for module, found in _all_imports(sources)
        if (_within(found.target, "grpc", "google", "modelworker.proto") or found.target.startswith("grpc_"))
        and not EDGE.fullmatch(module)
    ]


def structlog_stays_where_logs_are_set_up(sources: Sources) -> list[str]:
    return [
        f"{module}:{found.line} imports structlog"
        for module, found in _all_imports(sources)
        if _within(found.target, "structlog") and module not in STRUCTLOG
    ]


def no_module_of_ours_is_imported_inside_a_function(sources: Sources) -> list[str]:
    return [
        f"{module}:{found.line} imports {found.target} inside a function"
        for module, found in _all_imports(sources)
        if found.inside_function and _within(found.target, "modelworker")
    ]


def modules_are_loaded_by_name_only_by_the_command_line(sources: Sources) -> list[str]:
    loaders = {"import_module", "__import__", "exec_module", "spec_from_file_location", "run_module", "run_path"}
    return [
        f"{module}:{node.lineno} calls {name}"
        for module, tree in sources.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and (name := node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) in loaders
        and module not in IMPORTLIB
    ]


def no_folder_is_imported_by_its_bare_name(sources: Sources) -> list[str]:
    return [
        f"{module}:{found.line} imports {found.target}"
        for module, found in _all_imports(sources)
        if _within(found.target, *FOLDERS)
    ]


def compiler_and_graphs_meet_only_in_startup(sources: Sources) -> list[str]:
    both: dict[str, set[str]] = {}
    for module, found in _all_imports(sources):
        for folder in ("compiler", "graphs"):
            if _within(found.target, f"modelworker.{folder}"):
                both.setdefault(module, set()).add(folder)
    return [
        f"{module} imports both" for module, folders in both.items() if len(folders) == 2 and module != "modelworker.worker.startup"
    ]


def _loads(sources: Sources, modules: re.Pattern[str], *forbidden: str) -> list[str]:
    return [
        f"{module} loads {target}"
        for module, loaded in _reachable(sources).items()
        if modules.fullmatch(module)
        for target in sorted(loaded.intersection(forbidden))
    ]


def hot_modules_never_load_startup(sources: Sources) -> list[str]:
    return _loads(sources, HOT, "modelworker.worker.startup")


def what_runs_on_a_bare_gpu_machine_loads_no_grpc(sources: Sources) -> list[str]:
    return _loads(sources, BARE, "grpc", "google", "structlog", "modelworker.proto")


def the_client_loads_no_torch(sources: Sources) -> list[str]:
    return _loads(sources, ROUTER, "torch", "triton", "safetensors", "structlog")


def the_scheduler_stands_on_the_client_alone(sources: Sources) -> list[str]:
    return [
        f"{module}:{found.line} {found.target}"
        for module, tree in sources.items()
        if SCHEDULER.fullmatch(module)
        for found in _imports(module, tree, frozenset(sources))
        if found.target.startswith("modelworker.") and not ROUTER.fullmatch(found.target)
    ]


def triton_stays_in_its_kernels_which_nobody_imports(sources: Sources) -> list[str]:
    return [
        f"{module}:{found.line} imports {found.target}"
        for module, found in _all_imports(sources)
        if _within(found.target, "triton", "modelworker.ops.kernels") and not _within(module, "modelworker.ops.kernels")
    ]


def modules_do_not_import_each_other_in_circles(sources: Sources) -> list[str]:
    loaded = _reachable(sources, with_packages=False)
    return [f"{one} <-> {other}" for one in sources for other in loaded[one] if one < other and one in loaded.get(other, ())]


Rule = Callable[[Sources], list[str]]

RULES: list[tuple[Rule, dict[str, str]]] = [
    (the_scheduler_stands_on_the_client_alone, {"modelworker.worker.scheduler": "from modelworker.worker.batch import StepBatch"}),
    (the_client_loads_no_torch, {"modelworker.worker.client.step": "import torch"}),
    (the_client_loads_no_torch, {"modelworker.worker.scheduler": "import torch"}),
    (four_folders_import_none_of_each_other, {"modelworker.ops.norm": "from modelworker.worker import errors"}),
    (four_folders_import_none_of_each_other, {"modelworker.graphs.keys": "import modelworker.compiler.split"}),
    (four_folders_import_none_of_each_other, {"modelworker.ops.norm": "from .. import graphs"}),
    (models_import_ops_only, {"modelworker.worker.models.llama": "from modelworker.worker.settings import WorkerSettings"}),
    (models_import_ops_only, {"modelworker.worker.models.llama": "from modelworker.compiler import backend"}),
    (grpc_and_messages_stay_at_the_edge, {"modelworker.worker.engine": "import grpc.aio"}),
    (grpc_and_messages_stay_at_the_edge, {"modelworker.worker.engine": "from modelworker.proto import model_worker_pb2"}),
    (grpc_and_messages_stay_at_the_edge, {"modelworker.worker.executor": "def f():\n  from google.protobuf import message"}),
    (structlog_stays_where_logs_are_set_up, {"modelworker.worker.engine": "from structlog import get_logger"}),
    (
        no_module_of_ours_is_imported_inside_a_function,
        {"modelworker.worker.cli": "class A:\n  def f(self):\n    import modelworker.ops"},
    ),
    (
        modules_are_loaded_by_name_only_by_the_command_line,
        {"modelworker.worker.engine": "import importlib\nimportlib.import_module('modelworker.ops')"},
    ),
    (no_folder_is_imported_by_its_bare_name, {"modelworker.worker.engine": "from ops.norm import rms_norm"}),
    (no_folder_is_imported_by_its_bare_name, {"modelworker.worker.engine": "import proto"}),
    (compiler_and_graphs_meet_only_in_startup, {"modelworker.worker.engine": "from modelworker import compiler, graphs"}),
    (
        hot_modules_never_load_startup,
        {
            "modelworker.worker.engine": "from modelworker.worker import helper",
            "modelworker.worker.helper": "import modelworker.worker.startup",
        },
    ),
    (
        what_runs_on_a_bare_gpu_machine_loads_no_grpc,
        {"modelworker.worker.engine": "from modelworker.worker import helper", "modelworker.worker.helper": "import grpc"},
    ),
    (
        the_client_loads_no_torch,
        {"modelworker.worker.client": "from modelworker.worker import batch", "modelworker.worker.batch": "import torch.nn"},
    ),
    (triton_stays_in_its_kernels_which_nobody_imports, {"modelworker.ops.norm": "import triton.language as tl"}),
    (triton_stays_in_its_kernels_which_nobody_imports, {"modelworker.ops.norm": "from modelworker.ops.kernels import forms"}),
    (
        modules_do_not_import_each_other_in_circles,
        {
            "modelworker.ops.a": "import modelworker.ops.b",
            "modelworker.ops.b": "from modelworker.ops import c",
            "modelworker.ops.c": "from .a import x",
        },
    ),
]


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _ in RULES), ids=lambda rule: rule.__name__)
def test_the_repository_keeps_the_rule(rule: Rule, sources: Sources) -> None:
    assert rule(sources) == []


@pytest.mark.parametrize(("rule", "planted"), RULES, ids=lambda value: value.__name__ if callable(value) else next(iter(value)))
def test_the_rule_finds_a_planted_violation(rule: Rule, planted: dict[str, str]) -> None:
    assert rule({name: ast.parse(text) for name, text in planted.items()})


@pytest.mark.parametrize("module", ["modelworker.worker.client"])
def test_a_router_that_imports_the_client_loads_neither_torch_nor_structlog(module: str) -> None:
    program = f"import sys, {module}; print(sorted({{'torch', 'structlog', 'triton', 'safetensors'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip() == "[]"
