"""`modelworker import-gguf FILE DIR`: turns a llama-architecture GGUF file into a Hugging Face model directory."""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from modelworker.worker.errors import SetupError
from modelworker.worker.gguf.config import generation_config, model_config, read_geometry
from modelworker.worker.gguf.file import GgufFile
from modelworker.worker.gguf.tokenizer import STYLES, build_tokenizer, tokenizer_config
from modelworker.worker.gguf.weights import plan_weights, write_weights
from modelworker.worker.progress import Progress
from modelworker.worker.terminal import progress_on


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportSummary:
    """What an import made."""

    directory: str
    num_layers: int
    num_parameters: int
    vocab_size: int
    dtype: str
    size_bytes: int
    seconds: float


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to the command line."""
    parser = subparsers.add_parser(
        "import-gguf",
        help="turn a llama GGUF file into a Hugging Face model directory",
        description="Turns a GGUF file of the llama architecture into a Hugging Face model directory: config.json, "
        "model.safetensors, tokenizer.json, tokenizer_config.json and generation_config.json. Quantized tensors are dequantized.",
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="the GGUF file")
    parser.add_argument("directory", metavar="DIR", type=Path, help="the directory to make; it appears only when it is complete")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="type of the weights")
    parser.add_argument(
        "--pre",
        choices=tuple(STYLES),
        metavar="STYLE",
        help=f"how words are split, for a file that doesn't say: {', '.join(STYLES)}",
    )
    parser.add_argument("--force", action="store_true", help="replace DIR if it exists")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        SetupError: the file can't be imported, or the directory can't be written.
    """
    progress = progress_on(sys.stderr)
    summary = import_gguf(
        arguments.file, arguments.directory, dtype=arguments.dtype, style=arguments.pre, force=arguments.force, progress=progress
    )
    if arguments.json:
        text = json.dumps(asdict(summary))
    else:
        text = (
            f"{summary.directory}: {summary.num_layers} layers, {summary.num_parameters / 1e6:.1f} M parameters "
            f"in {summary.dtype}, {summary.size_bytes / 2**20:.0f} MiB, {summary.seconds:.1f} s"
        )
    sys.stdout.write(text + "\n")
    return 0


def import_gguf(
    path: Path,
    directory: Path,
    *,
    dtype: str = "bfloat16",
    style: str | None = None,
    force: bool = False,
    progress: Progress,
) -> ImportSummary:
    """Writes the model directory. It appears under its name only when it is complete.

    Args:
        path: the GGUF file.
        directory: the directory to make.
        dtype: type of the weights, bfloat16 or float32.
        style: how words are split (`gguf.tokenizer.STYLES`), for a file that doesn't say.
        force: replace a directory that isn't empty.
        progress: is told how far the weights are.

    Raises:
        CheckpointError: the file is no GGUF file, damaged, or describes what LlamaForCausalLM can't be.
        SetupError: the directory exists or can't be written.
    """
    started = time.monotonic()
    _check_directory(directory, force)
    file = GgufFile(path)
    geometry = read_geometry(file)
    planned = plan_weights(file, geometry)
    config = model_config(file, geometry, dtype)
    tokenizer = build_tokenizer(file, vocab_size=geometry.vocab_size, style=style)
    num_parameters = sum(tensor.num_elements for tensor in planned)
    with _complete_or_absent(directory) as scratch:
        _write_json(scratch / "config.json", config)
        _write_json(scratch / "generation_config.json", generation_config(file))
        _write_json(scratch / "tokenizer_config.json", tokenizer_config(file))
        (scratch / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        with progress.stage(f"importing {path.name}", num_parameters, "parameters") as advance:
            size = write_weights(scratch / "model.safetensors", file, planned, dtype, advance)
    return ImportSummary(
        directory=str(directory),
        num_layers=geometry.num_layers,
        num_parameters=num_parameters,
        vocab_size=geometry.vocab_size,
        dtype=dtype,
        size_bytes=size,
        seconds=round(time.monotonic() - started, 3),
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_directory(directory: Path, force: bool) -> None:
    if not os.path.lexists(directory):
        return
    if not directory.is_dir() or directory.is_symlink():
        raise SetupError(f"{directory}: exists and is not a directory")
    if not force and any(directory.iterdir()):
        raise SetupError(f"{directory}: exists and is not empty; --force replaces it")


@contextmanager
def _complete_or_absent(directory: Path) -> Iterator[Path]:
    """Yields a scratch directory beside the wanted one, which takes its place at the end, or is removed on any error."""
    beside = directory.absolute()
    scratch, former = (beside.with_name(f".{beside.name}.{purpose}-{os.getpid()}") for purpose in ("importing", "former"))
    try:
        scratch.mkdir(parents=True)
        yield scratch
        if beside.exists():
            beside.rename(former)
        scratch.rename(beside)
    except OSError as error:
        if former.exists() and not beside.exists():
            former.rename(beside)
        raise SetupError(f"{error.filename or directory}: can't be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)
