"""Compiling and loading leave nothing in the environment, which child processes inherit."""

import contextlib
import os
from pathlib import Path

import pytest
import torch

from modelworker.compiler.cache import ArtifactCache
from modelworker.compiler.compile import compile_model
from modelworker.compiler.counters import CompileCounters
from modelworker.compiler.environment import environment
from modelworker.compiler.settings import CompileSettings
from modelworker_testing.small_models import small_source

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")


def test_neither_a_compilation_nor_a_warm_start_leaves_a_variable_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The rest of this process may have compiled already.
    monkeypatch.delenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", raising=False)
    # Where it is not set, Inductor sets it when it is loaded.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    before = dict(os.environ)
    source, x = small_source(lambda x: torch.sin(x) + 1), torch.rand(3, 8)
    for hits in (0, 1):
        counters = CompileCounters()
        model = compile_model(source, CompileSettings(), counters=counters, cache=ArtifactCache(tmp_path / "cache"))
        assert counters.snapshot().get("cache_hits", 0) == hits
        torch.testing.assert_close(model(x), torch.sin(x) + 1)
        assert dict(os.environ) == before


@pytest.mark.parametrize("earlier", [None, "earlier"])
def test_a_variable_is_what_it_was_also_after_an_error(monkeypatch: pytest.MonkeyPatch, earlier: str | None) -> None:
    monkeypatch.delenv("MODELWORKER_TESTING", raising=False)
    if earlier is not None:
        monkeypatch.setenv("MODELWORKER_TESTING", earlier)
    with contextlib.suppress(ValueError), environment(MODELWORKER_TESTING="set"):
        assert os.environ["MODELWORKER_TESTING"] == "set"
        raise ValueError("x")
    assert os.environ.get("MODELWORKER_TESTING") == earlier
