"""What becomes of a prompt: its tokens, its text as it grows, and its entry of `--json`."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

from modelworker.worker.scheduler import Request, RequestFinished, TokenLogprobs, TokenSampled
from modelworker.worker.tokenization import TextStream


@dataclass(eq=False, slots=True)
class Generation:
    """One prompt and what became of it.

    Attributes:
        prompt: its text, None where it was given as token ids.
        request: what the scheduler is asked for.
        stream: makes text of tokens; None: there is no tokenizer.
        pieces: of the text as far as it is known; token ids without a tokenizer.
        logprobs: of each token, None where none were asked for.
        started: `time.perf_counter()`, as for the rest.
        first_token_at: None: there is none yet.
        ended_at: 0 while it runs.
        finished: how it ended, None while it runs.
    """

    prompt: str | None
    request: Request
    stream: TextStream | None
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    ended_at: float = 0.0
    finished: RequestFinished | None = None

    def take(self, event: TokenSampled | RequestFinished) -> None:
        """Takes a token or the end."""
        if isinstance(event, TokenSampled):
            self.first_token_at = self.first_token_at or time.perf_counter()
            self.logprobs.append(event.logprobs)
            if not event.is_stop:
                self.pieces.append(self._piece(event.token_id))
        else:
            self.finished = event
            self.ended_at = time.perf_counter()
            self.pieces.append(self.stream.finish() if self.stream else "")

    def _piece(self, token_id: int) -> str:
        return self.stream.push(token_id) if self.stream else f"{token_id} "

    def result(self) -> dict[str, Any]:
        """Returns the entry of `--json`."""
        assert self.finished is not None
        seconds = self.ended_at - self.started
        first = None if self.first_token_at is None else round((self.first_token_at - self.started) * 1e3, 3)
        result: dict[str, Any] = {
            "prompt": self.prompt,
            "prompt_ids": list(self.request.prompt_ids),
            "output_ids": list(self.finished.output_ids),
            "text": "".join(self.pieces) if self.stream else None,
            "finish_reason": self.finished.reason.value,
            "error": self.finished.error or None,
            "timings": {
                "first_token_ms": first,
                "total_ms": round(seconds * 1e3, 3),
                "tokens_per_second": round(len(self.finished.output_ids) / max(seconds, 1e-9), 3),
            },
        }
        if self.request.sampling.num_logprobs >= 0:
            result["logprobs"] = [None if each is None else asdict(each) for each in self.logprobs]
        return result


class TextPrinter:
    """Prints texts as they grow, in the order of the prompts: one streams, those after it wait for their turn."""

    def __init__(self, generations: list[Generation], out: TextIO) -> None:
        self._generations = generations
        self._out = out
        self._current = 0
        self._num_printed = 0

    def update(self) -> None:
        """Prints what is new."""
        while self._current < len(self._generations):
            generation = self._generations[self._current]
            if self._num_printed == 0 and generation.pieces and len(self._generations) > 1:
                label = generation.prompt if generation.prompt is not None else "token ids"
                self._out.write(f"{'' if self._current == 0 else chr(10)}[{self._current + 1}] {_one_line(label)}\n")
            self._out.write("".join(generation.pieces[self._num_printed :]))
            self._num_printed = len(generation.pieces)
            self._out.flush()
            if generation.finished is None:
                return
            self._out.write("\n")
            self._current += 1
            self._num_printed = 0


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else line[:99] + "…"
