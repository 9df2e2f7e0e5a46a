"""A worker process around a `SumEngine`, with the flags of `modelworker serve` and some of its own."""

import sys
import time
from pathlib import Path

from modelworker.worker.batch import StepBatch
from modelworker.worker.command_serve import run_worker
from modelworker.worker.counters import Counters
from modelworker.worker.errors import FatalEngineError, SetupError
from modelworker.worker.flags import CommandParser, add_settings, read_settings
from modelworker.worker.progress import Progress
from modelworker.worker.settings import WorkerSettings
from modelworker_testing.serving import SumEngine

DEVICE_FAULT_TOKEN = 999


def main() -> int:
    parser = CommandParser(prog="sum_worker")
    add_settings(parser, WorkerSettings)
    parser.add_argument("--build-seconds", type=float, default=0.0)
    parser.add_argument("--gate", type=Path, default=None, help="no step ends, and no build fails, before this file is there")
    parser.add_argument("--build-error", default="")
    arguments = parser.parse_args()

    def wait_for_gate() -> None:
        while arguments.gate is not None and not arguments.gate.exists():
            time.sleep(0.01)

    def build(settings: WorkerSettings, progress: Progress, counters: Counters) -> SumEngine:
        with progress.stage("loading weights", 100, "tensors") as advance:
            advance(43)
            time.sleep(arguments.build_seconds)
        if arguments.build_error:
            wait_for_gate()
            raise SetupError(arguments.build_error)
        engine = SumEngine(settings)
        engine.before_step = before_step
        return engine

    def before_step(batch: StepBatch) -> None:
        if DEVICE_FAULT_TOKEN in batch.token_ids:
            raise FatalEngineError("the device is gone")
        wait_for_gate()

    try:
        return run_worker(read_settings(WorkerSettings, arguments), build)
    except SetupError as error:
        print(f"modelworker: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
