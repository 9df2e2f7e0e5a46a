"""A compiled model as bytes: its program, the code of its pieces, and what its code was made from."""

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field

from modelworker.compiler.generated_code import GeneratedCode
from modelworker.compiler.program import Program
from modelworker.compiler.program_json import program_from_json, program_to_json

_MAGIC = b"modelworker compiled model 1\n"
_DIGEST_LENGTH = 64
_TRITON = "triton/"
# Everything that goes in has the same time, so that equal models are equal bytes.
_TIME = (1980, 1, 1, 0, 0, 0)

Factors = Mapping[str, object]
"""What compiled code depends on, by name; of JSON's types."""


class DamagedArtifactError(ValueError):
    """Bytes that are no artifact, or not the whole of one."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A compiled model.

    Attributes:
        program: its stages.
        codes: of its unique pieces, in the order of `program.pieces`.
        plain_codes: of the same, calling their ops one by one.
        triton_files: the compiled kernels of the codes, as Triton keeps them; empty where there are none.
    """

    program: Program
    codes: tuple[GeneratedCode, ...]
    plain_codes: tuple[GeneratedCode, ...] = ()
    triton_files: Mapping[str, bytes] = field(default_factory=dict)


def write_artifact(artifact: Artifact, factors: Factors) -> bytes:
    """Packs an artifact. The result starts with a digest of the rest."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:

        def add(name: str, content: str | bytes) -> None:
            archive.writestr(zipfile.ZipInfo(name, _TIME), content, zipfile.ZIP_DEFLATED)

        add("factors.json", json.dumps(factors, sort_keys=True))
        add("program.json", program_to_json(artifact.program))
        for index, code in enumerate(artifact.codes):
            add(f"pieces/{index}/code.py", code.source)
            for name, library in code.kernels.items():
                add(f"pieces/{index}/kernels/{name}", library)
        for index, code in enumerate(artifact.plain_codes):
            add(f"pieces/{index}/plain.py", code.source)
        for name, content in artifact.triton_files.items():
            add(f"{_TRITON}{name}", content)
    payload = buffer.getvalue()
    return _MAGIC + hashlib.sha256(payload).hexdigest().encode() + payload


def read_artifact(data: bytes, factors: Factors) -> Artifact:
    """Unpacks an artifact.

    Args:
        data: what `write_artifact` returned.
        factors: that it must have been made from.

    Raises:
        DamagedArtifactError: the digest is another one, or the factors are, or what the digest is right for is no artifact.
    """
    start = len(_MAGIC) + _DIGEST_LENGTH
    payload = data[start:]
    if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : start] != hashlib.sha256(payload).hexdigest().encode():
        raise DamagedArtifactError("its digest is not that of its content")
    try:
        return _unpack(payload, factors)
    except DamagedArtifactError:
        raise
    except Exception as error:
        # Its digest is right, so it was written wrong: by an older version, or by somebody else.
        raise DamagedArtifactError(f"its content can't be read: {type(error).__name__}: {error}") from error


def _unpack(payload: bytes, factors: Factors) -> Artifact:
    with zipfile.ZipFile(io.BytesIO(payload)) as archive:
        if json.loads(archive.read("factors.json")) != json.loads(json.dumps(factors)):
            raise DamagedArtifactError("it was made from something else than its name says")
        program = program_from_json(archive.read("program.json").decode())
        names = archive.namelist()

        def code(index: int) -> GeneratedCode:
            prefix = f"pieces/{index}/kernels/"
            kernels = {name.removeprefix(prefix): archive.read(name) for name in names if name.startswith(prefix)}
            return GeneratedCode(archive.read(f"pieces/{index}/code.py").decode(), kernels)

        indices = range(len(program.pieces))
        plain = [
            GeneratedCode(archive.read(name).decode(), {}) for index in indices if (name := f"pieces/{index}/plain.py") in names
        ]
        if plain and len(plain) != len(program.pieces):
            raise DamagedArtifactError(f"it has the plain code of {len(plain)} pieces of {len(program.pieces)}")
        triton_files = {name.removeprefix(_TRITON): archive.read(name) for name in names if name.startswith(_TRITON)}
        return Artifact(program, tuple(map(code, indices)), tuple(plain), triton_files)
