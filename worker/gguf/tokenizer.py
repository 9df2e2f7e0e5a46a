"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from modelworker.worker.errors import CheckpointError
from modelworker.worker.gguf.config import special_token_id
from modelworker.worker.gguf.file import GgufFile

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_SPACE = "\u2581"


def _gpt2_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


def _split(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


@dataclass(frozen=True, kw_only=True, slots=True)
class PreTokenizerStyle:
    """How a family of byte-level BPE tokenizers differs from the others."""

    words: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_LLAMA3 = PreTokenizerStyle(words=_split(_LLAMA3_WORDS), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizerStyle(words=_split(_QWEN2_WORDS), nfc=True)
_DIGITS = PreTokenizerStyle(words=_digits_then_gpt2_words)

# By `tokenizer.ggml.pre`. A style that isn't here would split words at other places, and the texts would be subtly worse.
STYLES: dict[str, PreTokenizerStyle] = {
    "gpt-2": PreTokenizerStyle(words=_gpt2_words),
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": PreTokenizerStyle(words=_split(_TEKKEN_WORDS), ignore_merges=True, add_bos=True),
}


def build_tokenizer(file: GgufFile, *, vocab_size: int, style: str | None = None) -> Tokenizer:
    """Builds the tokenizer.

    Args:
        file: the GGUF file.
        vocab_size: rows of the embedding; the vocabulary may be smaller.
        style: one of `STYLES`, for a file that names none.

    Raises:
        CheckpointError: an unknown kind of tokenizer, or a vocabulary that contradicts itself.
    """
    tokens = file.array("tokenizer.ggml.tokens", str)
    if len(tokens) > vocab_size:
        raise file.wrong("tokenizer.ggml.tokens", len(tokens), f"at most {vocab_size} tokens, the rows of token_embd.weight")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        doubled = next(token for token_id, token in enumerate(tokens) if vocabulary[token] != token_id)
        raise CheckpointError(f"{file.path}: tokenizer.ggml.tokens: the token {doubled!r} stands there twice")
    types = file.array("tokenizer.ggml.token_type", int, [int(gguf.TokenType.NORMAL)] * len(tokens))
    if len(types) != len(tokens):
        raise file.wrong("tokenizer.ggml.token_type", len(types), f"{len(tokens)} types, one for each token")
    model = file.text("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer, add_bos = _byte_level(file, vocabulary, style)
    elif model == "llama":
        tokenizer, add_bos = _sentencepiece(file, vocabulary, types)
    else:
        raise file.wrong("tokenizer.ggml.model", model, "gpt2 or llama")
    tokenizer.add_tokens([_added_token(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in _ADDED_TYPES])
    _add_bos_and_eos(file, tokenizer, tokens, add_bos)
    return tokenizer


_ADDED_TYPES = (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED, gguf.TokenType.UNKNOWN)


def _added_token(token: str, kind: int) -> AddedToken:
    return AddedToken(token, special=kind != gguf.TokenType.USER_DEFINED, normalized=False)


def _byte_level(file: GgufFile, vocabulary: dict[str, int], named_style: str | None) -> tuple[Tokenizer, bool]:
    """Byte-level BPE with the merges of the file."""
    name = file.text("tokenizer.ggml.pre", "default")
    if name == "default":
        name = named_style or name
    if name not in STYLES:
        hint = "; name the right one with --pre" if name == "default" else ""
        raise file.wrong("tokenizer.ggml.pre", name, f"one of: {', '.join(STYLES)}{hint}")
    style = STYLES[name]
    merges = [_pair(file, merge) for merge in file.array("tokenizer.ggml.merges", str)]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=style.ignore_merges))
    except Exception as error:
        raise CheckpointError(f"{file.path}: tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    if style.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = style.words()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer, style.add_bos


def _pair(file: GgufFile, merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right):
        raise file.wrong("tokenizer.ggml.merges", merge, "two tokens with a space between them")
    return left, right


def _sentencepiece(file: GgufFile, vocabulary: dict[str, int], types: list[int]) -> tuple[Tokenizer, bool]:
    """SentencePiece's BPE: merges follow from the scores, and characters without a token fall back to bytes."""
    if file.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        raise file.wrong("tokenizer.ggml.remove_extra_whitespaces", True, "false")
    scores = file.array("tokenizer.ggml.scores", float)
    if len(scores) != len(types):
        raise file.wrong("tokenizer.ggml.scores", len(scores), f"{len(types)} scores, one for each token")
    unknown = special_token_id(file, "unknown")
    if unknown is None:
        unknown = next((token_id for token_id, kind in enumerate(types) if kind == gguf.TokenType.UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges_from_scores(vocabulary, scores, types),
            unk_token=None if unknown is None else list(vocabulary)[unknown],
            fuse_unk=True,
            byte_fallback=all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)),
        )
    )
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    return tokenizer, True


def merges_from_scores(vocabulary: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE vocabulary, best first: every way in which a token consists of two others.

    The order of equal scores is that of `generate_merges` in transformers: the longer left part first.
    """
    normal = {token: token_id for token, token_id in vocabulary.items() if types[token_id] == gguf.TokenType.NORMAL}
    found = [
        (scores[token_id], token[:cut], token[cut:])
        for token, token_id in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    found.sort(key=lambda merge: (-merge[0], -len(merge[1]), -len(merge[2])))
    return [(left, right) for _, left, right in found]


def _add_bos_and_eos(file: GgufFile, tokenizer: Tokenizer, tokens: list[str], add_bos: bool) -> None:
    """Lets every encoded text begin and end with the tokens that the file asks for."""
    wanted: dict[str, str] = {}
    for role, default in (("bos", add_bos), ("eos", False)):
        if not file.flag(f"tokenizer.ggml.add_{role}_token", default):
            continue
        token_id = special_token_id(file, role)
        if token_id is None:
            raise CheckpointError(
                f"{file.path}: tokenizer.ggml.add_{role}_token is true, but tokenizer.ggml.{role}_token_id is missing"
            )
        wanted[role] = tokens[token_id]
    if not wanted:
        return
    before, after = wanted.get("bos"), wanted.get("eos")
    single = [*([before] if before else []), "$A", *([after] if after else [])]
    pair = [*single, *([f"{before}:1"] if before else []), "$B:1", *([f"{after}:1"] if after else [])]
    template = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(token, tokens.index(token)) for token in sorted(set(wanted.values()))]
    )
    first = tokenizer.post_processor
    tokenizer.post_processor = template if first is None else processors.Sequence([first, template])


def tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    tokens = file.array("tokenizer.ggml.tokens", str)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": file.integer("llama.context_length"),
    }
    for name, role in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown")):
        if (token_id := special_token_id(file, role)) is not None:
            config[name] = tokens[token_id]
    if template := file.text("tokenizer.chat_template", ""):
        config["chat_template"] = template
    return config
