"""Compiling and keeping the kernels, with a script in the compiler's place, and loading what was compiled."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from modelworker.ops.cpu.build import BuildError, Toolchain, build_library, find_toolchain, num_sources
from modelworker.ops.cpu.isa import LEVELS, IsaLevel
from modelworker.ops.cpu.library import CpuLibrary, load_library

LEVEL = LEVELS[-1]


def write_script(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def toolchain(tmp_path: Path) -> Toolchain:
    """A compiler that writes its arguments into whatever it is asked for, and into a log."""
    compiler = write_script(
        tmp_path / "compiler",
        f"""
        [ "$1" = --version ] && echo compiler 1.0 && exit
        echo "$@" >> {tmp_path}/log
        while [ "$1" != -o ]; do shift; done
        echo "$@" > "$2"
        """,
    )
    return find_toolchain(tmp_path / "cache", str(compiler))


def num_compiled(toolchain: Toolchain) -> int:
    return (toolchain.cache.parent / "log").read_text().count(" -c ")


def test_a_library_is_compiled_once_and_kept(toolchain: Toolchain) -> None:
    progress: list[int] = []
    library = build_library(toolchain, LEVEL, progress.append)
    assert sum(progress) == num_compiled(toolchain) == num_sources()
    assert library.stat().st_size > 0
    assert [path.stat().st_mode & 0o077 for path in (toolchain.cache, library.parent)] == [0, 0]
    assert build_library(toolchain, LEVEL, progress.append) == library
    assert sum(progress) == 2 * num_sources()
    assert num_compiled(toolchain) == num_sources()


def test_another_level_is_another_library(toolchain: Toolchain) -> None:
    assert build_library(toolchain, LEVELS[0]) != build_library(toolchain, LEVEL)


@pytest.mark.parametrize("damage", ["library", "digest", "no digest"])
def test_a_damaged_library_is_compiled_again(toolchain: Toolchain, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    library = build_library(toolchain, LEVEL)
    content = library.read_bytes()
    digest = library.with_name("sha256")
    if damage == "library":
        library.write_bytes(content[:-1])
    elif damage == "digest":
        digest.write_text("0" * 64)
    else:
        digest.unlink()
    assert build_library(toolchain, LEVEL) == library
    assert "is damaged: compiling it again" in caplog.text
    assert num_compiled(toolchain) == 2 * num_sources()
    build_library(toolchain, LEVEL)
    assert num_compiled(toolchain) == 2 * num_sources()


def test_the_first_error_of_the_compiler_is_the_message(tmp_path: Path) -> None:
    script = """
    [ "$1" = --version ] && echo compiler 1.0 && exit
    echo "x.cpp: In function f:" >&2; echo "x.cpp:3: error: no such thing" >&2; exit 2
    """
    toolchain = find_toolchain(tmp_path / "cache", str(write_script(tmp_path / "failing", script)))
    with pytest.raises(BuildError, match=r"^failing failed with status 2: x\.cpp:3: error: no such thing$"):
        build_library(toolchain, LEVEL)
    assert not list(toolchain.cache.rglob("*.so"))


def test_no_compiler_is_said(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"^no compiler: no-such-compiler was not found \(on Debian and Ubuntu: install g\+\+\)$"):
        find_toolchain(tmp_path, "no-such-compiler")


def test_a_compiler_that_fails_to_give_its_version_is_said(tmp_path: Path) -> None:
    compiler = write_script(tmp_path / "broken", "echo cannot load libfoo.so >&2; exit 127")
    with pytest.raises(BuildError, match=r"^broken failed with status 127: cannot load libfoo\.so$"):
        find_toolchain(tmp_path, str(compiler))


def test_a_compiler_that_cannot_be_run_is_said(tmp_path: Path) -> None:
    compiler = tmp_path / "wrong"
    compiler.write_bytes(b"\x7fELF, but not really")
    compiler.chmod(0o755)
    with pytest.raises(BuildError, match=r"^wrong can't be run: Exec format error$"):
        find_toolchain(tmp_path, str(compiler))


def test_a_cache_folder_that_cannot_be_made_is_named_with_a_remedy(toolchain: Toolchain, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(BuildError, match=rf"^{tmp_path}/cache, .* \(File exists\): make it writable, or choose another$"):
        build_library(toolchain, LEVEL)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_folder_that_cannot_be_written_is_named_with_a_remedy(toolchain: Toolchain, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(BuildError, match=rf"^{tmp_path}/cache, .* \(Permission denied\): make it writable, or choose another$"):
        build_library(toolchain, LEVEL)


def test_the_same_build_is_loaded_once(cpu_library: CpuLibrary) -> None:
    loaded = set(torch.ops.loaded_libraries)
    (path,) = (Path(path) for path in loaded if Path(path).stem == cpu_library.level.namespace)
    again = load_library(cpu_library.level, path.parents[1])
    assert again.ops is cpu_library.ops
    assert torch.ops.loaded_libraries == loaded


def test_another_build_of_a_loaded_level_is_refused(cpu_library: CpuLibrary, tmp_path: Path) -> None:
    (path,) = (Path(path) for path in torch.ops.loaded_libraries if Path(path).stem == cpu_library.level.namespace)
    shutil.copytree(path.parent, tmp_path / path.parent.name)
    with pytest.raises(BuildError, match=r"^\S+: this process has loaded another build of the kernels for [^\n]*$"):
        load_library(cpu_library.level, tmp_path)
    assert load_library(cpu_library.level, path.parents[1]).ops is cpu_library.ops


def test_a_level_that_this_machine_lacks_is_refused(tmp_path: Path) -> None:
    level = IsaLevel("of_the_future", frozenset({"no_such_flag"}), ())
    with pytest.raises(BuildError, match=r"^this machine can't run kernels for of_the_future$"):
        load_library(level, tmp_path)
    assert not list(tmp_path.iterdir())
