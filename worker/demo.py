"""`python -m modelworker.worker.demo --model DIR`: the whole product once, on this machine.

Starts a worker, waits until its health service calls it ready, and lets the reference scheduler drive it: six prompts that arrive
at different times, batched continuously, a long prompt in chunks beside sequences that decode, greedy and seeded sampling. Then it
drains the worker.
"""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from rich.console import Console

from modelworker.worker.client import Client, WorkerCallError, WorkerInfo
from modelworker.worker.client.session import FencedSession
from modelworker.worker.demo_display import Display, Pane, PaneDisplay, PlainDisplay, end_of, percentile, step_table
from modelworker.worker.demo_worker import WorkerProcess
from modelworker.worker.errors import SetupError
from modelworker.worker.flags import CommandParser, checked_type
from modelworker.worker.scheduler import (
    Event,
    FinishReason,
    KvCacheRecomputed,
    Request,
    RequestError,
    RequestFinished,
    RequestPreempted,
    Sampling,
    Scheduler,
    SchedulerSettings,
    StepExecuted,
    TokenSampled,
    WorkerAnswerError,
    WorkerChangedError,
)
from modelworker.worker.setting_values import positive_float, positive_int
from modelworker.worker.tokenization import TextStream, TextTokenizer

_EXIT_OK = 0
_EXIT_FAILED = 1
_EXIT_INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoPrompt:
    """A prompt, and the number of steps after which it arrives."""

    arrival: int
    text: str
    sampling: Sampling = field(default_factory=Sampling)


LONG_TEXT = """\
A lighthouse is a tower that shows a bright light at night, so that sailors know where the coast is. The first ones were open \
fires on hills, which somebody had to feed with wood until the morning. Later the fires were put on top of towers, so that ships \
could see them from farther away. The most famous tower of the old world stood on a small island in front of a large harbour. It \
was more than one hundred metres high, and people said that its light could be seen from fifty kilometres away. It stood for more \
than a thousand years, until earthquakes brought it down. In later times lamps with oil took the place of the fires, and large \
lenses of glass made their light into a narrow beam. Each tower got a rhythm of its own, so that a captain could count the \
seconds between two flashes and look up in a book which tower it was. Keepers lived in the towers with their families; they \
cleaned the glass, wound up the clockwork that turned the lens, and wrote down the weather. Today almost every light works by \
itself, and most keepers have gone. Ships find their way by satellite, but many towers still shine, because a light that can be \
seen needs no battery and never loses its signal."""

_TELLING = Sampling(temperature=0.8, top_k=50, seed=11)

PROMPTS = (
    DemoPrompt(arrival=0, text="What is the capital of France?"),
    DemoPrompt(arrival=0, text="Name the four seasons of the year."),
    DemoPrompt(arrival=4, text="Tell me the beginning of a story about a dragon.", sampling=_TELLING),
    DemoPrompt(arrival=8, text=f"Summarize this text in one sentence.\n\n{LONG_TEXT}"),
    DemoPrompt(arrival=14, text="Write a short poem about the moon.", sampling=Sampling(temperature=0.7, top_p=0.9, seed=7)),
    DemoPrompt(arrival=30, text="List three fruits."),
)


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Adds the command's parser."""
    text = "start a worker and generate six texts with it"
    _add_flags(subparsers.add_parser("demo", help=text, description="Starts a worker, generates six texts with it, and drains it."))


def _add_flags(parser: CommandParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="model directory, with tokenizer.json")
    add("--max-tokens", type=checked_type(positive_int), default=56, metavar="N", help="tokens to generate for each prompt")
    add("--prefill-chunk", type=checked_type(positive_int), default=64, metavar="N", help="largest piece of a prompt in a step")
    add("--plain", action="store_true", help="print lines even on a terminal")
    add(
        "--timeout",
        type=checked_type(positive_float),
        default=600.0,
        metavar="SECONDS",
        help="longest start of the worker",
    )
    add("worker_flags", nargs="*", metavar="-- FLAGS", help="flags for `modelworker serve`")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo. Returns 0 if everything went well, the worker's drain included."""
    console = Console(highlight=False)
    tokenizer = TextTokenizer.load(Path(arguments.model))
    console.print(f"starting a worker for {arguments.model}", markup=False)
    worker = WorkerProcess(Path(arguments.model), arguments.worker_flags, sys.stdout)
    try:
        _drive_and_drain(worker, tokenizer, arguments, console)
    except (SetupError, WorkerCallError, RequestError, WorkerAnswerError, WorkerChangedError) as error:
        worker.stop()
        print("\n".join(["the worker's last log lines:", *worker.last_lines]), file=sys.stderr)
        raise SetupError(str(error)) from error
    finally:
        worker.stop()
    return _EXIT_OK


def _drive_and_drain(worker: WorkerProcess, tokenizer: TextTokenizer, arguments: argparse.Namespace, console: Console) -> None:
    with worker.wait_ready(arguments.timeout) as client:
        _Demo(client, tokenizer, arguments, console).run()
    started = time.perf_counter()
    code = worker.stop()
    if code != 0:
        raise SetupError(f"the worker ended with exit code {code}")
    console.print(f"worker drained and stopped in {time.perf_counter() - started:.1f} s")


class _Demo:
    """The requests, their panes, and what happened."""

    def __init__(self, client: Client, tokenizer: TextTokenizer, arguments: argparse.Namespace, console: Console) -> None:
        self._console = console
        self._session = FencedSession(client)
        self._scheduler = Scheduler(self._session, SchedulerSettings(prefill_chunk=arguments.prefill_chunk))
        self._requests = [self._request(tokenizer, prompt, arguments.max_tokens) for prompt in PROMPTS]
        self._panes = [
            Pane(number, prompt.text, _describe(prompt.sampling), len(request.prompt_ids))
            for number, (prompt, request) in enumerate(zip(PROMPTS, self._requests, strict=True), 1)
        ]
        self._streams: list[TextStream] = [tokenizer.stream(request.prompt_ids) for request in self._requests]
        self._steps: list[StepExecuted] = []
        self._num_generated = 0
        is_plain = arguments.plain or not console.is_terminal
        self._print_worker(self._scheduler.info)
        self._display: Display = PlainDisplay(console) if is_plain else PaneDisplay(console, self._panes)

    @staticmethod
    def _request(tokenizer: TextTokenizer, prompt: DemoPrompt, max_tokens: int) -> Request:
        messages = [{"role": "user", "content": prompt.text}]
        prompt_ids = tokenizer.encode_chat(messages) if tokenizer.has_chat_template else tokenizer.encode(prompt.text)
        return Request(prompt_ids=prompt_ids, max_tokens=max_tokens, sampling=prompt.sampling)

    def run(self) -> None:
        """Generates all texts, then prints the table of steps and a summary.

        Raises:
            SetupError: a request failed.
        """
        started = time.perf_counter()
        try:
            self._drive()
        finally:
            self._display.close()
        seconds = time.perf_counter() - started
        self._console.print()
        self._console.print(step_table(self._steps))
        self._print_summary(seconds)

    def _drive(self) -> None:
        arrivals = list(enumerate(PROMPTS))
        while arrivals or not self._scheduler.is_idle:
            while arrivals and (arrivals[0][1].arrival <= len(self._steps) or self._scheduler.is_idle):
                index, _ = arrivals.pop(0)
                self._panes[index].state = "waiting"
                self._display.arrived(self._panes[index], self._session.next_step_id)
                self._scheduler.add(self._requests[index])
            for event in self._scheduler.step():
                self._take(event)

    def _take(self, event: Event) -> None:
        """Shows an event. Requests are added in the order of the panes, so their ids are the panes' indices."""
        if isinstance(event, StepExecuted):
            self._steps.append(event)
            self._display.stepped(event)
        elif isinstance(event, KvCacheRecomputed):
            raise SetupError("the worker lost its KV cache")
        else:
            pane = self._panes[event.request_id]
            if isinstance(event, TokenSampled):
                self._num_generated += 1
                pane.num_tokens += 1
                pane.state = f"{pane.num_tokens} tokens"
                if not event.is_stop:
                    self._grow(pane, self._streams[event.request_id].push(event.token_id))
            elif isinstance(event, RequestPreempted):
                pane.state = "preempted"
            elif isinstance(event, RequestFinished):
                self._grow(pane, self._streams[event.request_id].finish())
                pane.is_over = True
                pane.state = end_of(event)
                self._display.ended(pane, event)
                if event.reason is FinishReason.ERROR:
                    raise SetupError(f"request {pane.number} failed: {event.error}")

    def _grow(self, pane: Pane, piece: str) -> None:
        if piece:
            pane.text += piece
            self._display.grew(pane, piece)

    def _print_worker(self, info: WorkerInfo) -> None:
        model, cache, execution = info.model, info.kv_cache, info.execution
        self._console.print(
            f"worker ready: {model.name} ({model.architecture}, {model.num_parameters / 1e6:.0f} M parameters) in {model.dtype} "
            f"on {execution.device}, {execution.num_threads} threads, "
            f"{cache.num_blocks - 1} KV blocks of {cache.block_size} tokens",
            markup=False,
            soft_wrap=True,
        )

    def _print_summary(self, seconds: float) -> None:
        num_prompt_tokens = sum(pane.num_prompt_tokens for pane in self._panes)
        times = [step.round_trip_ms for step in self._steps]
        self._console.print(
            f"{self._num_generated} tokens generated and {num_prompt_tokens} prompt tokens read in {len(self._steps)} steps and "
            f"{seconds:.1f} s: {self._num_generated / seconds:.1f} tokens/s; step p50 {percentile(times, 50):.1f} ms, "
            f"p99 {percentile(times, 99):.1f} ms",
            markup=False,
            soft_wrap=True,
        )


def _describe(sampling: Sampling) -> str:
    if sampling.temperature == 0.0:
        return "greedy"
    parts = [f"temperature {sampling.temperature:g}"]
    if sampling.top_k:
        parts.append(f"top-k {sampling.top_k}")
    if sampling.top_p < 1.0:
        parts.append(f"top-p {sampling.top_p:g}")
    return ", ".join([*parts, f"seed {sampling.seed}"])


def main(words: Sequence[str] | None = None) -> int:
    """Runs the demo as a program of its own."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    parser = CommandParser(prog="modelworker demo", description="Starts a worker, generates six texts with it, and drains it.")
    _add_flags(parser)
    try:
        return run(parser.parse_args(words))
    except SetupError as error:
        print(f"modelworker: error: {' '.join(str(error).split())}", file=sys.stderr)
        return _EXIT_FAILED
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    """Ends the demo in order, so that no worker is left behind."""
    del frame
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
