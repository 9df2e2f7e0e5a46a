"""Compiled models on disk: what is used again, what is not, and what is said of it."""

import dataclasses
import hashlib
import io
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from modelworker.compiler.artifact import Artifact
from modelworker.compiler.cache import ArtifactCache, Miss, name_of
from modelworker.compiler.compile import compile_model
from modelworker.compiler.counters import CompileCounters
from modelworker.compiler.factors import collect_factors
from modelworker.compiler.generated_code import GeneratedCode
from modelworker.compiler.graph_pass import GraphPass
from modelworker.compiler.model_source import ModelSource
from modelworker.compiler.program import PieceStage, Program, StepInput
from modelworker.compiler.settings import CompileSettings
from modelworker.ops.cpu.threads import torch_threads
from modelworker_testing.small_models import mixing_ops, small_source

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

WEIGHT = torch.rand(8, 8)


def product(x: Tensor) -> Tensor:
    """Compiles in half a second: a matrix product, for which no kernel is generated."""
    return x @ WEIGHT


SOURCE = small_source(product, bound={"weight": WEIGHT})


def start(directory: Path, source: ModelSource = SOURCE, settings: CompileSettings | None = None) -> dict[str, int]:
    """Compiles or loads the product as a worker that starts does, checks it, and returns what was counted."""
    counters = CompileCounters()
    before = counters.process_compilations()
    model = compile_model(source, settings or CompileSettings(), counters=counters, cache=ArtifactCache(directory))
    x = torch.rand(3, 8)
    assert torch.equal(model(x), x @ WEIGHT)  # type: ignore[arg-type]
    after = counters.process_compilations()
    counted = {name: value for name, value in counters.snapshot().items() if not name.startswith(("process_", "pass_"))}
    return counted | {"dynamo": after.dynamo - before.dynamo, "inductor": after.inductor - before.inductor}


COLD = {"compiled": 1, "pieces": 1, "cache_misses:absent": 1, "dynamo": 1, "inductor": 1}
WARM = {"cache_hits": 1, "pieces": 1, "dynamo": 0, "inductor": 0}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the product; tests have it moved to another place."""
    directory = tmp_path_factory.mktemp("caches") / "filled"
    assert start(directory) == COLD
    return directory


@pytest.fixture
def cache(filled: Path, tmp_path: Path) -> Iterator[Path]:
    """It in another place; where it was is nothing, so that nothing can be found there by an absolute path."""
    original = filled.rename(filled.with_name("original"))
    yield Path(shutil.copytree(original, tmp_path / "moved"))
    original.rename(filled)


def artifact_in(directory: Path) -> Path:
    (path,) = directory.glob("*.artifact")
    return path


def test_a_second_start_compiles_and_traces_nothing(filled: Path) -> None:
    assert start(filled) == WARM


def test_a_cache_may_be_moved(filled: Path, cache: Path) -> None:
    assert start(cache) == WARM
    assert not filled.exists()


def test_a_start_on_compiled_code_loads_neither_dynamo_nor_inductor(cache: Path) -> None:
    program = f"""
import sys
from pathlib import Path
import torch
from modelworker.compiler.cache import ArtifactCache
from modelworker.compiler.generated_code import load_code
from modelworker.compiler.compile import compile_model
from modelworker.compiler.model import CompiledModel
import json
(path,) = Path({str(cache)!r}).glob("*.json")
artifact = ArtifactCache(path.parent).load(json.loads(path.read_text()))
model = CompiledModel(artifact.program, [load_code(code) for code in artifact.codes], {{"weight": torch.eye(8)}})
print(model(torch.ones(2, 8)).sum().item(), sorted({{"torch._dynamo", "torch._inductor", "sympy", "triton"}} & set(sys.modules)))
"""
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(maxsplit=1) == ["16.0", "[]\n"]


def test_only_its_owner_can_read_or_write_a_cache_whatever_the_umask(filled: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        start(tmp_path / "cache")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cache", *(tmp_path / "cache").iterdir())}
    assert set(modes.values()) == {0o700, 0o600}
    assert all(mode == (0o700 if name == "cache" else 0o600) for name, mode in modes.items())


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _symbolic(path: Path) -> None:
    path.rename(path.with_suffix(".elsewhere"))
    path.symlink_to(path.with_suffix(".elsewhere"))


def _rewritten(**changes: bytes | None) -> Callable[[Path], None]:
    """Changes parts of an artifact, or leaves them out, and makes its digest right again."""

    def rewrite(path: Path) -> None:
        data = path.read_bytes()
        start = data.index(b"\n") + 1
        with zipfile.ZipFile(io.BytesIO(data[start + 64 :])) as archive:
            parts: dict[str, bytes | None] = {name: archive.read(name) for name in archive.namelist()}
        payload = io.BytesIO()
        with zipfile.ZipFile(payload, "w") as archive:
            for name, content in (parts | {_PARTS.get(name, name): content for name, content in changes.items()}).items():
                if content is not None:
                    archive.writestr(name, content)
        _with_digest(path, payload.getvalue())

    return rewrite


def _with_digest(path: Path, payload: bytes) -> None:
    path.write_bytes(MAGIC + hashlib.sha256(payload).hexdigest().encode() + payload)


MAGIC = b"modelworker compiled model 1\n"
_PARTS = {
    "program": "program.json",
    "factors": "factors.json",
    "code": "pieces/0/code.py",
    "plain": "pieces/0/plain.py",
    "kernel": "pieces/0/kernels/kernel",
}
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit flipped": (_flip, "damaged"),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "damaged"),
    "emptied": (lambda path: path.write_bytes(b""), "damaged"),
    "replaced": (lambda path: path.write_bytes(b"\x80\x04" + b"x" * 1000), "damaged"),
    "replaced, digest and all": (lambda path: _with_digest(path, b"no archive"), "damaged"),
    "without its program": (_rewritten(program=None), "damaged"),
    "without its factors": (_rewritten(factors=None), "damaged"),
    "with a program that is no JSON": (_rewritten(program=b"{"), "damaged"),
    "with a program of other JSON": (_rewritten(program=b"[]"), "damaged"),
    "with a program that is no text": (_rewritten(program=b"\xff"), "damaged"),
    "without its code": (_rewritten(code=None), "damaged"),
    "with code that is no Python": (_rewritten(code=b"def"), "damaged"),
    "with code of nothing to call": (_rewritten(code=b"x = 1"), "damaged"),
    "with code that fails": (_rewritten(code=b"import torch\ntorch.no_such_function"), "damaged"),
    "with code that needs what the system lacks": (_rewritten(code=b"raise OSError(24, 'too many open files')"), "damaged"),
    "with plain code that is no Python": (_rewritten(plain=b"def"), "damaged"),
    "with a kernel that is no library": (_rewritten(kernel=b"text"), "damaged"),
    "removed": (lambda path: path.unlink(), "absent"),
    "made writable for the group": (lambda path: path.chmod(0o660), "untrusted"),
    "made writable for all": (lambda path: path.chmod(0o602), "untrusted"),
    "turned into a link": (_symbolic, "unreadable"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_wrong_with_an_artifact_is_counted_and_said_and_mended(
    damage: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spoil, reason = DAMAGES[damage]
    spoil(artifact_in(cache))
    with caplog.at_level(logging.INFO, "modelworker"):
        counted = start(cache)
    assert counted == {f"cache_misses:{reason}": 1, "compiled": 1, "pieces": 1, "dynamo": 1, "inductor": 1}
    (record,) = [record for record in caplog.records if record.message.startswith("compiling: ")]
    assert str(cache) in record.message
    assert record.levelno == (logging.INFO if reason == "absent" else logging.WARNING)
    assert start(cache) == WARM


def test_a_directory_that_others_may_write_to_is_neither_read_nor_written(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.chmod(0o770)
    before = artifact_in(cache).stat().st_mtime_ns
    counted = start(cache)
    assert counted["cache_misses:untrusted"] == counted["cache_store_failures"] == counted["compiled"] == 1
    assert artifact_in(cache).stat().st_mtime_ns == before
    assert "chmod go-w" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("whole", [True, False], ids=["directory", "file"])
def test_what_belongs_to_somebody_else_is_not_used(whole: bool, cache: Path) -> None:
    os.chown(cache if whole else artifact_in(cache), 12345, 12345)
    assert start(cache)["cache_misses:untrusted"] == 1


def test_a_cache_that_cannot_be_written_costs_a_compilation_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    counted = start(tmp_path / "file" / "cache")
    assert counted["compiled"] == counted["cache_store_failures"] == 1
    assert "not kept" in caplog.text


ARTIFACT = Artifact(
    Program(("x",), (), 2, (PieceStage(0, (0,), (1,)),), (1,), True, ("digest",)),
    (GeneratedCode("def call(args):\n    return args", {"kernel": b"\x7fELF" + bytes(100_000)}),),
)


@pytest.mark.skipif(os.geteuid() != 0, reason="root can write everywhere, so this takes another user, which only root can become")
def test_a_read_only_cache_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    assert ArtifactCache(directory).store(ARTIFACT, {"a": 1}) is None
    for path in (*directory.iterdir(), directory):
        os.chown(path, 65534, 65534)
        path.chmod(0o500 if path.is_dir() else 0o400)
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    # What would be loaded later lies in folders that the other user may not be able to read.
    program = f"""
import encodings.cp437
import os
from pathlib import Path
from modelworker.compiler.cache import ArtifactCache
os.setgroups([]); os.setegid(65534); os.seteuid(65534)
cache = ArtifactCache(Path({str(directory)!r}))
found = cache.load({{"a": 1}})
print(type(found).__name__, cache.store(found, {{"b": 1}}))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.stderr == ""
    assert found.stdout == f"Artifact {directory}: can't be written to: Permission denied\n"


def test_workers_that_start_at_once_see_whole_artifacts_or_none(tmp_path: Path) -> None:
    found: list[Artifact | Miss] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        cache = ArtifactCache(tmp_path / "cache")
        barrier.wait()
        for _ in range(25):
            found.append(cache.load({"a": 1}))
            assert cache.store(ARTIFACT, {"a": 1}) is None

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 100
    assert all(one == ARTIFACT or (isinstance(one, Miss) and one.reason == "absent") for one in found)
    assert found[-1] == ARTIFACT
    assert {path.suffix for path in (tmp_path / "cache").iterdir()} == {".artifact", ".json"}


def test_what_is_old_is_removed_and_what_a_killed_worker_left_half_written(tmp_path: Path) -> None:
    cache = ArtifactCache(tmp_path / "cache")
    for name in "ab":
        assert cache.store(ARTIFACT, {name: 1}) is None
    old = {tmp_path / "cache" / f"{name_of({'a': 1})}.{kind}" for kind in ("artifact", "json")}
    abandoned = {tmp_path / "cache" / f".{path.name}.0123456789abcdef" for path in old}
    for path, age in [(path, 31 * 24 * 3600) for path in old] + [(path, 2 * 3600) for path in abandoned]:
        path.touch()
        os.utime(path, (time.time() - age,) * 2)
    being_written = tmp_path / "cache" / ".others.artifact.fedcba9876543210"
    being_written.touch()
    assert cache.store(ARTIFACT, {"c": 1}) is None
    kept = {f"{name_of({name: 1})}.{kind}" for name in "bc" for kind in ("artifact", "json")}
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {*kept, being_written.name}


def test_a_cache_holds_only_what_is_verified_before_it_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Inductor built its kernels is gone, and a second compilation looks for none that somebody may have left."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    source = small_source(lambda x: torch.sin(x) + 1)
    compile_model(source, CompileSettings(), counters=CompileCounters(), cache=ArtifactCache(tmp_path / "cache"))
    assert {path.suffix for path in (tmp_path / "cache").rglob("*")} == {".artifact", ".json"}
    assert not list((tmp_path / "temporary").rglob("*.so"))


def _key(source: ModelSource = SOURCE, settings: CompileSettings | None = None, passes: tuple[GraphPass, ...] = ()) -> str:
    return name_of(collect_factors(source, settings or CompileSettings(), passes))


def _changed(**fields: Any) -> ModelSource:
    return dataclasses.replace(SOURCE, **fields)


def test_the_same_model_has_the_same_key_and_readable_factors(filled: Path) -> None:
    assert _key() == _key(_changed(function=lambda x: x))
    assert artifact_in(filled).stem == _key()
    text = artifact_in(filled).with_suffix(".json").read_text()
    for word in (torch.__version__, '"threads"', '"num_tokens"', "small_models.py"):
        assert word in text


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": {"dtype": "bfloat16"}},
        {"identity": {"tensor parallel": "2"}},
        {"inputs": {"x": StepInput((4, 8), torch.float32)}},
        {"inputs": {"x": StepInput(("num_tokens", 8), torch.float64)}},
        {"inputs": {"y": StepInput(("num_tokens", 8), torch.float32)}},
        {"bound": {"weight": WEIGHT.double()}},
        {"bound": {"weight": torch.rand(8, 9)}},
        {"bound": {"weight": WEIGHT.t()}},
        {"bound": {"other": WEIGHT}},
        {"bound": {"weight": WEIGHT, "bias": WEIGHT}},
        {"splitting_ops": ()},
        {"sources": ()},
    ],
    ids=str,
)
def test_another_model_has_another_key(changes: dict[str, Any]) -> None:
    assert _key(_changed(**changes)) != _key()


def test_the_order_of_inputs_is_part_of_the_key_for_they_are_bound_by_position() -> None:
    x, y = (StepInput(("num_tokens", 8), torch.float32) for _ in range(2))
    assert _key(_changed(inputs={"x": x, "y": y})) != _key(_changed(inputs={"y": y, "x": x}))


def test_weights_that_are_one_tensor_are_another_model_than_weights_that_are_two() -> None:
    tied, untied = {"a": WEIGHT, "b": WEIGHT}, {"a": WEIGHT, "b": WEIGHT.clone()}
    assert _key(_changed(bound=tied)) != _key(_changed(bound=untied))


def test_weights_that_overlap_are_another_model_but_where_they_lie_is_no_matter() -> None:
    block = torch.rand(4, 8, 8)
    together = {"a": block[0], "b": block[1], "c": block[2]}
    apart = {name: tensor.clone() for name, tensor in together.items()}
    in_another_order = {"a": block[2], "b": block[0], "c": block[3]}
    assert _key(_changed(bound=together)) == _key(_changed(bound=apart)) == _key(_changed(bound=in_another_order))
    overlapping = {"a": block[0], "b": block.view(-1)[32:96].view(8, 8), "c": block[2]}
    assert _key(_changed(bound=overlapping)) != _key(_changed(bound=together))


def test_values_of_weights_are_no_part_of_the_key() -> None:
    assert _key(_changed(bound={"weight": torch.rand(8, 8)})) == _key()


@pytest.mark.parametrize(
    "settings",
    [
        CompileSettings(autotune=True),
        CompileSettings(partition="inductor"),
        CompileSettings(disabled_passes=("no_op_elimination",)),
        CompileSettings(inductor_options=(("epilogue_fusion", False),)),
    ],
    ids=str,
)
def test_another_setting_has_another_key(settings: CompileSettings) -> None:
    assert _key(settings=settings) != _key()


def test_another_pass_has_another_key() -> None:
    assert _key(passes=(GraphPass("nothing", lambda graph: 0),)) != _key()


def test_a_changed_source_has_another_key(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    keys = []
    for text in ("a = 1", "a = 2", "a = 1"):
        file.write_text(text)
        keys.append(_key(_changed(sources=(file,))))
    assert keys[0] == keys[2] != keys[1]


def test_an_op_with_another_schema_has_another_key() -> None:
    with mixing_ops():
        key = _key()
    library = torch.library.Library("modelworker_testing", "FRAGMENT")
    library.define("mix(Tensor x, Tensor out, float weight) -> ()")
    try:
        assert _key() != key
    finally:
        library._destroy()


def test_the_number_of_threads_and_what_steers_the_compilers_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {_key()}
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    keys.add(_key())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    assert _key() in keys
    with torch_threads(torch.get_num_threads() + 1):
        keys.add(_key())
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("owner", "name", "found"),
    [
        (torch, "__version__", "2.99.0"),
        (torch.version, "git_version", "another build of the same version"),
        (torch.backends.cpu, "get_cpu_capability", lambda: "AVX7"),
        (platform, "machine", lambda: "riscv64"),
        (metadata, "version", lambda _name: "9.9"),
        (sys, "implementation", SimpleNamespace(cache_tag="cpython-399")),
    ],
    ids=["torch", "git", "CPU capability", "machine", "triton", "python"],
)
def test_another_version_or_another_cpu_has_another_key(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, found: object
) -> None:
    key = _key()
    monkeypatch.setattr(owner, name, found)
    assert _key() != key
    monkeypatch.undo()
    assert _key() == key


VERSIONS = """
import sys
from pathlib import Path
import torch
from torch import Tensor
from modelworker.compiler.cache import ArtifactCache
from modelworker.compiler.compile import compile_model
from modelworker.compiler.counters import CompileCounters
from modelworker.compiler.settings import CompileSettings
from modelworker_testing.small_models import small_source
from modelworker.ops.library import register_op

LIBRARY = torch.library.Library("modelworker_testing", "FRAGMENT")

def doubled(x: Tensor, y: Tensor) -> Tensor:
    if sys.argv[1] == "writes":
        y.add_(1)
    return x * 2

register_op(doubled, fake=lambda x, y: torch.empty_like(x), mutates_args=("y",) if sys.argv[1] == "writes" else (), library=LIBRARY)

def step(x):
    y = x * 1
    before = y + 1
    torch.ops.modelworker_testing.doubled(x, y)
    return y * 3 + before

counters = CompileCounters()
model = compile_model(small_source(step), CompileSettings(), counters=counters, cache=ArtifactCache(Path(sys.argv[2])))
print(model(torch.zeros(1, 8))[0, 0].item(), counters.snapshot().get("cache_hits", 0))
"""


@pytest.mark.slow
def test_an_op_that_begins_to_write_to_its_argument_is_not_run_by_the_code_compiled_before(tmp_path: Path) -> None:
    def run(version: str) -> str:
        command = [sys.executable, "-c", VERSIONS, version, str(tmp_path / "cache")]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support")}
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()

    assert [run("reads"), run("reads"), run("writes"), run("writes")] == ["1.0 0", "1.0 1", "4.0 0", "4.0 1"]
