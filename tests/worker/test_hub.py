"""Models by their name on the hub, in caches laid out as huggingface_hub does. Nothing here has a network."""

import json
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from modelworker.worker.client import Client
from modelworker.worker.command_serve import find_model
from modelworker.worker.errors import SetupError
from modelworker.worker.progress import LogProgress, Progress
from modelworker.worker.settings import ModelSettings, WorkerSettings
from modelworker_testing.checkpoints import save_tiny
from modelworker_testing.worker_process import worker_process

NAME = "owner/tiny-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"

# With progress a model may be fetched, without it must be in the cache.
both_ways = pytest.mark.parametrize("progress", [LogProgress(), None], ids=["serve", "doctor"])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An HF_HOME that this process uses as well."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    return tmp_path / "home"


def save_cached(home: Path) -> Path:
    """Puts a tiny model into a cache: blobs, a snapshot of links to them, and the reference `main`. Returns the snapshot."""
    repository = home / "hub" / "models--owner--tiny-model"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (repository / "blobs", snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    for number, path in enumerate(sorted(save_tiny(home / "source").iterdir())):
        path.rename(repository / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"{number:040x}"))
    return snapshot


def find(model: str, progress: Progress | None, served_model_name: str = "") -> ModelSettings:
    return find_model(WorkerSettings(model=ModelSettings(model=model, served_model_name=served_model_name)), progress).model


def refusal(model: str, progress: Progress | None) -> str:
    with pytest.raises(SetupError) as caught:
        find(model, progress)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_worker_serves_a_cached_model_under_its_name(home: Path) -> None:
    save_cached(home)
    environment = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    with (
        worker_process(Path(NAME), "--num-blocks", "32", environment=environment) as worker,
        Client(worker.address) as client,
    ):
        model = client.info().model
        assert f"finding {NAME}" in worker.log()
    assert model.name == NAME
    assert model.vocab_size == 101


@both_ways
def test_a_cached_model_is_its_snapshot(home: Path, progress: Progress | None) -> None:
    snapshot = save_cached(home)
    assert find(NAME, progress) == ModelSettings(model=str(snapshot), served_model_name=NAME)
    assert find(NAME, progress, served_model_name="mine").served_model_name == "mine"


@both_ways
def test_a_directory_that_exists_wins_over_the_hub(home: Path, progress: Progress | None, monkeypatch: pytest.MonkeyPatch) -> None:
    save_cached(home)
    (home / "here" / NAME).mkdir(parents=True)
    monkeypatch.chdir(home / "here")
    assert find(NAME, progress) == ModelSettings(model=NAME)


@both_ways
def test_shards_are_those_of_the_index_and_a_missing_one_is_no_complete_model(home: Path, progress: Progress | None) -> None:
    snapshot = save_cached(home)
    shards = [snapshot / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (snapshot / "model.safetensors").rename(shards[0])
    shards[1].write_bytes(b"")
    weight_map = {"a": shards[0].name, "b": shards[1].name, "c": shards[0].name}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert find(NAME, progress).model == str(snapshot)
    shards[1].unlink()
    assert "not complete in the cache" in refusal(NAME, progress)


@both_ways
def test_a_model_that_is_not_cached_and_no_network_is_one_line_that_says_what_to_do(home: Path, progress: Progress | None) -> None:
    text = refusal(NAME, progress)
    assert text.startswith(f"{NAME}: is no directory, and not complete in the cache {home / 'hub'}")
    assert f"run `hf download {NAME}` with a network, or give --model DIR" in text


@both_ways
def test_a_name_that_the_hub_does_not_allow_is_one_line(home: Path, progress: Progress | None) -> None:
    assert refusal("owner/a--b", progress).startswith("owner/a--b: can't be fetched from the hub: HFValidationError")


@both_ways
def test_without_huggingface_hub_one_line_says_what_to_install(progress: Progress | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delitem(sys.modules, "modelworker.worker.hub", raising=False)
    text = refusal(NAME, progress)
    assert text == (
        f"{NAME}: is no directory; as a name on the Hugging Face hub it needs the package huggingface_hub: "
        "pip install 'modelworker[hub]'"
    )


@pytest.mark.parametrize("model", ["/owner/name", "./owner/name", "name", "a/b/c", "../name", "owner/", ""])
def test_what_can_only_be_a_path_is_never_looked_for_on_the_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delitem(sys.modules, "modelworker.worker.hub", raising=False)
    assert find(model, LogProgress()) == ModelSettings(model=model)
