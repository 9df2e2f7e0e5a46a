"""Generates the code of proto/model_worker.proto: messages, service stubs and their types.

Usage: generate_proto.py ROOT [--into DIR]    (default: into ROOT/proto)
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

GENERATED = ("model_worker_pb2.py", "model_worker_pb2.pyi", "model_worker_pb2_grpc.py", "model_worker_pb2_grpc.pyi")


def generate(root: Path, into: Path) -> None:
    """Writes the `GENERATED` files into a folder.

    Raises:
        subprocess.CalledProcessError: protoc refused; its messages went to stderr.
    """
    scripts = sysconfig.get_path("scripts")
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [
                *(sys.executable, "-m", "grpc_tools.protoc", "-Imodelworker/proto=proto"),
                *(f"--python_out={scratch}", f"--pyi_out={scratch}", f"--grpc_python_out={scratch}", f"--mypy_grpc_out={scratch}"),
                "modelworker/proto/model_worker.proto",
            ],
            cwd=root,
            env={**os.environ, "PATH": os.pathsep.join((scripts, os.environ.get("PATH", "")))},
            check=True,
        )
        for name in GENERATED:
            shutil.copyfile(Path(scratch) / "modelworker" / "proto" / name, into / name)


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--into", type=Path)
    arguments = parser.parse_args()
    try:
        generate(arguments.root, arguments.into or arguments.root / "proto")
    except subprocess.CalledProcessError as error:
        return error.returncode or 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
