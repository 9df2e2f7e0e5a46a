"""Builds the image for real and tries it (`make image-check`). Needs root, buildah and debootstrap, but no container engine.

Usage: image_check.py --model DIR [--base-image NAME] [--env NAME=VALUE] [--directory DIR] [--keep]

Without --base-image the base is a minimal Debian made by debootstrap. The image is built with the pip settings of this machine.
It then runs as an engine would run it: as the image's user, with its entrypoint and environment, as process 1 of namespaces of its
own, on a read-only root with the cache as the one writable path. Everything is removed at the end.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from modelworker.worker.client import Client, build_step
from modelworker.worker.health import LIVENESS_NAMES, READINESS_NAMES
from modelworker_testing.image_container import NOT_SERVING, SERVING, CheckError, Container, require

ROOT = Path(__file__).resolve().parents[2]
BASE, IMAGE = "localhost/modelworker-base", "localhost/modelworker-check"
BASE_SUITE, BASE_PACKAGES = "bookworm", "ca-certificates,python3,python3-venv,libpython3-dev"
TOOLS = ("buildah", "debootstrap", "unshare", "nsenter", "setpriv", "chroot", "mount")
# What decides where pip looks. A constraint or an option of another kind is this machine's own business.
PIP_KEYS = ("cert", "index-url", "extra-index-url", "find-links", "trusted-host", "timeout")

WRITE_EVERYWHERE = """
import json, os
outcome = {}
for path in ("/", "/app", "/etc", "/home", "/model", "/tmp", "/var/tmp", "/cache"):
    try:
        os.close(os.open(f"{path}/probe", os.O_CREAT | os.O_WRONLY))
        outcome[path] = "written"
    except OSError as error:
        outcome[path] = error.strerror
print(json.dumps(outcome))
"""

COMPILE = """
import glob, json, time, torch
x = torch.randn(1000)
expected = torch.nn.functional.silu(x) * 2 + 1
started = time.perf_counter()
torch.testing.assert_close(torch.compile(lambda x: torch.nn.functional.silu(x) * 2 + 1)(x), expected)
seconds = time.perf_counter() - started
print(json.dumps({"seconds": seconds, "libraries": len(glob.glob("/cache/inductor/**/*.so", recursive=True))}))
"""


class Report:
    """The rows of the summary; each is shown when it is known, too."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str]] = []

    def add(self, what: str, value: str) -> None:
        self.rows.append((what, value))
        print(f"   {what}: {value}", flush=True)

    def table(self) -> str:
        width = max(len(what) for what, _ in self.rows)
        return "\n".join(f"{what.ljust(width)}  {value}" for what, value in self.rows)


class Storage:
    """buildah with a storage of its own below a directory."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "build.log"
        storage = ["--root", str(directory / "storage"), "--runroot", str(directory / "run"), "--storage-driver", "vfs"]
        self._buildah = ["buildah", *storage]

    def buildah(self, *arguments: str) -> str:
        """Runs a buildah command; returns what it prints."""
        return self.run([*self._buildah, *arguments])

    def run(self, command: list[str]) -> str:
        """Runs a command; its stderr, and stdout in case of an error, go to the log."""
        with self.log.open("a") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
            log.write(done.stdout)
        if done.returncode != 0:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-25:])
            raise CheckError(f"{command[0]} ended with {done.returncode}; the end of its log:\n{tail}")
        return done.stdout.strip()


def check_machine() -> None:
    """Says what this machine lacks."""
    require(os.geteuid() == 0, "debootstrap, mounts and namespaces need root: run it as root")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    require(
        not missing, f"not installed: {', '.join(missing)} (on Debian and Ubuntu: apt-get install buildah debootstrap util-linux)"
    )


def pip_settings(listing: str) -> tuple[str, list[str]]:
    """Returns a pip.conf for the build from `pip config list`, and the local paths that it names.

    A local path in `index-url` is left out: it may point to others. Environment variables win, as they do with pip.
    """
    values: dict[str, list[str]] = {}
    lines = (line.partition("=") for line in listing.splitlines())
    for name, _, quoted in sorted(lines, key=lambda parts: parts[0].startswith(":env:")):
        key = name.removeprefix(":env:.").removeprefix("global.")
        words = [word for word in quoted.strip("'\"").split() if not (key.endswith("index-url") and word.startswith("file:"))]
        if key in PIP_KEYS and words:
            values[key] = words
    paths = [word for key in ("cert", "find-links") for word in values.get(key, ()) if Path(word).exists()]
    return "\n".join(["[global]", *(f"{key} = {' '.join(words)}" for key, words in values.items()), ""]), paths


def make_base(storage: Storage) -> None:
    """Makes the base image: a minimal Debian with Python."""
    container = storage.buildah("from", "scratch")
    root = storage.buildah("mount", container)
    storage.run(["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", BASE_SUITE, root])
    shutil.rmtree(Path(root, "var/cache/apt/archives"))
    storage.buildah("umount", container)
    storage.buildah("commit", "--rm", container, BASE)


def build(storage: Storage, directory: Path, base: str) -> None:
    """Builds the image as `make image` does, with this machine's pip settings as the secret."""
    listing = subprocess.check_output([sys.executable, "-m", "pip", "config", "list"], text=True)
    settings, paths = pip_settings(listing)
    secret = directory / "pip.conf"
    secret.write_text(settings)
    volumes = [argument for path in paths for argument in ("--volume", f"{path}:{path}:ro")]
    options = ["--isolation", "chroot", "--network", "host", "--format", "docker", "--build-arg", f"BASE_IMAGE={base}"]
    storage.buildah("bud", *options, "--secret", f"id=pip,src={secret}", *volumes, "--tag", IMAGE, str(ROOT))


def check_contents(root: Path, config: dict[str, Any]) -> None:
    """Holds what the image says of itself, and that the build left nothing behind."""
    user = config["User"].split(":")[0]
    require(user.isdecimal() and int(user) > 0, f"USER: found {config['User']!r}, expected a number that is not root's")
    require(config["Entrypoint"] == ["modelworker"], f"ENTRYPOINT: found {config['Entrypoint']}, expected the worker in exec form")
    leftovers = [
        path
        for pattern in ("build", "etc/pip.conf", "root/.cache", "tmp/*", "var/lib/apt/lists/*", "app/bin/pip*", "**/*.whl")
        for path in root.glob(pattern)
        if "ensurepip" not in path.parts and "python-wheels" not in path.parts  # the base's own
    ]
    require(not leftovers, f"the build left behind: {', '.join(f'/{path.relative_to(root)}' for path in leftovers)}")


def check_start_and_isolation(container: Container, report: Report) -> None:
    """Probes while it starts and when it is ready; tries the user, the read-only root, the health check and the compiler."""
    report.add("liveness SERVING", f"{container.wait_serving('liveness'):.1f} s after the start")
    require(container.health("readiness") == NOT_SERVING, "readiness is not NOT_SERVING while the model loads")
    report.add("readiness SERVING", f"{container.wait_serving('readiness'):.1f} s after the start")
    for name in (*LIVENESS_NAMES, *READINESS_NAMES):
        require(container.health(name) == SERVING, f"health {name!r} is not SERVING")
    report.add("health names", ", ".join(repr(name) for name in (*LIVENESS_NAMES, *READINESS_NAMES)))
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{container.pid}/status").read_text().splitlines() if ":\t" in line)
    require(status["NSpid"].split()[-1] == "1" and status["Name"] == "modelworker", f"process 1 is {status['Name']}")
    require(status["Uid"].split() == container.user.split(":")[:1] * 4, f"the worker's user is {status['Uid']}")
    require(int(status["CapEff"], 16) == 0, f"the worker has capabilities: {status['CapEff']}")
    report.add("process 1", f"{status['Name']}, user {status['Uid'].split()[0]}, no capabilities")
    outcome = json.loads(container.run("python", "-c", WRITE_EVERYWHERE))
    writable = [path for path, result in outcome.items() if result == "written"]
    require(writable == ["/cache"], f"writable paths: found {writable}, expected /cache alone: {outcome}")
    # Everybody may write there, were it not for the mount: the others may be refused by their permissions alone.
    require(outcome["/tmp"] == "Read-only file system", f"/tmp: found {outcome['/tmp']!r}, expected a read-only file system")
    report.add("writable", "/cache alone")
    compiled = json.loads(container.run("python", "-c", COMPILE))
    require(compiled["libraries"] > 0, "torch.compile left no library in /cache/inductor")
    report.add("compiled op", f"{compiled['seconds']:.1f} s, {compiled['libraries']} libraries in /cache/inductor")


def check_health_command(container: Container, config: dict[str, Any], report: Report) -> None:
    """Runs the image's HEALTHCHECK."""
    kind, command = config["Healthcheck"]["Test"]
    require(kind == "CMD-SHELL", f"HEALTHCHECK: found {kind}, expected a shell command")
    started = time.monotonic()
    container.run("sh", "-c", command)
    report.add("HEALTHCHECK", f"healthy in {time.monotonic() - started:.1f} s")


def check_generation(container: Container, model: Path, report: Report) -> None:
    """Generates greedily with the worker, from this machine."""
    command = [sys.executable, "-m", "modelworker.worker.cli", "generate", "--address", container.address]
    prompt = ["--tokenizer", str(model), "--no-chat", "--prompt", "The capital of France is", "--max-tokens", "16", "--json"]
    done = subprocess.run([*command, *prompt], capture_output=True, text=True, check=False, timeout=300)
    require(done.returncode == 0, f"generate failed: {done.stderr.strip()}")
    found = json.loads(done.stdout)["results"][0]
    require("Paris" in found["text"], f"generate: found {found['text']!r}, expected Paris in it")
    report.add(
        "generated", f"{len(found['output_ids'])} tokens, {found['timings']['tokens_per_second']:.1f} tokens/s: {found['text']!r}"
    )


def check_drain(container: Container, report: Report) -> None:
    """Sends SIGTERM while a step runs: the step is answered, readiness falls, the exit code is 0."""
    with Client(container.address) as client, ThreadPoolExecutor() as pool:
        info = client.info()
        client.reset_kv_cache(info.worker_epoch)
        length = min(256, info.limits.max_tokens_per_step)
        blocks = list(range(1, 1 + -(-length // info.kv_cache.block_size)))
        request = build_step(
            query_lens=[length], context_lens=[0], token_ids=[1] * length, block_counts=[len(blocks)], block_ids=blocks
        )
        step = pool.submit(client.execute, request, 60.0)
        time.sleep(0.3)
        require(not step.done(), "the step that was to be in flight is over already")
        stopped = time.monotonic()
        container.terminate()
        time.sleep(0.1)
        require(container.health("readiness") == NOT_SERVING, "readiness is not NOT_SERVING while the worker drains")
        step.result()
        answered = time.monotonic() - stopped
    code = container.wait_end()
    require(code == 0, f"exit code after SIGTERM: found {code}, expected 0:\n{container.log_path.read_text()}")
    took = time.monotonic() - stopped
    report.add("SIGTERM in a step", f"step of {length} tokens answered {answered:.1f} s after it, exit 0 after {took:.1f} s")


def check_stop_while_loading(container: Container, report: Report) -> None:
    """Sends SIGTERM before the model is loaded."""
    container.wait_serving("liveness")
    stopped = time.monotonic()
    container.terminate()
    code = container.wait_end()
    require(code == 0, f"exit code after SIGTERM while loading: found {code}, expected 0:\n{container.log_path.read_text()}")
    report.add("SIGTERM while loading", f"exit 0 after {time.monotonic() - stopped:.1f} s")


@contextlib.contextmanager
def scratch(directory: Path, keep: bool) -> Iterator[Path]:
    """A folder that is removed at the end; never through a mount that something left in it."""
    require(not directory.exists(), f"{directory} exists: another check runs, or left it; remove it first")
    directory.mkdir(parents=True)
    try:
        yield directory
    finally:
        if not keep:
            subprocess.run(["rm", "-rf", "--one-file-system", str(directory)], check=True)


def timed(report: Report, what: str, action: Callable[[], None]) -> None:
    """Does something and reports how long it took."""
    started = time.monotonic()
    action()
    report.add(what, f"{time.monotonic() - started:.0f} s")


def size_rows(root: Path, storage: Storage) -> Iterator[tuple[str, str]]:
    """The size of the image and of its largest parts."""
    images = json.loads(storage.buildah("images", "--json"))
    for name, label in ((IMAGE, "image size"), (BASE, "  of it the base")):
        sizes = [image["size"] for image in images if any(each.startswith(name) for each in image["names"] or ())]
        if sizes:
            yield label, sizes[0]
    for label, path in (
        ("  Python packages", "app"),
        ("    of them torch", "app/lib/*/site-packages/torch"),
        ("  g++", "usr/lib/gcc"),
    ):
        for found in root.glob(path):
            yield label, subprocess.check_output(["du", "-sh", str(found)], text=True).split()[0]


def check_image(arguments: argparse.Namespace, directory: Path, report: Report) -> None:
    """Builds and tries the image."""
    storage = Storage(directory)
    base = arguments.base_image or BASE
    if not arguments.base_image:
        print("== making the base with debootstrap", flush=True)
        timed(report, "base made", lambda: make_base(storage))
    print(f"== building the image (log: {storage.log})", flush=True)
    timed(report, "image built", lambda: build(storage, directory, base))
    config = json.loads(storage.buildah("inspect", "--type", "image", IMAGE))["Docker"]["config"]
    root = Path(storage.buildah("mount", storage.buildah("from", "--pull-never", IMAGE)))
    for what, value in size_rows(root, storage):
        report.add(what, value)
    check_contents(root, config)
    print("== running it", flush=True)
    with contextlib.closing(Container(root, config, arguments.model, arguments.env, directory / "loading.log")) as container:
        check_stop_while_loading(container, report)
    with contextlib.closing(Container(root, config, arguments.model, arguments.env, directory / "worker.log")) as container:
        check_start_and_isolation(container, report)
        check_health_command(container, config, report)
        check_generation(container, arguments.model, report)
        check_drain(container, report)


def main() -> int:
    """Runs the command line; exits with 1 when the image is not as it has to be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, required=True, help="model directory, with tokenizer.json; it should know the capital of France"
    )
    parser.add_argument("--base-image", default="", help="an image that buildah can pull, instead of a Debian made here")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for the worker; repeatable")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "image-check", help="scratch folder; about 10 GB")
    parser.add_argument("--keep", action="store_true", help="leave the folder with images and logs")
    arguments = parser.parse_args()
    arguments.model = arguments.model.resolve()
    report = Report()
    # SIGTERM ends the check in order, so that nothing is left behind.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        check_machine()
        require((arguments.model / "config.json").is_file(), f"{arguments.model} is no model directory: it has no config.json")
        with scratch(arguments.directory.resolve(), arguments.keep) as directory:
            check_image(arguments, directory, report)
    except CheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"\n{report.table()}\nthe image is as it has to be")
    return 0


if __name__ == "__main__":
    sys.exit(main())
