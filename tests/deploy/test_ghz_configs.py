"""deploy/ghz: every config is one that ghz reads, and a worker with default settings executes what it sends."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.cli import main
from modelworker.worker.client import Client
from modelworker.worker.settings import WorkerSettings
from modelworker_testing.ghz import CONFIG_FIELDS, read_binary_file
from modelworker_testing.serving_thread import server_on_a_thread

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "deploy" / "ghz").glob("*.json"))

IS_OF_TYPE = {
    "text": lambda value: isinstance(value, str),
    "number": lambda value: type(value) is int and value >= 0,
    "signed": lambda value: type(value) is int,
    "flag": lambda value: isinstance(value, bool),
    "duration": lambda value: isinstance(value, str) and re.fullmatch(r"([0-9]+(\.[0-9]+)?(ms|s|m|h))+", value) is not None,
    "texts": lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    "map": lambda value: isinstance(value, dict) and all(isinstance(each, str) for each in value.values()),
}


def load(config: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(config.read_text())
    return loaded


each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A worker with the limits that `modelworker serve` has by default."""
    with server_on_a_thread() as served:
        yield served


def test_there_are_decodes_of_one_and_sixteen_sequences_a_prefill_and_a_stream() -> None:
    assert any("stream-call-count" in load(config) for config in CONFIGS)
    shapes = {(tags["sequences"], tags["query-len"]) for tags in (load(config)["tags"] for config in CONFIGS)}
    assert {("1", "1"), ("16", "1")} <= shapes
    assert any(query_len != "1" for _, query_len in shapes)


@each_config
def test_every_field_is_one_that_ghz_knows(config: Path) -> None:
    for name, value in load(config).items():
        assert name in CONFIG_FIELDS, name
        assert IS_OF_TYPE[CONFIG_FIELDS[name]](value), f"{name} is no {CONFIG_FIELDS[name]}: {value!r}"


@each_config
def test_the_config_calls_an_rpc_of_steps_in_the_clear_on_the_default_address(config: Path) -> None:
    content = load(config)
    service = pb.DESCRIPTOR.services_by_name["ModelWorker"]
    method = "ExecuteSteps" if "stream-call-count" in content else "ExecuteStep"
    assert content["call"] == f"{service.full_name}.{service.methods_by_name[method].name}"
    assert (ROOT / content["proto"]).is_file()
    assert content["insecure"] is True
    assert content["host"] == f"127.0.0.1:{WorkerSettings().server.port}"
    assert content["name"] == config.stem
    assert content["binary-file"] == f"build/ghz/{config.stem}.bin"


@each_config
def test_the_worker_admits_the_configs_concurrency_and_every_worker_of_ghz_gets_equally_many_requests(config: Path) -> None:
    content = load(config)
    # ghz sends all steps of a stream at once, and does not see that one was refused in band.
    in_flight = content["concurrency"] * content.get("stream-call-count", 1)
    assert in_flight <= WorkerSettings().fencing.max_steps_in_flight
    assert content["total"] % content["concurrency"] == 0
    assert content["skipFirst"] < content["total"]


@each_config
def test_a_worker_with_default_settings_executes_the_bodies_that_the_tags_describe(
    config: Path, address: str, tmp_path: Path
) -> None:
    file = tmp_path / Path(load(config)["binary-file"]).name
    shape = [word for name, value in load(config)["tags"].items() for word in (f"--{name}", value)]
    assert main(["payload", "--address", address, "--format", "binary", "--count", "8", "--output", str(file), *shape]) == 0
    requests = read_binary_file(file.read_bytes())
    assert len(requests) == 8
    with Client(address) as client:
        if "stream-call-count" not in load(config):
            for request in requests:
                assert client.execute(request, timeout=30).sampled_counts.tolist() == [1] * len(request.query_lens)
            return
        stream = client.stream_steps()
        for request in requests:
            stream.send(request)
        stream.finish()
        for request in requests:
            answer = stream.receive(30)
            assert answer.client_tag == request.client_tag
            assert answer.result().sampled_counts.tolist() == [1] * len(request.query_lens)
