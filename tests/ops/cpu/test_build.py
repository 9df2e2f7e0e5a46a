"""Compiling and keeping the kernels, with a script in the compiler's place, and loading what was compiled."""

import os
import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from modelworker.ops.cpu import build, library
from modelworker.ops.cpu.build import BuildError, Toolchain, build_library, find_toolchain, num_sources
from modelworker.ops.cpu.isa import LEVELS, IsaLevel
from modelworker.ops.cpu.library import CpuLibrary, load_library
from modelworker.ops.cpu.objects import included_headers

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


def num_linked(toolchain: Toolchain) -> int:
    return (toolchain.cache.parent / "log").read_text().count("-shared ")


def test_a_library_is_compiled_once_and_kept(toolchain: Toolchain) -> None:
    progress: list[int] = []
    kept = build_library(toolchain, LEVEL, progress.append)
    assert sum(progress) == num_compiled(toolchain) == num_sources()
    assert kept.stat().st_size > 0
    assert [path.stat().st_mode & 0o077 for path in (toolchain.cache, *toolchain.cache.iterdir())] == [0, 0, 0]
    assert build_library(toolchain, LEVEL, progress.append) == kept
    assert sum(progress) == 2 * num_sources()
    assert num_compiled(toolchain) == num_sources()


def test_another_level_is_another_library(toolchain: Toolchain) -> None:
    assert build_library(toolchain, LEVELS[0]) != build_library(toolchain, LEVEL)


@pytest.mark.parametrize("damage", ["library", "digest", "no digest"])
def test_a_damaged_library_is_linked_again(toolchain: Toolchain, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    kept = build_library(toolchain, LEVEL)
    content = kept.read_bytes()
    digest = kept.with_name("sha256")
    if damage == "library":
        kept.write_bytes(content[:-1])
    elif damage == "digest":
        digest.write_text("0" * 64)
    else:
        digest.unlink()
    assert build_library(toolchain, LEVEL) == kept
    assert "is damaged: linking it again" in caplog.text
    assert num_linked(toolchain) == 2
    build_library(toolchain, LEVEL)
    assert num_linked(toolchain) == 2
    assert num_compiled(toolchain) == num_sources()


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources, which is what is compiled."""
    copied = tmp_path / "sources"
    copied.mkdir()
    for path in (*build._SOURCE_FOLDER.glob("*.cpp"), *build._SOURCE_FOLDER.glob("*.h")):
        shutil.copy(path, copied)
    monkeypatch.setattr(build, "_SOURCE_FOLDER", copied)
    return copied


@pytest.mark.parametrize(("edited", "num_dependents"), [("norm.cpp", 1), ("norm.h", 2), ("linear_tiles.h", 1), ("norm_doors.h", 1)])
def test_an_edit_costs_the_compilation_of_what_includes_it(
    toolchain: Toolchain, sources: Path, edited: str, num_dependents: int
) -> None:
    first = build_library(toolchain, LEVEL)
    with (sources / edited).open("a") as file:
        file.write("// edited\n")
    assert build_library(toolchain, LEVEL) != first
    assert num_compiled(toolchain) == num_sources() + num_dependents
    assert num_linked(toolchain) == 2


def test_another_compiler_or_other_flags_compile_everything(toolchain: Toolchain) -> None:
    build_library(toolchain, LEVEL)
    build_library(replace(toolchain, version="compiler 2.0"), LEVEL)
    assert num_compiled(toolchain) == 2 * num_sources()
    build_library(toolchain, LEVELS[0])
    assert num_compiled(toolchain) == 3 * num_sources()


def test_a_damaged_object_is_compiled_again(toolchain: Toolchain, sources: Path) -> None:
    build_library(toolchain, LEVEL)
    (damaged,) = toolchain.cache.glob("objects_*/norm-*.o")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with (sources / "packed.cpp").open("a") as file:
        file.write("// edited\n")
    build_library(toolchain, LEVEL)
    assert num_compiled(toolchain) == num_sources() + 2


def test_objects_that_no_build_has_used_for_a_day_are_dropped(toolchain: Toolchain, sources: Path) -> None:
    build_library(toolchain, LEVEL)
    begun = time.time()
    objects = sorted(toolchain.cache.glob("objects_*/*.o"))
    for path in objects:
        if not path.name.startswith("linear-"):
            os.utime(path, (begun - 86500, begun - 86500))
    for edited in ("norm.cpp", "linear.cpp"):
        with (sources / edited).open("a") as file:
            file.write("// edited\n")
    build_library(toolchain, LEVEL)
    left = set(toolchain.cache.glob("objects_*/*.o"))
    # The old norm is gone, the old linear was in use a moment ago, and what was used again is as new.
    assert {path.name.split("-")[0] for path in objects if path not in left} == {"norm"}
    assert len(left) == len(objects) + 1
    assert all(path.stat().st_mtime >= begun - 1 for path in left)


@pytest.mark.parametrize("source", sorted(build._SOURCE_FOLDER.glob("*.cpp")), ids=lambda path: path.stem)
def test_the_headers_that_a_key_covers_are_those_that_the_compiler_reads(source: Path) -> None:
    torch_headers = Path(torch.__file__).parent / "include"
    command = ["g++", "-std=c++20", "-mavx512f", "-mamx-bf16", "-MM", "-isystem", str(torch_headers), str(source)]
    read = subprocess.run(command, capture_output=True, text=True, check=True).stdout.replace("\\\n", " ").split()
    assert set(map(Path, read[2:])) <= included_headers(source)


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


def test_a_kernel_that_is_declared_and_not_defined_is_named_as_in_the_sources(
    tmp_path: Path, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A library of one file, with a reference to what is nowhere.
    for path in sources.glob("*.cpp"):
        path.unlink()
    (sources / "use.cpp").write_text(
        """
        #include "norm.h"
        extern "C" const modelworker::Body body = modelworker::rms_norm<float>;
        """
    )
    level = IsaLevel("incomplete", frozenset(), ())
    monkeypatch.setattr(library, "usable_levels", lambda _flags: (level,))
    with pytest.raises(BuildError) as caught:
        load_library(level, tmp_path / "cache")
    assert "undefined symbol: void modelworker::rms_norm<float>(void const*, modelworker::Team): it is declared" in str(
        caught.value
    )
    assert "needs `template void NAME<float>(const void*, Team);` and the same for BFloat16" in str(caught.value)


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
