"""Tokenizers of GGUF files, compared with those that they were made from."""

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from transformers import AutoTokenizer

from modelworker.worker.gguf.tokenizer import STYLES, merges_from_scores
from modelworker_testing.gguf_files import (
    CORPUS,
    TEXTS,
    Recipe,
    byte_level_source,
    imported,
    recipe_of,
    sentencepiece_encode,
    sentencepiece_fields,
    tiny_model,
)


@pytest.mark.parametrize("style", sorted(STYLES))
def test_a_byte_level_tokenizer_splits_texts_as_its_source_does(tmp_path: Path, style: str) -> None:
    source, fields = byte_level_source(style)
    directory, _ = imported(recipe_of(tiny_model(), fields), tmp_path)
    again = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in TEXTS:
        assert again.encode(text).ids == source.encode(text).ids, text
        assert again.decode(again.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("style", "text", "words"),
    [
        ("gpt-2", "It's 12345 DON'T", ["It", "'s", " 12345", " DON", "'", "T"]),
        ("smollm", "It's 123 a", ["It", "'s", " ", "1", "2", "3", " a"]),
        ("llama-bpe", "It's 12345 DON'T\n\nx", ["It", "'s", " ", "123", "45", " DON", "'T", "\n\n", "x"]),
        ("qwen2", "It's 123 DON'T", ["It", "'s", " ", "1", "2", "3", " DON", "'T"]),
        ("tekken", "HelloWorld ABCdef 12", ["Hello", "World", " ABCdef", " ", "1", "2"]),
    ],
)
def test_words_are_split_as_the_family_is_known_to(style: str, text: str, words: list[str]) -> None:
    pieces = STYLES[style].words().pre_tokenize_str(text)
    assert [decoders.ByteLevel().decode([piece]) for piece, _ in pieces] == words


def test_smollm2_tokenizes_any_text_and_gives_it_back(smollm2_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    # Its vocabulary lacks the bytes that its training text lacked: a few control characters, and the lead bytes of planes 4 to 11.
    lacking = {symbol for symbol in pre_tokenizers.ByteLevel.alphabet() if tokenizer.token_to_id(symbol) is None}
    assert len(lacking) == 21

    @given(text=st.text(max_size=60))
    def check(text: str) -> None:
        if not lacking & set(
            "".join(piece for piece, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text))
        ):
            assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text

    check()


@pytest.fixture(scope="session")
def sentencepiece_import(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("sentencepiece")
    fields = sentencepiece_fields()
    directory, _ = imported(recipe_of(tiny_model(vocab_size=len(fields["tokenizer.ggml.tokens"])), fields), folder)
    return Tokenizer.from_file(str(directory / "tokenizer.json")), fields, directory


@given(text=st.one_of(st.sampled_from(CORPUS), st.text("the catsonm b", max_size=40), st.text(max_size=20)))
def test_a_sentencepiece_tokenizer_merges_by_score(sentencepiece_import: tuple[Tokenizer, dict[str, Any], Path], text: str) -> None:
    tokenizer, fields, _ = sentencepiece_import
    if any(token in text for token in ("<s>", "</s>", "<unk>")) or "\u2581" in text or not text:
        return
    expected = [1, *sentencepiece_encode(text, fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"])]
    assert tokenizer.encode(text).ids == expected
    assert tokenizer.decode(expected) == text


def test_transformers_loads_a_sentencepiece_import_with_its_special_tokens(
    sentencepiece_import: tuple[Tokenizer, Any, Path],
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sentencepiece_import[2])
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    assert tokenizer("the cat").input_ids[0] == 1
    assert tokenizer.decode(tokenizer("<s>the cat</s>", add_special_tokens=False).input_ids, skip_special_tokens=True) == "the cat"


def test_a_sentencepiece_tokenizer_without_a_space_in_front_adds_none(tmp_path: Path) -> None:
    fields = {**sentencepiece_fields(), "tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    directory, _ = imported(recipe_of(tiny_model(vocab_size=len(fields["tokenizer.ggml.tokens"])), fields), tmp_path)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert not tokenizer.encode("the cat").tokens[0].startswith("\u2581")
    assert tokenizer.decode(tokenizer.encode("the cat").ids) == "the cat"
    assert tokenizer.decode(tokenizer.encode(" the cat").ids) == " the cat"


def test_only_normal_tokens_are_merged() -> None:
    vocabulary = {"a": 0, "b": 1, "ab": 2, "<0x61>": 3, "abab": 4, "ba": 5}
    types = [int(TokenType.NORMAL)] * 3 + [int(TokenType.BYTE), int(TokenType.NORMAL), int(TokenType.UNUSED)]
    assert merges_from_scores(vocabulary, [0.0, 0.0, -1.0, 0.0, -2.0, 0.0], types) == [("a", "b"), ("ab", "ab")]


def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path, good: Recipe) -> None:
    good.fields |= {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    directory, _ = imported(good, tmp_path)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.encode("the cat").ids
    assert (ids[0], ids[-1]) == (0, 1)
    assert tokenizer.encode("the cat", add_special_tokens=False).ids == ids[1:-1]


def test_a_padded_vocabulary_keeps_every_id(tmp_path: Path, byte_level: tuple[Tokenizer, dict[str, Any]]) -> None:
    source, fields = byte_level
    tokens = fields["tokenizer.ggml.tokens"]
    padding = [f"[PAD{number}]" for number in range(len(tokens), 620)]
    padded = {
        **fields,
        "tokenizer.ggml.tokens": [*tokens, *padding],
        "tokenizer.ggml.token_type": [*fields["tokenizer.ggml.token_type"], *[int(TokenType.UNUSED)] * len(padding)],
    }
    directory, summary = imported(recipe_of(tiny_model(), padded), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert summary.vocab_size == 640
    for text in TEXTS:
        assert tokenizer(text).input_ids == source.encode(text).ids


def test_the_chat_template_and_every_stop_token_are_carried_over(tmp_path: Path, good: Recipe) -> None:
    template = "{% for message in messages %}<|start|>{{ message['content'] }}<|end|>{% endfor %}"
    good.fields |= {"tokenizer.chat_template": template, "tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.padding_token_id": 1}
    directory, _ = imported(good, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|start|>hi<|end|>"
    assert json.loads((directory / "generation_config.json").read_text()) == {
        "bos_token_id": 0,
        "eos_token_id": [1, 0],
        "pad_token_id": 1,
    }


def test_a_file_that_names_no_style_is_imported_with_the_one_that_is_named(
    tmp_path: Path, byte_level: tuple[Tokenizer, dict[str, Any]]
) -> None:
    source, fields = byte_level
    recipe = recipe_of(tiny_model(), {**fields, "tokenizer.ggml.pre": None})
    directory, _ = imported(recipe, tmp_path, style="gpt-2")
    assert Tokenizer.from_file(str(directory / "tokenizer.json")).encode(CORPUS[0]).ids == source.encode(CORPUS[0]).ids
