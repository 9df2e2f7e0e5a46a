"""What a worker does where it can't compile, or can't use what was compiled before: it serves, and says what it lacks."""

import concurrent.futures
import contextlib
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from modelworker.compiler import compile as compile_module
from modelworker.worker.client import Client
from modelworker.worker.counters import Counters
from modelworker.worker.engine import Engine
from modelworker.worker.result import GraphMode
from modelworker.worker.settings import CacheSettings, ExecutionSettings, OpsSettings, WorkerSettings
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.engines import engine_of, execute, tiny_settings
from modelworker_testing.kernels import CACHE_FOLDER
from modelworker_testing.worker_process import worker_process

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

PROMPTS = [[1, 2, 3, 4, 5], [6, 7, 8]]
TABLES = [[4, 9], [7]]
REAL_COMPILER = shutil.which("g++")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """What a worker computes that neither compiles nor captures."""
    with engine_of(model) as engine:
        return generate(engine)[0]


def generate(engine: Engine) -> tuple[list[list[int]], list[tuple[GraphMode, str]]]:
    """Decodes two prompts for four steps; returns the tokens of each step, and how each ran."""
    engine.reset_kv_cache()
    tokens, ways = [], []
    result = execute(
        engine, query_lens=[5, 3], context_lens=[0, 0], token_ids=[token for prompt in PROMPTS for token in prompt], tables=TABLES
    )
    for step in range(4):
        tokens.append(result.sampled_ids.tolist())
        ways.append((result.graph.mode, result.graph.fallback_reason))
        lens = [len(prompt) + step for prompt in PROMPTS]
        tables = [[*TABLES[0], 12], [*TABLES[1], 13]]
        result = execute(engine, query_lens=[1, 1], context_lens=lens, token_ids=tokens[-1], tables=tables)
    return tokens, ways


@contextlib.contextmanager
def worker_on(
    model: Path, cache: Path, counters: Counters | None = None, ops: OpsSettings | None = None, **execution: object
) -> Iterator[Engine]:
    """An engine with the product's default level and a cache of its own."""

    def settings(directory: Path) -> WorkerSettings:
        return replace(
            tiny_settings(directory),
            cache=CacheSettings(cache_dir=str(cache)),
            ops=ops or OpsSettings(),
            execution=ExecutionSettings(**execution),  # type: ignore[arg-type]
        )

    with engine_of(model, settings, counters) as engine:
        yield engine


def reasons(engine: Engine) -> list[str]:
    return [degradation.reason for degradation in engine.description.degradations]


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def broken_compiler(tmp_path: Path, no_compiler: None) -> None:
    """A compiler that tells its version, for which there are kernels in the cache, and compiles nothing."""
    script = tmp_path / "bin" / "g++"
    script.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec {REAL_COMPILER} --version\necho "error: it is broken" >&2\nexit 1\n'
    )
    script.chmod(0o755)


def share_kernels(cache: Path) -> Path:
    """Lets a cache have the C++ kernels of all tests: a process loads one build of them."""
    cache.mkdir()
    (cache / "cpu-kernels").symlink_to(CACHE_FOLDER / "cpu-kernels")
    return cache


@pytest.fixture(scope="module")
def filled_cache(model: Path, expected: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds what a worker compiled; tests have it moved to another place."""
    cache = share_kernels(tmp_path_factory.mktemp("caches") / "filled")
    with worker_on(model, cache) as engine:
        assert generate(engine)[0] == expected
    assert len(list((cache / "compiled").glob("*.artifact"))) == 1
    return cache


@pytest.fixture
def cache(filled_cache: Path, tmp_path: Path) -> Iterator[Path]:
    """It in another place; where it was is nothing, so that nothing can be found there by an absolute path."""
    original = filled_cache.rename(filled_cache.with_name("original"))
    yield Path(shutil.copytree(original, tmp_path / "moved", symlinks=True))
    original.rename(filled_cache)


def test_without_a_compiler_and_with_an_empty_cache_plain_modules_serve_and_what_is_missing_is_said(
    model: Path, expected: list[list[int]], tmp_path: Path, no_compiler: None
) -> None:
    counters = Counters()
    with worker_on(model, tmp_path / "cache", counters) as engine:
        tokens, ways = generate(engine)
        assert tokens == expected
        assert set(ways) == {(GraphMode.NONE, "no_kernels")}
        assert {"no_cpu_kernels", "no_graphs"} <= set(reasons(engine)), engine.description.degradations
        assert (engine.description.execution.graph_mode, engine.description.execution.captured) == ("NONE", ())
        for reason in reasons(engine):
            assert counters.snapshot()[f'degradations_total{{reason="{reason}"}}'] == 1


def test_where_only_the_pieces_can_not_be_compiled_full_graphs_still_serve_decodes(
    model: Path, expected: list[list[int]], tmp_path: Path, broken_compiler: None
) -> None:
    counters, cache = Counters(), share_kernels(tmp_path / "cache")
    with worker_on(model, cache, counters, OpsSettings(custom_ops=("none",)), compiler="inductor") as engine:
        tokens, ways = generate(engine)
        assert tokens == expected
        assert ways == [(GraphMode.NONE, "not_decode")] + [(GraphMode.FULL, "")] * 3
        assert reasons(engine) == ["compile_failed"]
        assert "steps run plain modules, without PIECEWISE graphs" in engine.description.degradations[0].message
        execution = engine.description.execution
        assert (execution.optimization_level, execution.graph_mode) == (0, "FULL_DECODE_ONLY")
        assert {size.mode for size in execution.captured} == {GraphMode.FULL}
        assert counters.snapshot()['degradations_total{reason="compile_failed"}'] == 1


def test_steps_of_a_worker_that_was_to_capture_pieces_are_told_that_nothing_was_compiled(
    model: Path, expected: list[list[int]], tmp_path: Path, broken_compiler: None
) -> None:
    cache = share_kernels(tmp_path / "cache")
    with worker_on(model, cache, ops=OpsSettings(custom_ops=("none",)), compiler="inductor", graph_mode="PIECEWISE") as engine:
        tokens, ways = generate(engine)
        assert tokens == expected
        assert set(ways) == {(GraphMode.NONE, "not_compiled")}
        assert reasons(engine) == ["compile_failed"]


def test_where_what_was_compiled_can_not_be_loaded_plain_modules_serve_and_the_reason_is_said(
    model: Path, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_code: object) -> object:
        raise OSError(24, "too many open files")

    monkeypatch.setattr(compile_module, "load_code", fail)
    counters = Counters()
    with worker_on(model, share_kernels(tmp_path / "cache"), counters) as engine:
        assert generate(engine)[0] == expected
        assert reasons(engine) == ["compile_failed"]
        assert "too many open files" in engine.description.degradations[0].message
        assert engine.description.execution.optimization_level == 0
    assert counters.snapshot()['degradations_total{reason="compile_failed"}'] == 1


def test_a_cache_that_was_moved_is_used(
    model: Path, expected: list[list[int]], cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="modelworker.compiler")
    with worker_on(model, cache) as engine:
        assert generate(engine)[0] == expected
        assert reasons(engine) == []
    assert "loaded compiled code from" in caplog.text
    assert "traced the model" not in caplog.text


def damage(cache: Path) -> None:
    (artifact,) = (cache / "compiled").glob("*.artifact")
    content = bytearray(artifact.read_bytes())
    content[len(content) // 2] ^= 0xFF
    artifact.write_bytes(content)


def replace_by_a_file(cache: Path) -> None:
    shutil.rmtree(cache / "compiled")
    (cache / "compiled").write_text("somebody's notes")


def let_others_write(cache: Path) -> None:
    (artifact,) = (cache / "compiled").glob("*.artifact")
    artifact.chmod(0o666)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (damage, "its digest is not that of its content"),
        (replace_by_a_file, "can't be"),
        (let_others_write, "others may write to it"),
    ],
    ids=["damaged", "no folder can be made", "others may write to it"],
)
def test_a_cache_that_can_not_be_used_is_said_and_the_model_is_compiled_again(
    model: Path, expected: list[list[int]], cache: Path, caplog: pytest.LogCaptureFixture, spoil: object, said: str
) -> None:
    spoil(cache)  # type: ignore[operator]
    caplog.set_level(logging.INFO, logger="modelworker.compiler")
    with worker_on(model, cache) as engine:
        tokens, ways = generate(engine)
        assert tokens == expected
        assert {mode for mode, _ in ways} == {GraphMode.PIECEWISE, GraphMode.FULL}
        assert reasons(engine) == []
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any(said in warning for warning in warnings), caplog.text
    assert "traced the model" in caplog.text


@pytest.mark.slow
def test_two_workers_that_start_at_once_on_one_empty_cache_both_become_ready(model: Path, tmp_path: Path) -> None:
    flags = ("--block-size", "4", "--num-blocks", "32", "--max-sequences", "8", "--max-tokens-per-step", "64", "--threads", "1")

    def start() -> tuple[int, list[str]]:
        with worker_process(model, *flags, environment={"MODELWORKER_CACHE_DIR": str(tmp_path / "cache")}) as process:
            with Client(process.address) as client:
                info = client.info()
            return len(info.execution.captured), [degradation.reason for degradation in info.degradations]

    with concurrent.futures.ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda _: start(), range(2))
    assert first == second
    assert first[0] > 0
    assert first[1] == []
    assert len(list((tmp_path / "cache" / "compiled").glob("*.artifact"))) == 1
