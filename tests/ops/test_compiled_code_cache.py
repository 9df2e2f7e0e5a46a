"""torch's caches of compiled code on disk: an op that begins to write to an argument is not mistaken for what it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from modelworker.ops.library import register_op

PROGRAM = """
import sys
import torch
from torch import Tensor
from modelworker.ops.library import register_op

def doubled(x: Tensor, y: Tensor) -> Tensor:
    if sys.argv[1] == "writes":
        y.add_(1)
    return x * 2

register_op(doubled, fake=lambda x, y: torch.empty_like(x), mutates_args=("y",) if sys.argv[1] == "writes" else ())

@torch.compile(fullgraph=True)
def step(x, y):
    before = y + 1
    torch.ops.modelworker.doubled(x, y)
    return y * 3 + before

print(step(torch.zeros(1), torch.zeros(1)).item())
"""


def run(version: str, cache: Path) -> str:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", PROGRAM, version]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.slow
def test_code_that_was_compiled_before_an_op_wrote_to_its_argument_is_not_used_afterwards(tmp_path: Path) -> None:
    assert run("reads", tmp_path) == "1.0"
    assert run("writes", tmp_path) == "4.0"


def test_the_key_of_compiled_code_depends_on_the_schema_of_every_op() -> None:
    def pure(x: Tensor) -> Tensor:
        return x * 2

    tags = [torch.compiler.config.cache_key_tag]
    for mutates in ((), ("x",)):
        library = torch.library.Library("modelworker_test_tags", "FRAGMENT")
        with torch.compiler.config.patch(cache_key_tag=""):
            register_op(pure, fake=torch.empty_like, mutates_args=mutates, library=library)
            tags.append(torch.compiler.config.cache_key_tag)
        library._destroy()
    assert all(len(tag) == 64 for tag in tags)
    assert len(set(tags)) == 3
