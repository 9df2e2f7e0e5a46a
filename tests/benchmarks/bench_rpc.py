"""Measures what calling a worker costs over its step: single calls, a stream, and a stream with steps in flight.

    python tests/benchmarks/bench_rpc.py [--model DIR] [--steps N] [--rounds N] [--threads N]

Four processes: a worker, this one as its client, one that executes the same steps in itself, and a bare gRPC server; they take
turns. One JSON object per line. `rpc_overhead`: the round trip of a sequenced step less the time in its engine, for calls and for a
stream with one step in flight; "bare" is the same of the bare server, whose calls sleep as long as a step takes: what gRPC and the
client need on this machine. `rpc_throughput`: steps a second of a stream with `--depth` steps in flight, against the in-process
engine, which gets checked batches. A small model shows the overhead best, a real one what it is a part of.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import torch
from bare_rpc import CALL, STREAM
from bare_rpc import SERVICE as BARE_SERVICE

from modelworker.proto import model_worker_pb2 as pb
from modelworker.worker.client import AsyncClient, Client, WorkerInfo
from modelworker.worker.counters import Counters
from modelworker.worker.machine import choose_threads, read_machine
from modelworker.worker.payload import PayloadShape, WorkerShape, build_payload
from modelworker.worker.progress import LogProgress
from modelworker.worker.settings import CacheSettings, DeviceSettings, KvCacheSettings, ModelSettings, StepSettings, WorkerSettings
from modelworker.worker.startup import build_engine
from modelworker.worker.wire import parse_step

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / "build"
BATCHES = (1, 16)
CONTEXT_LEN = 128
NUM_BLOCKS = 400
MAX_SEQUENCES = 16
MAX_TOKENS = 256
WARM_UP_STEPS = 20
SERVICE = "/modelworker.v1.ModelWorker"


@dataclass(frozen=True)
class Setup:
    """What is measured, and how often."""

    model: Path
    num_threads: int
    num_steps: int
    num_rounds: int
    depth: int


# -- the worker ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def worker(setup: Setup) -> Iterator[str]:
    """Runs a worker; yields its address."""
    with tempfile.TemporaryDirectory() as folder:
        port_file = Path(folder, "port")
        command = [
            *(sys.executable, "-m", "modelworker.worker.cli", "serve", "--model", str(setup.model)),
            *("--port", "0", "--port-file", str(port_file), "--cache-dir", str(CACHE), "--log-level", "error"),
            *("--threads", str(setup.num_threads), "--num-blocks", str(NUM_BLOCKS)),
            *("--max-sequences", str(MAX_SEQUENCES), "--max-tokens-per-step", str(MAX_TOKENS)),
        ]
        process = subprocess.Popen(command, env={**os.environ, "PYTHONSAFEPATH": "1"}, stdout=subprocess.DEVNULL)
        try:
            while not port_file.exists():
                if process.poll() is not None:
                    raise SystemExit(f"error: the worker ended with {process.returncode}")
                time.sleep(0.01)
            address = f"127.0.0.1:{port_file.read_text().strip()}"
            with Client(address) as client:
                client.wait_ready(300)
            yield address
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


# -- the same steps in a process -----------------------------------------------------------------------------------------------


class InProcess:
    """A child that executes steps in itself, when it is told to: seconds of each come back."""

    def __init__(self, setup: Setup) -> None:
        command = [sys.executable, __file__, "--engine", "--model", str(setup.model), "--threads", str(setup.num_threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def seconds(self, batch: int, num_steps: int) -> list[float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(batch, num_steps, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("error: the process that executes steps in itself has ended")
        times: list[float] = json.loads(line)
        return times

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def run_engine(model: Path, num_threads: int) -> None:
    """Is the child: reads a batch and a number of steps from each line."""
    settings = WorkerSettings(
        model=ModelSettings(model=str(model)),
        kv_cache=KvCacheSettings(num_blocks=NUM_BLOCKS),
        step=StepSettings(max_sequences=MAX_SEQUENCES, max_tokens_per_step=MAX_TOKENS),
        device=DeviceSettings(device="cpu", threads=num_threads),
        cache=CacheSettings(cache_dir=str(CACHE)),
    )
    engine = build_engine(settings, LogProgress(), Counters())
    description = engine.description
    shape = WorkerShape(
        vocab_size=description.model.vocab_size,
        block_size=description.kv_cache.block_size,
        num_blocks=description.kv_cache.num_blocks,
    )
    for line in sys.stdin:
        batch, num_steps = map(int, line.split())
        request = build_payload(PayloadShape(num_sequences=batch, context_len=CONTEXT_LEN), shape, 1)
        step = parse_step(request, description, arrival_ns=0, deadline_ns=None)
        times = []
        for _ in range(WARM_UP_STEPS + num_steps):
            begun = time.perf_counter()
            engine.step(step)
            times.append(time.perf_counter() - begun)
        print(json.dumps(times[WARM_UP_STEPS:]), flush=True)


# -- the client ----------------------------------------------------------------------------------------------------------------


class Caller:
    """Sends sequenced steps of one shape and measures them."""

    def __init__(self, channel: grpc.aio.Channel, info: WorkerInfo, batch: int) -> None:
        self._channel = channel
        self._info = info
        self._request = build_payload(PayloadShape(num_sequences=batch, context_len=CONTEXT_LEN), WorkerShape.of(info), 1)
        self._request.worker_epoch, self._request.router_id = info.worker_epoch, 1
        self._call = channel.unary_unary(f"{SERVICE}/ExecuteStep", None, pb.ExecuteStepResponse.FromString)
        self._stream = channel.stream_stream(f"{SERVICE}/ExecuteSteps", None, pb.ExecuteStepsResponse.FromString)

    def requests(self, first_id: int, number: int) -> Iterator[bytes]:
        for step_id in range(first_id, first_id + number):
            self._request.step_id = step_id
            yield self._request.SerializeToString()

    async def calls(self, first_id: int, number: int) -> list[float]:
        """Sends steps one at a time, as calls. Returns the overhead of each in seconds."""
        overheads = []
        for request in list(self.requests(first_id, number)):
            begun = time.perf_counter_ns()
            answer = await self._call(request)
            overheads.append((time.perf_counter_ns() - begun - _engine_ns(answer)) / 1e9)
        return overheads

    async def streamed(self, first_id: int, number: int) -> list[float]:
        """Sends steps one at a time, on a stream. Returns the overhead of each in seconds."""
        stream = self._stream()
        overheads = []
        for request in list(self.requests(first_id, number)):
            begun = time.perf_counter_ns()
            await stream.write(request)
            answer = await stream.read()
            overheads.append((time.perf_counter_ns() - begun - _engine_ns(answer.ok)) / 1e9)
        await stream.done_writing()
        return overheads

    async def pipelined(self, first_id: int, number: int, depth: int) -> float:
        """Keeps several steps in flight on a stream. Returns steps per second."""
        stream = self._stream()
        requests = deque(self.requests(first_id, number))
        begun = time.perf_counter()
        for _ in range(depth):
            await stream.write(requests.popleft())
        for _ in range(number):
            answer = await stream.read()
            assert answer.WhichOneof("result") == "ok", answer.error
            if requests:
                await stream.write(requests.popleft())
        seconds = time.perf_counter() - begun
        await stream.done_writing()
        return number / seconds


class BareCaller:
    """Calls a server that only sleeps, and measures what comes on top."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = channel.unary_unary(f"/{BARE_SERVICE}/{CALL}")
        self._stream = channel.stream_stream(f"/{BARE_SERVICE}/{STREAM}")

    async def calls(self, seconds: float, number: int) -> list[float]:
        """Has single calls sleep. Returns the overhead of each in seconds."""
        overheads = []
        for _ in range(number):
            begun = time.perf_counter()
            held = await self._call(struct.pack("d", seconds))
            overheads.append(time.perf_counter() - begun - struct.unpack("d", held)[0])
        return overheads

    async def streamed(self, seconds: float, number: int) -> list[float]:
        """The same on a stream."""
        stream = self._stream()
        overheads = []
        for _ in range(number):
            begun = time.perf_counter()
            await stream.write(struct.pack("d", seconds))
            held = await stream.read()
            overheads.append(time.perf_counter() - begun - struct.unpack("d", held)[0])
        await stream.done_writing()
        return overheads


@contextlib.contextmanager
def bare_server() -> Iterator[str]:
    """Runs a bare server; yields its address."""
    command = [sys.executable, str(Path(__file__).with_name("bare_rpc.py"))]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONSAFEPATH": "1"}, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.communicate()


def _engine_ns(answer: pb.ExecuteStepResponse) -> int:
    timings = answer.timings_ns
    if not timings.forward:
        raise SystemExit(f"error: a step was not executed: {answer}")
    return timings.prepare + timings.forward + timings.sample


async def measure(setup: Setup, address: str, bare_address: str, in_process: InProcess) -> Iterator[dict[str, object]]:
    """Takes all measurements, round by round. Returns the results."""
    records: list[dict[str, object]] = []
    async with (
        AsyncClient(address) as client,
        grpc.aio.insecure_channel(address) as channel,
        grpc.aio.insecure_channel(bare_address) as bare_channel,
    ):
        bare = BareCaller(bare_channel)
        next_id = 1
        for batch in BATCHES:
            caller = Caller(channel, await client.info(), batch)
            overheads: dict[str, list[float]] = {"call": [], "stream": [], "bare call": [], "bare stream": []}
            engine_seconds: list[float] = []
            rates: list[tuple[float, float]] = []
            for _ in range(setup.num_rounds):
                seconds = in_process.seconds(batch, setup.num_steps)
                engine_seconds += seconds
                for way, send in (("call", caller.calls), ("stream", caller.streamed)):
                    overheads[way] += (await send(next_id, WARM_UP_STEPS + setup.num_steps))[WARM_UP_STEPS:]
                    next_id += WARM_UP_STEPS + setup.num_steps
                for way, hold in (("bare call", bare.calls), ("bare stream", bare.streamed)):
                    overheads[way] += await hold(statistics.median(seconds), setup.num_steps)
                rate = await caller.pipelined(next_id, setup.num_steps, setup.depth)
                next_id += setup.num_steps
                rates.append((rate, len(seconds) / sum(seconds)))
            for way, values in overheads.items():
                records.append(_overhead_record(batch, way, values, engine_seconds))
            records.append(_throughput_record(batch, setup.depth, rates))
    return iter(records)


def _overhead_record(batch: int, way: str, overheads: list[float], engine_seconds: list[float]) -> dict[str, object]:
    centiles = statistics.quantiles(overheads, n=100)
    return {
        "benchmark": "rpc_overhead",
        "batch": batch,
        "way": way,
        "p50_ms": round(1000 * centiles[49], 4),
        "p99_ms": round(1000 * centiles[98], 4),
        "min_ms": round(1000 * min(overheads), 4),
        "in_process_step_p50_ms": round(1000 * statistics.median(engine_seconds), 4),
        "steps": len(overheads),
    }


def _throughput_record(batch: int, depth: int, rates: list[tuple[float, float]]) -> dict[str, object]:
    return {
        "benchmark": "rpc_throughput",
        "batch": batch,
        "way": f"stream, {depth} in flight",
        "steps_per_second": round(statistics.median(rate for rate, _ in rates), 2),
        "in_process_steps_per_second": round(statistics.median(rate for _, rate in rates), 2),
        # Of the same round: what the machine does meanwhile is the same for both.
        "of_in_process": round(statistics.median(rate / alone for rate, alone in rates), 4),
    }


def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=100, help="of each kind in a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--depth", type=int, default=4, help="steps in flight of the pipelined stream (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads that compute (default: the CPU quota)")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    num_threads = options.threads or choose_threads(None, read_machine())[0]
    if options.engine:
        run_engine(options.model, num_threads)
        return
    setup = Setup(options.model, num_threads, options.steps, options.rounds, options.depth)
    machine = {"threads": num_threads, "python": platform.python_version(), "grpc": grpc.__version__, "torch": torch.__version__}
    in_process = InProcess(setup)
    try:
        with worker(setup) as address, bare_server() as bare_address:
            for record in asyncio.run(measure(setup, address, bare_address, in_process)):
                print(json.dumps({**record, **machine}), flush=True)
    finally:
        in_process.close()


if __name__ == "__main__":
    main()
