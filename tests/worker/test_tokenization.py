"""Text in and out: streams of whole characters, chat templates, and files that can't be used."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from modelworker.worker.errors import SetupError
from modelworker.worker.tokenization import TextTokenizer


def byte_level_tokenizer() -> Tokenizer:
    """One token per byte, so that every character beyond ASCII is spread over several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


BYTES = TextTokenizer(byte_level_tokenizer())


@given(st.text(max_size=30), st.text(max_size=10))
def test_a_stream_gives_whole_characters_that_together_are_the_text(text: str, prompt: str) -> None:
    stream = BYTES.stream(BYTES.encode(prompt))
    pieces = [stream.push(token_id) for token_id in BYTES.encode(text)]
    assert "".join([*pieces, stream.finish()]) == text
    for piece in pieces:
        assert piece in text


@given(st.lists(st.integers(0, 255), max_size=40))
def test_a_stream_of_any_bytes_ends_as_the_decoding_of_all_of_them(token_ids: list[int]) -> None:
    stream = BYTES.stream()
    pieces = [stream.push(token_id) for token_id in token_ids]
    text = "".join([*pieces, stream.finish()])
    assert text == BYTES.decode(token_ids)
    assert text.encode("utf-8").decode("utf-8") == text


def test_an_unfinished_character_is_held_back_and_shown_as_replaced_only_at_the_end() -> None:
    stream = BYTES.stream()
    first, second, third, _ = BYTES.encode("😀")
    assert [stream.push(token_id) for token_id in (first, second, third)] == ["", "", ""]
    assert set(stream.finish()) == {"\ufffd"}


def test_the_first_word_after_a_prompt_keeps_its_space_where_decoders_strip_it() -> None:
    inner = Tokenizer(BPE(vocab={"▁": 0, "a": 1, "b": 2, "▁a": 3, "▁b": 4}, merges=[("▁", "a"), ("▁", "b")]))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    tokenizer = TextTokenizer(inner)
    stream = tokenizer.stream(tokenizer.encode("a"))
    assert stream.push(4) == " b"
    assert tokenizer.decode([4]) == "b"


def test_the_demo_models_chat_template_is_rendered_as_its_authors_write_it(smollm2_dir: Path) -> None:
    tokenizer = TextTokenizer.load(smollm2_dir)
    token_ids = tokenizer.encode_chat([{"role": "user", "content": "Hi <b>"}])
    inner = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    assert inner.decode(list(token_ids), skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi <b><|im_end|>\n<|im_start|>assistant\n"
    )
    assert token_ids[0] == inner.token_to_id("<|im_start|>")


def save(directory: Path, **config: object) -> Path:
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


USER = [{"role": "user", "content": "x"}]


def test_a_template_sees_the_special_tokens_however_the_configuration_spells_them(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}{{ eos_token }}"
    directory = save(tmp_path, chat_template=template, bos_token={"content": "<"}, eos_token=">")
    tokenizer = TextTokenizer.load(directory)
    assert tokenizer.decode(tokenizer.encode_chat(USER)) == "<x>"
    named = save(tmp_path, chat_template=[{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}])
    tokenizer = TextTokenizer.load(named / "tokenizer.json")
    assert tokenizer.decode(tokenizer.encode_chat(USER)) == "d"
    (tmp_path / "chat_template.jinja").write_text("from a file")
    tokenizer = TextTokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode_chat(USER)) == "from a file"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception('only one user') }}",
        "{{ messages[7]['role'] }}",
        "{% if %}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_fails_or_reaches_out_of_its_sandbox_is_an_error_in_one_line(tmp_path: Path, template: str) -> None:
    tokenizer = TextTokenizer.load(save(tmp_path, chat_template=template))
    with pytest.raises(SetupError, match="the model's chat template can't be rendered"):
        tokenizer.encode_chat(USER)


def test_files_that_can_not_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"tokenizer\.json: not found"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SetupError, match=r"tokenizer\.json: not a tokenizer"):
        TextTokenizer.load(tmp_path)
    save(tmp_path)
    with pytest.raises(SetupError, match="no chat template: give --no-chat"):
        TextTokenizer.load(tmp_path).encode_chat(USER)
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(SetupError, match=r"tokenizer_config\.json: not readable as JSON"):
        TextTokenizer.load(tmp_path)
