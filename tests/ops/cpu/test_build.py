"""Compiling and keeping the kernels, with a script in the compiler's place, and loading what was compiled."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
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
ANY_COMPILER = """
[ "$1" = --version ] && echo compiler 1.0 && exit
[ -z "$LOG" ] || echo "$@" >> "$LOG"
while [ "$1" != -o ]; do shift; done
echo "$@" > "$2"
"""


def write_script(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolchain:
    """A compiler that writes its arguments into whatever it is asked for, and into a log."""
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    compiler = write_script(tmp_path / "compiler", ANY_COMPILER)
    return find_toolchain(tmp_path / "cache", str(compiler))


def library_of(toolchain: Toolchain, level: IsaLevel = LEVEL) -> Path:
    """Builds a library, unless it is kept, and returns where it was opened."""
    with build_library(toolchain, level) as opened:
        return Path(opened.name)


def num_compiled(toolchain: Toolchain) -> int:
    return (toolchain.cache.parent / "log").read_text().count(" -c ")


def num_linked(toolchain: Toolchain) -> int:
    return (toolchain.cache.parent / "log").read_text().count("-shared ")


def test_a_library_is_compiled_once_and_kept(toolchain: Toolchain) -> None:
    progress: list[int] = []
    with build_library(toolchain, LEVEL, progress.append) as opened:
        content = opened.read()
    kept = Path(opened.name)
    assert sum(progress) == num_compiled(toolchain) == num_sources()
    assert content.startswith(b"-o ")
    assert kept.read_bytes() == content
    assert kept.parents[1] == toolchain.cache
    assert {path.stat().st_mode & 0o077 for path in (toolchain.cache, *toolchain.cache.rglob("*"))} == {0}
    with build_library(toolchain, LEVEL, progress.append) as opened:
        assert (opened.name, opened.read()) == (str(kept), content)
    assert sum(progress) == 2 * num_sources()
    assert num_compiled(toolchain) == num_sources()


def test_another_level_is_another_library(toolchain: Toolchain) -> None:
    assert library_of(toolchain, LEVELS[0]) != library_of(toolchain)


@pytest.mark.parametrize("damage", ["library", "digest", "no digest"])
def test_a_damaged_library_is_linked_again(toolchain: Toolchain, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    kept = library_of(toolchain)
    content = kept.read_bytes()
    digest = kept.with_name("sha256")
    if damage == "library":
        kept.write_bytes(content[:-1])
    elif damage == "digest":
        digest.write_text("0" * 64)
    else:
        digest.unlink()
    assert library_of(toolchain) == kept
    assert re.search(r"\.so is damaged.*: linking it again", caplog.text)
    assert num_linked(toolchain) == 2
    library_of(toolchain)
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
    first = library_of(toolchain)
    with (sources / edited).open("a") as file:
        file.write("// edited\n")
    assert library_of(toolchain) != first
    assert num_compiled(toolchain) == num_sources() + num_dependents
    assert num_linked(toolchain) == 2


def test_another_compiler_or_other_flags_compile_everything(toolchain: Toolchain) -> None:
    library_of(toolchain)
    library_of(replace(toolchain, version="compiler 2.0"))
    assert num_compiled(toolchain) == 2 * num_sources()
    library_of(toolchain, LEVELS[0])
    assert num_compiled(toolchain) == 3 * num_sources()


def test_a_damaged_object_is_compiled_again(toolchain: Toolchain, sources: Path) -> None:
    library_of(toolchain)
    (damaged,) = toolchain.cache.glob("objects_*/norm-*.o")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with (sources / "packed.cpp").open("a") as file:
        file.write("// edited\n")
    library_of(toolchain)
    assert num_compiled(toolchain) == num_sources() + 2


def test_objects_that_no_build_has_used_for_a_day_are_dropped(toolchain: Toolchain, sources: Path) -> None:
    library_of(toolchain)
    begun = time.time()
    objects = sorted(toolchain.cache.glob("objects_*/*.o"))
    for path in objects:
        if not path.name.startswith("linear-"):
            os.utime(path, (begun - 86500, begun - 86500))
    for edited in ("norm.cpp", "linear.cpp"):
        with (sources / edited).open("a") as file:
            file.write("// edited\n")
    library_of(toolchain)
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


def untrust(path: Path, how: str) -> str:
    """Lets a file or folder be one that somebody else may have written, and returns what is said of it."""
    if how == "another's":
        os.chown(path, 12345, -1)
        return f"{path}: belongs to user 12345, not to {os.geteuid()}, so it is not used"
    mode = path.stat().st_mode & 0o777 | (0o020 if how == "the group's" else 0o002)
    path.chmod(mode)
    return f"{path}: others may write to it (mode {mode:04o}), so it is not used; chmod go-w makes it usable"


UNTRUSTED = pytest.mark.parametrize(
    "how",
    ["the group's", "everyone's", pytest.param("another's", marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root"))],
)


@UNTRUSTED
@pytest.mark.parametrize("pattern", ["*/*.so", "*/sha256"])
def test_a_library_or_digest_that_others_may_have_written_is_made_again(
    toolchain: Toolchain, how: str, pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = library_of(toolchain)
    (untrusted,) = toolchain.cache.glob(pattern)
    said = untrust(untrusted, how)
    assert library_of(toolchain) == kept
    assert f"{said}: the kernels are made again" in caplog.text
    assert (num_compiled(toolchain), num_linked(toolchain)) == (num_sources(), 2)
    caplog.clear()
    assert library_of(toolchain) == kept
    assert num_linked(toolchain) == 2
    assert not caplog.records


@UNTRUSTED
@pytest.mark.parametrize("pattern", ["", "[0-9a-f]*"])
def test_in_a_folder_that_others_may_write_to_nothing_is_used_or_kept(
    toolchain: Toolchain, how: str, pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    content = library_of(toolchain).read_bytes()
    (untrusted,) = toolchain.cache.glob(pattern) if pattern else (toolchain.cache,)
    before = sorted(toolchain.cache.rglob("*"))
    said = untrust(untrusted, how)
    with build_library(toolchain, LEVEL) as opened:
        assert len(opened.read()) > 0
        assert not Path(opened.name).exists()
    assert f"{said}: the kernels are made again" in caplog.text
    assert f"compiled kernels can't be kept there ({said})" in caplog.text
    assert (num_compiled(toolchain), num_linked(toolchain)) == (num_sources() * (1 if pattern else 2), 2)
    assert sorted(toolchain.cache.rglob("*")) == before
    assert next(toolchain.cache.glob("*/*.so")).read_bytes() == content


@UNTRUSTED
@pytest.mark.parametrize("what", ["object", "folder"])
def test_objects_that_others_may_have_written_are_compiled_again(
    toolchain: Toolchain, sources: Path, how: str, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    library_of(toolchain)
    (norm,) = toolchain.cache.glob("objects_*/norm-*.o")
    said = untrust(norm if what == "object" else norm.parent, how)
    with (sources / "packed.cpp").open("a") as file:
        file.write("// edited\n")
    library_of(toolchain)
    assert [record.getMessage().startswith(said) for record in caplog.records] == [True]
    assert num_compiled(toolchain) == num_sources() + (2 if what == "object" else num_sources())


def test_a_symbolic_link_in_place_of_a_library_is_not_followed(
    toolchain: Toolchain, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = library_of(toolchain)
    kept.rename(tmp_path / "elsewhere.so")
    kept.symlink_to(tmp_path / "elsewhere.so")
    assert library_of(toolchain) == kept
    assert "Too many levels of symbolic links" in caplog.text
    assert not kept.is_symlink()
    assert num_linked(toolchain) == 2


def test_what_is_returned_is_the_library_that_was_verified_whatever_lies_there_later(toolchain: Toolchain) -> None:
    with build_library(toolchain, LEVEL) as first:
        content = first.read()
    with build_library(toolchain, LEVEL) as opened:
        Path(opened.name).rename(Path(opened.name).with_name("other"))
        Path(opened.name).write_bytes(b"something else")
        assert Path(f"/proc/self/fd/{opened.fileno()}").read_bytes() == content


@pytest.mark.parametrize(
    "obstacle",
    ["a file", pytest.param("read-only", marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere"))],
)
def test_where_the_cache_cannot_be_written_kernels_are_built_for_this_process_and_it_is_said(
    toolchain: Toolchain, obstacle: str, caplog: pytest.LogCaptureFixture
) -> None:
    if obstacle == "a file":
        toolchain.cache.write_text("a file")
    else:
        toolchain.cache.mkdir(mode=0o500)
    progress: list[int] = []
    with build_library(toolchain, LEVEL, progress.append) as opened:
        assert opened.read().startswith(b"-o ")
    assert not Path(opened.name).exists()
    assert sum(progress) == num_compiled(toolchain) == num_sources()
    (warning,) = (record.getMessage() for record in caplog.records if "can't be kept" in record.getMessage())
    assert warning.startswith(f"{toolchain.cache}: compiled kernels can't be kept there (")
    assert warning.endswith("every start compiles them: make it a folder that only this user may write to, or choose another")


def test_where_nothing_can_be_written_at_all_it_is_an_error(toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch) -> None:
    toolchain.cache.write_text("a file")
    monkeypatch.setattr(tempfile, "tempdir", str(toolchain.cache))
    with pytest.raises(BuildError, match=rf"^{toolchain.cache}, where kernels are compiled, can't be written \(Not a directory\)$"):
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


def loaded_folder(cpu_library: CpuLibrary) -> Path:
    """Where the library lies that this process has loaded."""
    name = f"{cpu_library.level.namespace}.so"
    paths = (Path(path).readlink() for path in torch.ops.loaded_libraries if path.startswith("/proc/self/fd/"))
    (found,) = (path.parent for path in paths if path.name.startswith(name))
    return found


def test_the_same_build_is_loaded_once_wherever_it_lies(cpu_library: CpuLibrary, tmp_path: Path) -> None:
    loaded = set(torch.ops.loaded_libraries)
    for cache in (loaded_folder(cpu_library).parent, tmp_path):
        progress: list[int] = []
        again = load_library(cpu_library.level, cache, progress.append)
        assert again.ops is cpu_library.ops
        assert again.functions._handle == cpu_library.functions._handle
        assert sum(progress) == num_sources()
    assert torch.ops.loaded_libraries == loaded
    assert not list(tmp_path.iterdir())


def test_another_build_of_a_loaded_level_is_refused(
    cpu_library: CpuLibrary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_script(tmp_path / "g++", ANY_COMPILER)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path}:/bin")
        with pytest.raises(
            BuildError, match=r"^\S+: this process has loaded another build of the kernels for \w+; start a new one$"
        ):
            load_library(cpu_library.level, tmp_path / "cache")
    assert load_library(cpu_library.level, tmp_path / "cache").ops is cpu_library.ops


def test_a_library_whose_file_is_gone_or_replaced_is_loaded_as_it_was_verified(cpu_library: CpuLibrary, tmp_path: Path) -> None:
    # In a process of its own, which loads from a cache that is exchanged and removed as soon as the library is open.
    shutil.copytree(loaded_folder(cpu_library).parent, tmp_path / "cache", ignore=_other_builds(loaded_folder(cpu_library)))
    code = f"""
import shutil
from pathlib import Path
import torch
from modelworker.ops.cpu import library
from modelworker.ops.cpu.isa import cpu_flags, usable_levels

(level,) = (level for level in usable_levels(cpu_flags()) if level.name == {cpu_library.level.name!r})
cache = Path({str(tmp_path / "cache")!r})
build = library.build_library

def build_and_exchange(*args):
    opened = build(*args)
    assert Path(opened.name).is_relative_to(cache), opened.name
    shutil.rmtree(cache)
    return opened

library.build_library = build_and_exchange
first = library.load_library(level, cache)
again = library.load_library(level, cache)
assert not cache.exists()
assert first.functions._handle == again.functions._handle
x = torch.randn(3, 64)
torch.testing.assert_close(again.ops.rms_norm(x, torch.ones(64), 0.0), torch.nn.functional.rms_norm(x, (64,), eps=0.0))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def _other_builds(folder: Path) -> Callable[[str, list[str]], list[str]]:
    """Leaves out of a copy of a cache what is not this build."""
    return lambda at, names: [name for name in names if Path(at) == folder.parent and name != folder.name]


def test_a_level_that_this_machine_lacks_is_refused(tmp_path: Path) -> None:
    level = IsaLevel("of_the_future", frozenset({"no_such_flag"}), ())
    with pytest.raises(BuildError, match=r"^this machine can't run kernels for of_the_future$"):
        load_library(level, tmp_path)
    assert not list(tmp_path.iterdir())
