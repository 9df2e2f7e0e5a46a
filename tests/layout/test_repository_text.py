"""The repository speaks of the product: of no machine's folders, no registry, no other place than its own."""

import re
import subprocess
from pathlib import Path

import pytest

# In two parts, so that this file holds none of them itself.
_FORBIDDEN = {
    "a folder of one machine": re.compile(
        r"(?<![\w./-])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me|Us" + r"ers|tm" + r"p|op" + r"t)/[\w.-]"
    ),
    "a registry's host": re.compile(
        "|".join(("pypi" + r"\.org", "python" + "hosted", "registry" + r"\.npmjs", "download" + r"\.pytorch"))
    ),
}
_TESTS_MAY = {"a folder of one machine"}


def findings(name: str, text: str) -> list[str]:
    """What a file says that it should not."""
    return [
        f"{name}:{number}: {what}: {line.strip()[:120]}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in _FORBIDDEN.items()
        if pattern.search(line) and not (name.startswith("tests/") and what in _TESTS_MAY)
    ]


def test_no_file_names_a_machine_or_a_registry(root: Path) -> None:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=True
    )
    found = []
    for name in listing.stdout.splitlines():
        path = root / name
        if path.is_file() and path.suffix not in (".binpb", ".png", ".safetensors"):
            found += findings(name, path.read_text(encoding="utf-8"))
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "cache = '/" + "tmp/kernels'",
        "see /" + "work/shared",
        "`/" + "root/models`",
        "https://pypi" + ".org/simple",
        "files.python" + "hosted",
    ],
)
def test_a_planted_finding_is_found(line: str) -> None:
    assert findings("worker/planted.py", line)


@pytest.mark.parametrize(
    "line", ["models/smollm2", "/proc/self/cgroup", "build/work/x", "https://example.org/work/x", "a root/leaf pair"]
)
def test_other_paths_are_no_findings(line: str) -> None:
    assert findings("worker/planted.py", line) == []
