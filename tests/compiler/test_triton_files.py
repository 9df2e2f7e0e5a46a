"""Triton's files are put back where Triton looks for them, and nowhere else."""

from pathlib import Path

import pytest

from modelworker.compiler.triton_files import collect_triton_files, restore_triton_files


def test_files_come_back_with_the_paths_of_the_new_directory(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "key").mkdir(parents=True)
    (first / "key" / "kernel.cubin").write_bytes(b"\x00code")
    (first / "key" / "__grp__kernel.json").write_text(f'{{"kernel.cubin": "{first}/key/kernel.cubin"}}')
    restore_triton_files(collect_triton_files(first), second)
    assert (second / "key" / "kernel.cubin").read_bytes() == b"\x00code"
    assert (second / "key" / "__grp__kernel.json").read_text() == f'{{"kernel.cubin": "{second}/key/kernel.cubin"}}'


@pytest.mark.parametrize("name", ["../outside", "key/../../outside", "{root}/outside", "", "..", "."])
def test_a_name_that_leads_out_of_the_directory_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "directory"
    directory.mkdir()
    before = set(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="no place below its directory"):
        restore_triton_files({"key/first": b"x", name.format(root=tmp_path): b"x"}, directory)
    assert set(tmp_path.rglob("*")) == before
