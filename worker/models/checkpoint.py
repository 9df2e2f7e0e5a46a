"""A model directory's weights: which tensor stands in which file, by the index alone."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from modelworker.worker.errors import CheckpointError
from modelworker.worker.models.config import read_json_object
from modelworker.worker.models.safetensors_file import TensorEntry, read_header

_logger = logging.getLogger(__name__)

_SINGLE = "model.safetensors"
# Bytes of a file name on the file systems of Linux.
_NAME_MAX = 255
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of a checkpoint by name. Only headers have been read.

    Attributes:
        source: the file that says which tensors there are: the index, or the only file.
        tensors: by name.
    """

    source: Path
    tensors: Mapping[str, TensorEntry]

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(entry.num_bytes for entry in self.tensors.values())

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Reads the index, or the single file where there is none, and the headers of the files that it names.

        Other files in the directory are not looked at.

        Raises:
            CheckpointError: a file is missing, can't be read or is truncated, or the index and the files disagree.
        """
        index = directory / _INDEX
        if index.exists():
            return cls(index, _read_shards(directory, index))
        single = directory / _SINGLE
        if single.exists():
            return cls(single, read_header(single))
        raise CheckpointError(f"{directory}: expected {_SINGLE} or {_INDEX}, found neither; other weight formats are not supported")


def _read_shards(directory: Path, index: Path) -> dict[str, TensorEntry]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map: expected an object of tensor names and file names")
    headers = {}
    for file_name in sorted(set(weight_map.values())):
        if Path(file_name).name != file_name or not file_name.endswith(".safetensors") or len(os.fsencode(file_name)) > _NAME_MAX:
            raise CheckpointError(
                f"{index}: weight_map: expected names of *.safetensors files beside the index, found {file_name!r}"
            )
        path = directory / file_name
        if not path.exists():
            raise CheckpointError(f"{path}: is missing, but {index.name} names it")
        headers[file_name] = read_header(path)
    for file_name, header in headers.items():
        for name in header:
            if name not in weight_map:
                raise CheckpointError(f"{directory / file_name}: {name}: stands in the file, but not in {index.name}")
            if weight_map[name] != file_name:
                raise CheckpointError(
                    f"{directory / file_name}: {name}: duplicate: {index.name} says that it stands in {weight_map[name]}"
                )
    tensors = {}
    for name, file_name in weight_map.items():
        if name not in headers[file_name]:
            raise CheckpointError(f"{directory / file_name}: {name}: is missing, but {index.name} says that it stands there")
        tensors[name] = headers[file_name][name]
    if (directory / _SINGLE).exists() and _SINGLE not in headers:
        _logger.info("%s: ignored, as there is %s", directory / _SINGLE, _INDEX)
    return tensors
