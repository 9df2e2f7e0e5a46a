"""A router in another language: Node.js, @grpc/grpc-js and the .proto, against a real worker."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelworker.worker.client import Client, FencedSession
from modelworker.worker.scheduler import Request, Scheduler
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.node_packages import ROOT, SOURCES, installed_node_modules
from modelworker_testing.worker_process import worker_process

PROMPT_IDS = (5, 17, 42, 99, 3, 64, 28)
NUM_TOKENS = 16
BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def node_modules() -> Path:
    return installed_node_modules()


@pytest.fixture(scope="module")
def worker(node_modules: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A worker with a random small Llama, whose tokens depend on everything that the cache should hold. Small blocks: 6 of them."""
    model = save_tiny(tmp_path_factory.mktemp("tiny"))
    with worker_process(model, "--block-size", str(BLOCK_SIZE), "--num-blocks", "32", "--threads", "1") as process:
        yield process.address


@pytest.fixture(scope="module")
def python_ids(worker: str) -> list[int]:
    """What the Python client decodes, with other blocks and in another epoch; it gives the worker back."""
    with Client(worker) as client:
        session = FencedSession(client)
        scheduler = Scheduler(session)
        request = scheduler.add(Request(prompt_ids=PROMPT_IDS, max_tokens=NUM_TOKENS, stop_token_ids=frozenset()))
        output_ids = list(scheduler.run_until_idle()[request].output_ids)
        session.release()
    return output_ids


@pytest.fixture(scope="module")
def result(worker: str, python_ids: list[int], node_modules: Path) -> dict[str, Any]:
    """What the Node client prints."""
    del python_ids  # It has to be gone first: a worker has one owner.
    proto = ROOT / "proto" / "model_worker.proto"
    done = subprocess.run(
        ["node", SOURCES / "client.js", proto, worker, ",".join(map(str, PROMPT_IDS)), str(NUM_TOKENS)],
        env={**os.environ, "NODE_PATH": str(node_modules)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def test_node_decodes_the_tokens_that_the_python_client_decodes(result: dict[str, Any], python_ids: list[int]) -> None:
    assert len(python_ids) == NUM_TOKENS
    assert len(set(python_ids)) > NUM_TOKENS // 2  # Not one that would come out whatever the cache holds.
    assert result["outputIds"] == python_ids


def test_node_owns_the_worker_under_an_id_that_is_no_javascript_number(result: dict[str, Any]) -> None:
    assert result["leaseHolder"] == "9007199254740993"
    assert result["epochAfterReset"] not in ("0", result["epoch"])


def test_a_step_that_node_sends_again_is_answered_without_being_executed_again(result: dict[str, Any]) -> None:
    assert result["retriedAnswer"] == result["lastAnswer"]
    assert int(result["stepsExecuted"]) == 2 * NUM_TOKENS  # The Python client's steps, and Node's.


def test_node_reads_enums_and_status_texts(result: dict[str, Any]) -> None:
    assert result["graphMode"] == "GRAPH_MODE_FULL"
    assert result["invalid"]["code"] == "INVALID_ARGUMENT"
    assert result["invalid"]["details"] == "token_ids[0]: row 0, token 0 of the row: found 101, expected 0 .. 100, or -1 (feedback)"


def test_the_locked_packages_are_exact_and_name_no_place_to_fetch_them_from() -> None:
    wanted = json.loads((SOURCES / "package.json").read_text())["dependencies"]
    assert set(wanted) == {"@grpc/grpc-js", "@grpc/proto-loader"}
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in wanted.values())
    locked = json.loads((SOURCES / "package-lock.json").read_text())["packages"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    for name, package in locked.items():
        assert "resolved" not in package, name
        assert name == "" or package["integrity"].startswith("sha512-"), name
