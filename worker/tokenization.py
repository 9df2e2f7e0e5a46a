"""Text to token ids and back, for the commands that speak to people: the tokenizer and chat template of a model directory."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from modelworker.worker.errors import SetupError

_REPLACEMENT = "\ufffd"
# Tokens of the prompt that are decoded along, so that the first word keeps its leading space.
_NUM_LEADING = 5


class TextTokenizer:
    """The tokenizer of a model, with its chat template if it has one."""

    def __init__(self, tokenizer: Tokenizer, *, chat_template: str = "", special_tokens: dict[str, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._special_tokens = special_tokens or {}

    @classmethod
    def load(cls, path: Path) -> "TextTokenizer":
        """Reads tokenizer.json, given as the file or its directory, and tokenizer_config.json beside it.

        Raises:
            SetupError: there is none, or it can't be read.
        """
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise SetupError(f"{file}: not found; expected a tokenizer.json or a model directory that has one")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # The library raises nothing more specific.
            raise SetupError(f"{file}: not a tokenizer that can be read: {error}") from error
        config = _read_json(file.with_name("tokenizer_config.json"))
        special_tokens = {name: _token_text(value) for name, value in config.items() if name.endswith("_token")}
        return cls(tokenizer, chat_template=_find_chat_template(file.parent, config), special_tokens=special_tokens)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model says how a conversation is written."""
        return bool(self._chat_template)

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of a text to be continued."""
        return tuple(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Returns the token ids of a conversation that the assistant is to continue.

        Raises:
            SetupError: the model has no chat template, or it can't be rendered.
        """
        if not self._chat_template:
            raise SetupError("the tokenizer has no chat template: give --no-chat")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.globals["raise_exception"] = _raise_template_error
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        try:
            template = environment.from_string(self._chat_template)
            text = template.render(messages=list(messages), add_generation_prompt=True, **self._special_tokens)
        except Exception as error:  # A template is a foreign program: it can fail in any way.
            raise SetupError(f"the model's chat template can't be rendered: {error}") from error
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def stream(self, prompt_ids: Sequence[int] = ()) -> "TextStream":
        """Starts the text that follows a prompt."""
        return TextStream(self, prompt_ids)


class TextStream:
    """Text that grows token by token: the pieces are whole characters, and together the text of all tokens."""

    def __init__(self, tokenizer: TextTokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._token_ids = list(prompt_ids[-_NUM_LEADING:])
        # Decoders look at neighbours (a leading space, a character in several tokens), so the difference of two decodings that
        # start at the same token is what a token adds.
        self._start = 0
        self._shown = len(self._token_ids)

    def push(self, token_id: int) -> str:
        """Adds a token. Returns the text that is certain now, "" while a character is unfinished."""
        self._token_ids.append(token_id)
        piece = self._unshown()
        if not piece or piece.endswith(_REPLACEMENT):
            return ""
        self._start = self._shown
        self._shown = len(self._token_ids)
        return piece

    def finish(self) -> str:
        """Returns what is left: the bytes of a character that never became whole show as U+FFFD."""
        piece = self._unshown()
        self._shown = len(self._token_ids)
        return piece

    def _unshown(self) -> str:
        before = self._tokenizer.decode(self._token_ids[self._start : self._shown])
        return self._tokenizer.decode(self._token_ids[self._start :])[len(before) :]


def _raise_template_error(message: str) -> NoReturn:
    raise TemplateError(message)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise SetupError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise SetupError(f"{file}: found a {type(content).__name__}, expected an object")
    return content


def _find_chat_template(directory: Path, config: dict[str, Any]) -> str:
    """Finds the template in its own file, or in the configuration, as one text or as a list of named ones."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template") or ""
    if isinstance(template, list):
        named = {each.get("name"): each.get("template", "") for each in template if isinstance(each, dict)}
        template = named.get("default", "")
    return str(template)


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")
