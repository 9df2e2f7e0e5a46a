"""What the manifest says about the worker holds for the worker and for the image."""

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from modelworker.worker import command_serve, server
from modelworker.worker.flags import CommandParser, read_settings
from modelworker.worker.health import LIVENESS_NAMES, READINESS_NAMES
from modelworker.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    """The manifest's objects by kind."""
    found = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
    assert [document["kind"] for document in found] == ["Deployment", "Service"]
    return {document["kind"]: document for document in found}


@pytest.fixture(scope="module")
def pod(documents: dict[str, Any]) -> dict[str, Any]:
    return documents["Deployment"]["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["containers"]
    return only


@pytest.fixture(scope="module")
def image() -> dict[str, str]:
    """The environment that the Dockerfile sets for the final stage."""
    final = (ROOT / "Dockerfile").read_text().split("\nFROM ")[-1]
    (block,) = re.findall(r"^ENV ((?:.*\\\n)*.*)$", final, re.MULTILINE)
    return dict(word.split("=", 1) for word in block.replace("\\\n", " ").split())


@pytest.fixture(scope="module")
def settings(container: dict[str, Any], image: dict[str, str]) -> WorkerSettings:
    """What the worker in the pod is told; a variable that `serve` doesn't read or can't parse fails here."""
    environment = image | {entry["name"]: entry["value"] for entry in container["env"]}
    parser = CommandParser(prog="modelworker", environment=environment)
    subparsers = parser.add_subparsers()
    command_serve.add_parser(subparsers)
    serve = subparsers.choices["serve"]
    serve.environment = environment
    given = {name for name in environment if name.startswith("MODELWORKER_")}
    assert given <= serve.variables()
    arguments: argparse.Namespace = serve.parse_args([])
    return read_settings(WorkerSettings, arguments)


def probes(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}


def test_the_grace_period_outlasts_the_drain_and_the_last_answers(pod: dict[str, Any], settings: WorkerSettings) -> None:
    assert pod["terminationGracePeriodSeconds"] > settings.server.drain_seconds + server._LAST_ANSWERS_SECONDS


def test_the_probes_ask_for_names_that_the_worker_serves(container: dict[str, Any]) -> None:
    asked = {kind: probe["grpc"]["service"] for kind, probe in probes(container).items()}
    assert asked["startup"] in READINESS_NAMES
    assert asked["readiness"] in READINESS_NAMES
    assert asked["liveness"] in LIVENESS_NAMES


def test_every_probe_waits_five_seconds_and_start_up_may_take_minutes(container: dict[str, Any]) -> None:
    assert {probe["timeoutSeconds"] for probe in probes(container).values()} == {5}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 300


def test_probes_ports_and_service_agree_with_the_port_that_the_worker_listens_on(
    documents: dict[str, Any], container: dict[str, Any], settings: WorkerSettings
) -> None:
    (port,) = container["ports"]
    (service_port,) = documents["Service"]["spec"]["ports"]
    assert port["containerPort"] == settings.server.port == WorkerSettings().server.port
    assert {probe["grpc"]["port"] for probe in probes(container).values()} == {settings.server.port}
    assert (service_port["port"], service_port["targetPort"]) == (settings.server.port, port["name"])
    assert f"EXPOSE {settings.server.port}\n" in (ROOT / "Dockerfile").read_text()


def test_the_worker_listens_beyond_its_own_machine_and_serves_the_mounted_model(
    container: dict[str, Any], settings: WorkerSettings
) -> None:
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert settings.server.host in ("[::]", "0.0.0.0")
    assert settings.model.model == mounts["model"]["mountPath"]
    assert mounts["model"]["readOnly"]


def test_the_root_is_read_only_and_every_place_to_write_lies_in_the_cache_volume(
    pod: dict[str, Any], container: dict[str, Any], image: dict[str, str]
) -> None:
    assert container["securityContext"]["readOnlyRootFilesystem"]
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert "emptyDir" in volumes["cache"]
    assert volumes.keys() == mounts.keys()
    for variable in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "MODELWORKER_CACHE_DIR"):
        assert Path(image[variable]).is_relative_to(mounts["cache"]["mountPath"]), variable


def test_the_pod_runs_as_the_user_of_the_image_without_privileges(pod: dict[str, Any], container: dict[str, Any]) -> None:
    context = pod["securityContext"]
    assert context["runAsNonRoot"]
    assert f"USER {context['runAsUser']}:{context['runAsGroup']}\n" in (ROOT / "Dockerfile").read_text()
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_selectors_of_deployment_and_service_find_the_pod(documents: dict[str, Any]) -> None:
    deployment, service = documents["Deployment"]["spec"], documents["Service"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"].items() <= labels.items()
    assert service["selector"].items() <= labels.items()


def test_requests_are_limits_and_cpus_are_whole(container: dict[str, Any]) -> None:
    resources = container["resources"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["cpu"].isdecimal()
