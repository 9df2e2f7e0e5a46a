"""`modelworker generate`: text from a running worker, driven by the reference scheduler."""

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from modelworker.worker.client import Client, WorkerCallError
from modelworker.worker.client.session import FencedSession
from modelworker.worker.client.stream_session import StreamSession
from modelworker.worker.errors import SettingsError, SetupError
from modelworker.worker.flags import CommandParser, checked_type
from modelworker.worker.generation import Generation, TextPrinter
from modelworker.worker.scheduler import (
    Event,
    FinishReason,
    KvCacheRecomputed,
    Request,
    RequestError,
    RequestFinished,
    Sampling,
    Scheduler,
    SchedulerSettings,
    StepExecuted,
    TokenSampled,
    WorkerAnswerError,
    WorkerChangedError,
)
from modelworker.worker.setting_values import non_negative_int, positive_float, positive_int
from modelworker.worker.tokenization import TextTokenizer

_EXIT_OK = 0
_EXIT_FAILED = 1
# Parameters of a request whose flags have other names.
_FLAGS = MappingProxyType({"num_logprobs": "logprobs", "num_drafts": "speculate"})


def add_parser(subparsers: "argparse._SubParsersAction[CommandParser]") -> None:
    """Adds the command's parser."""
    parser = subparsers.add_parser(
        "generate",
        help="generate text with a running worker",
        description="Generates text with a running worker. Several prompts are batched; their texts are printed in order.",
    )
    add = parser.add_argument
    add("--address", default="127.0.0.1:50051", metavar="HOST:PORT", help="the worker")
    add("--prompt", action="append", default=[], metavar="TEXT", help="a text to continue or answer; repeatable; - reads stdin")
    add("--prompt-ids", action="append", default=[], metavar="IDS", help="a prompt as token ids, e.g. 1,2,3; repeatable")
    add("--tokenizer", default="", metavar="DIR", help="tokenizer.json or the model directory that has it; --prompt needs it")
    add(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="put each --prompt into the model's chat template; default: if it has one",
    )
    add("--system", default="", metavar="TEXT", help="system message of the chat")
    add("--max-tokens", type=checked_type(positive_int), default=128, metavar="N", help="largest number of tokens to generate")
    add("--temperature", type=float, default=0.0, metavar="T", help="0: always the most probable token")
    add("--top-k", type=int, default=0, metavar="K", help="sample among the K most probable tokens; 0: all")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample among the most probable tokens that sum up to P")
    add("--min-p", type=float, default=0.0, metavar="P", help="sample among tokens of at least P times the highest probability")
    add("--seed", type=int, default=None, metavar="SEED", help="makes sampling repeatable")
    add("--presence", type=float, default=0.0, metavar="X", help="subtracted from the logits of tokens that are in the output")
    add("--frequency", type=float, default=0.0, metavar="X", help="subtracted for each time that a token is in the output")
    add("--repetition", type=float, default=1.0, metavar="X", help="above 1: tokens of prompt and output become less probable")
    add(
        "--logprobs",
        type=int,
        default=-1,
        metavar="N",
        help="with --json: logprobs of each token (0), and of the N most probable where the worker can",
    )
    add("--n", type=checked_type(positive_int), default=1, metavar="N", help="texts for each prompt; its KV blocks are shared")
    add(
        "--speculate",
        type=checked_type(non_negative_int),
        default=0,
        metavar="K",
        help="guess K tokens ahead from the text itself, and have the worker verify them in one step; 0: don't",
    )
    add(
        "--pipeline",
        type=checked_type(positive_int),
        default=1,
        metavar="N",
        help="steps that may be on their way at once; more than 1 go over a stream, before the tokens of those before are known",
    )
    add("--ignore-eos", action="store_true", help="go on after the model's end-of-sequence tokens")
    add("--json", action="store_true", help="print one JSON object at the end instead of texts")
    add("--timeout", type=checked_type(positive_float), default=60.0, metavar="SECONDS", help="patience with the worker")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Generates and prints. Returns 0 if every prompt was served."""
    tokenizer = TextTokenizer.load(Path(arguments.tokenizer)) if arguments.tokenizer else None
    generations = _generations(arguments, tokenizer)
    printer = None if arguments.json else TextPrinter(generations, sys.stdout)
    try:
        with Client(arguments.address) as client:
            steps = _generate(client, generations, arguments, printer.update if printer else None)
    except (WorkerCallError, WorkerAnswerError, WorkerChangedError) as error:
        raise SetupError(f"worker at {arguments.address}: {error}") from error
    if arguments.json:
        print(json.dumps(_report(generations, steps), ensure_ascii=False, indent=2))
    failed = [each.finished for each in generations if each.finished and each.finished.reason is FinishReason.ERROR]
    for finished in failed:
        print(f"modelworker: error: prompt {finished.request_id // arguments.n + 1}: {finished.error}", file=sys.stderr)
    return _EXIT_FAILED if failed else _EXIT_OK


def _generations(arguments: argparse.Namespace, tokenizer: TextTokenizer | None) -> list[Generation]:
    prompts: list[tuple[str | None, tuple[int, ...]]] = []
    for text in arguments.prompt:
        if tokenizer is None:
            raise SettingsError("--prompt needs --tokenizer: a tokenizer.json, or the model directory that has it")
        prompt = sys.stdin.read() if text == "-" else text
        prompts.append((prompt, _encode(tokenizer, prompt, arguments)))
    prompts += [(None, _parse_ids(text)) for text in arguments.prompt_ids]
    if not prompts:
        raise SettingsError("no prompt: give --prompt TEXT or --prompt-ids IDS")
    sampling = Sampling(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.seed,
        presence=arguments.presence,
        frequency=arguments.frequency,
        repetition=arguments.repetition,
        num_logprobs=arguments.logprobs,
    )
    try:
        sampling.check()
    except RequestError as error:
        raise SettingsError(_in_flags(error, None)) from None
    stop_token_ids = frozenset[int]() if arguments.ignore_eos else None
    generations = []
    for prompt_text, prompt_ids in prompts:
        request = Request(prompt_ids=prompt_ids, max_tokens=arguments.max_tokens, sampling=sampling, stop_token_ids=stop_token_ids)
        for _ in range(arguments.n):
            stream = tokenizer.stream(prompt_ids) if tokenizer else None
            generations.append(Generation(prompt_text, request, stream))
    return generations


def _encode(tokenizer: TextTokenizer, prompt: str, arguments: argparse.Namespace) -> tuple[int, ...]:
    if not (tokenizer.has_chat_template if arguments.chat is None else arguments.chat):
        return tokenizer.encode(prompt)
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    return tokenizer.encode_chat([*system, {"role": "user", "content": prompt}])


def _parse_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.replace(",", " ").split())
    except ValueError:
        raise SettingsError(f"--prompt-ids: {text!r} is not a list of token ids: expected something like 1,2,3") from None


def _generate(
    client: Client, generations: list[Generation], arguments: argparse.Namespace, on_progress: Callable[[], None] | None
) -> list[StepExecuted]:
    """Drives the worker until all prompts are served; gives its lease back in any case. Returns the steps."""
    states: list[str] = []

    def tell(state: str) -> None:
        if state not in states[-1:]:
            states.append(state)
            print(f"modelworker: waiting for the worker: {state}", file=sys.stderr)

    client.wait_ready(arguments.timeout, tell)
    session = _session(client, arguments)
    steps: list[StepExecuted] = []
    try:
        scheduler = Scheduler(session, SchedulerSettings(num_drafts=arguments.speculate))
        by_id: dict[int, Generation] = {}
        for start in range(0, len(generations), arguments.n):
            group = generations[start : start + arguments.n]
            try:
                by_id |= zip(scheduler.add_continuations(group[0].request, arguments.n), group, strict=True)
            except RequestError as error:
                of = f"prompt {start // arguments.n + 1}: " if len(generations) > arguments.n else ""
                raise SetupError(f"worker at {arguments.address}: {of}{_in_flags(error, group[0].prompt)}") from error

        def take(event: Event) -> None:
            if isinstance(event, StepExecuted):
                steps.append(event)
            elif isinstance(event, TokenSampled | RequestFinished):
                by_id[event.request_id].take(event)
            elif isinstance(event, KvCacheRecomputed) and steps:
                print("modelworker: warning: the worker lost its KV cache: starting over from the tokens", file=sys.stderr)
            if on_progress is not None:
                on_progress()

        scheduler.run_until_idle(take)
    finally:
        with suppress(WorkerCallError):
            session.release()
    return steps


def _session(client: Client, arguments: argparse.Namespace) -> FencedSession:
    if arguments.pipeline == 1:
        return FencedSession(client, patience=arguments.timeout)
    session = StreamSession(client, patience=arguments.timeout, max_unanswered=arguments.pipeline)
    if missing := {"ExecuteSteps", "sequence_ids", "finished_sequence_ids"}.difference(session.info.capabilities):
        raise SetupError(f"--pipeline: this worker does not implement {', '.join(sorted(missing))}")
    return session


def _report(generations: list[Generation], steps: list[StepExecuted]) -> dict[str, Any]:
    seconds = max(each.ended_at for each in generations) - min(each.started for each in generations)
    num_tokens = sum(len(each.finished.output_ids) for each in generations if each.finished)
    return {
        "results": [generation.result() for generation in generations],
        "num_steps": len(steps),
        "num_drafts": sum(step.num_drafts for step in steps),
        "num_accepted": sum(step.num_accepted for step in steps),
        "total_ms": round(seconds * 1e3, 3),
        "tokens_per_second": round(num_tokens / max(seconds, 1e-9), 3),
    }


def _in_flags(error: RequestError, prompt: str | None) -> str:
    """Says what is wrong with a request, whose prompt may have been a text, by the names that the command has for it."""
    name, *index = error.parameter.partition("[")
    if name == "prompt_ids" and prompt is not None:
        return f"--prompt: {error.problem}"
    return f"--{_FLAGS.get(name, name).replace('_', '-')}{''.join(index)}: {error.problem}"
