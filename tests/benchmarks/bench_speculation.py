"""Measures what drafts from a sequence's own text gain: milliseconds a token with and without, batch 1. One JSON object per line.

    python tests/benchmarks/bench_speculation.py [--model DIR] [--rounds N] [--tokens N] [--threads N]

A worker with FULL graphs for decodes of one token and of 1 + K, and the reference router with K drafts and without, in turns, over
a text that repeats itself (a list to be copied) and over one that does not. Tokens are the same, which is checked.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from modelworker.worker.client import Client, FencedSession
from modelworker.worker.machine import choose_threads, read_machine
from modelworker.worker.scheduler import Event, Request, Scheduler, SchedulerSettings, StepExecuted
from modelworker.worker.tokenization import TextTokenizer
from modelworker_testing.worker_process import worker_process

ROOT = Path(__file__).resolve().parents[2]
NUM_DRAFTS = 4
LIST = "\n".join(
    f"{number}. The {animal} lives in the forest and eats berries." for number, animal in enumerate(("fox", "bear", "owl"), 1)
)
TEXTS = {
    "repeats itself": f"Copy this list three times, word by word:\n{LIST}",
    "new text": "Write a story about a child who finds a map in the attic of an old house by the sea.",
}


def generate(client: Client, request: Request, num_drafts: int) -> tuple[tuple[int, ...], float, list[StepExecuted]]:
    """Returns the tokens, the milliseconds of each after the first, and the steps."""
    session = FencedSession(client)
    scheduler = Scheduler(session, SchedulerSettings(num_drafts=num_drafts))
    scheduler.add(request)
    events: list[Event] = []
    for event in scheduler.step():  # the prompt
        events.append(event)
    begun = time.perf_counter()
    (finished,) = scheduler.run_until_idle(events.append).values()
    seconds = time.perf_counter() - begun
    session.release()
    steps = [event for event in events if isinstance(event, StepExecuted)]
    return finished.output_ids, 1000 * seconds / (len(finished.output_ids) - 1), steps


def results(model: Path, num_threads: int, rounds: int, num_tokens: int) -> Iterator[dict[str, object]]:
    tokenizer = TextTokenizer.load(model)
    flags = (
        *("--threads", str(num_threads), "--cache-dir", str(ROOT / "build"), "--log-level", "error"),
        *("--num-blocks", "300", "--max-sequences", "8", "--decode-query-lens", f"1,{1 + NUM_DRAFTS}"),
    )
    with worker_process(model, *flags) as worker, Client(worker.address) as client:
        for name, text in TEXTS.items():
            prompt_ids = tokenizer.encode_chat([{"role": "user", "content": text}])
            request = Request(prompt_ids=prompt_ids, max_tokens=num_tokens, stop_token_ids=frozenset())
            times: dict[int, list[float]] = {0: [], NUM_DRAFTS: []}
            outputs, steps = {}, {}
            for _ in range(rounds):
                for num_drafts, measured in times.items():
                    outputs[num_drafts], milliseconds, steps[num_drafts] = generate(client, request, num_drafts)
                    measured.append(milliseconds)
            for num_drafts, measured in times.items():
                executed = steps[num_drafts]
                yield {
                    "text": name,
                    "drafts": num_drafts,
                    "ms_per_token": round(statistics.median(measured), 3),
                    "min_ms": round(min(measured), 3),
                    "max_ms": round(max(measured), 3),
                    "tokens_per_step": round((num_tokens - 1) / (len(executed) - 1), 2),
                    "accepted": sum(step.num_accepted for step in executed),
                    "drafted": sum(step.num_drafts for step in executed),
                    "equal_tokens": sum(one == other for one, other in zip(outputs[num_drafts], outputs[0], strict=True)),
                    "gain": round(statistics.median(times[0]) / statistics.median(measured), 3),
                }


def main() -> None:
    """Runs all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens to generate (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="threads that compute (default: the CPU quota)")
    options = parser.parse_args()
    num_threads = options.threads or choose_threads(None, read_machine())[0]
    for record in results(options.model, num_threads, options.rounds, options.tokens):
        print(json.dumps({"benchmark": "speculation", **record, "threads": num_threads, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
