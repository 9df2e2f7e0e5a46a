"""Models by their name on the Hugging Face hub: a name becomes a snapshot directory in the local cache.

Needs the package huggingface_hub (the extra `hub`), with its variables: HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_TOKEN.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars

from modelworker.worker.errors import CheckpointError, SetupError
from modelworker.worker.models.config import read_json_object
from modelworker.worker.progress import Progress

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# What the worker and the commands read beside the weights.
_DESCRIPTIONS = ("config.json", "generation_config.json", _INDEX, "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def fetch_model(name: str, progress: Progress) -> Path:
    """Returns the snapshot directory of a model; what is missing from the local cache is fetched, and nothing else.

    Args:
        name: on the hub, e.g. HuggingFaceTB/SmolLM2-135M.
        progress: receives the progress of fetching, file by file.

    Raises:
        SetupError: it can't be found or fetched.
    """
    disable_progress_bars()
    with _one_line_errors(name), progress.stage(f"finding {name}"):
        directory = Path(snapshot_download(name, allow_patterns=list(_DESCRIPTIONS)))
        missing = [file_name for file_name in _weight_files(directory) if not (directory / file_name).exists()]
    if missing:
        with _one_line_errors(name), progress.stage(f"fetching {name}", total=len(missing), unit="files") as advance:
            for file_name in missing:
                # The snapshot's directory is named after its commit: weights and config.json are of one version.
                hf_hub_download(name, file_name, revision=directory.name)
                advance(1)
    return directory


def find_cached_model(name: str) -> Path:
    """Returns the snapshot directory of a model in the local cache, without asking the hub.

    Raises:
        SetupError: it is not there, or not with all its weights.
    """
    with _one_line_errors(name):
        directory = Path(snapshot_download(name, allow_patterns=list(_DESCRIPTIONS), local_files_only=True))
        for file_name in _weight_files(directory):
            if not (directory / file_name).exists():
                raise LocalEntryNotFoundError(f"{file_name} is missing")
    return directory


def _weight_files(directory: Path) -> list[str]:
    """Names of the files with weights. What is wrong with an index is said where the checkpoint is opened."""
    if not (directory / _INDEX).exists():
        return [_SINGLE]
    weight_map = read_json_object(directory / _INDEX).get("weight_map")
    return sorted({name for name in weight_map.values() if isinstance(name, str)}) if isinstance(weight_map, dict) else []


@contextmanager
def _one_line_errors(name: str) -> Iterator[None]:
    """Turns what huggingface_hub raises into one line that says what to do."""
    try:
        yield
    except SetupError:
        raise
    except GatedRepoError as error:
        raise SetupError(f"{name}: access has to be asked for on the model's page; then log in with `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise SetupError(
            f"{name}: is no directory, and no model on the hub, or a private one: check the name, or log in with `hf auth login`"
        ) from error
    except LocalEntryNotFoundError as error:
        raise SetupError(
            f"{name}: is no directory, and not complete in the cache {constants.HF_HUB_CACHE}, and the hub was not reached: "
            f"run `hf download {name}` with a network, or give --model DIR"
        ) from error
    except EntryNotFoundError as error:
        raise CheckpointError(
            f"{name}: expected {_SINGLE}, or {_INDEX} and the files that it names, on the hub; other formats are not supported"
        ) from error
    except Exception as error:  # The HTTP library's own errors come through, and differ from version to version.
        first_line = str(error).strip().partition("\n")[0]
        raise SetupError(f"{name}: can't be fetched from the hub: {type(error).__name__}: {first_line}") from error
