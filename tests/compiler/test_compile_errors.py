"""Whatever fails while a model is compiled or loaded, the caller gets the one error that says so."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from modelworker.compiler.cache import ArtifactCache
from modelworker.compiler.compile import compile_model
from modelworker.compiler.counters import CompileCounters
from modelworker.compiler.errors import CompileError
from modelworker.compiler.graph_pass import GraphPass
from modelworker.compiler.settings import CompileSettings
from modelworker_testing.small_models import small_source

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

# With a kernel, which takes a compiler and is loaded from memory.
SOURCE = small_source(lambda x: torch.sin(x) + 1)


def failing(error: Exception) -> Any:
    def fail(*_args: object, **_options: object) -> Any:
        raise error

    return fail


def compile_to(directory: Path, *passes: GraphPass) -> Any:
    return compile_model(
        SOURCE, CompileSettings(), counters=CompileCounters(), cache=ArtifactCache(directory / "cache"), passes=passes
    )


@pytest.mark.parametrize("error", [RuntimeError("first line\nsecond line"), ValueError(), AssertionError("x")], ids=repr)
def test_what_a_graph_pass_raises_is_the_cause_of_a_compile_error_of_one_line(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(CompileError) as caught:
        compile_to(tmp_path, GraphPass("broken", failing(error)))
    assert type(error).__name__ in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


def test_a_kernel_that_the_system_has_no_memory_for_is_a_compile_error_and_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "memfd_create", failing(OSError(errno.EMFILE, "too many open files")))
    with pytest.raises(CompileError, match=r"OSError: .*too many open files") as caught:
        compile_to(tmp_path)
    assert isinstance(caught.value.__cause__, OSError)
    assert list((tmp_path / "cache").glob("*.artifact")) == []
    monkeypatch.undo()
    x = torch.rand(3, 8)
    found: Tensor = compile_to(tmp_path)(x)
    torch.testing.assert_close(found, torch.sin(x) + 1)
