"""`modelworker generate` against a worker whose next token is the sum of the sequence's tokens."""

import asyncio
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from modelworker.worker import cli
from modelworker_testing.serving import VOCAB_SIZE, running_server

EOS = 2


def expected(prompt_ids: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt_ids)
    while len(tokens) < len(prompt_ids) + max_tokens and (len(tokens) == len(prompt_ids) or tokens[-1] != EOS):
        tokens.append(sum(tokens) % VOCAB_SIZE)
    return tokens[len(prompt_ids) :]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    context = running_server()
    worker = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result(30)
    yield worker.address
    asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens 0 .. 255 are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"chat_template": "[{{ messages[-1].content }}]"}')
    return directory


Output = pytest.CaptureFixture[str]


def test_token_ids_in_token_ids_out(address: str, capsys: Output) -> None:
    assert cli.main(["generate", "--address", address, "--prompt-ids", "1, 5 7", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.split() == [str(token_id) for token_id in expected([1, 5, 7], 4)]


def test_json_says_all_about_every_prompt(address: str, capsys: Output) -> None:
    # The sum of 1 and 1 is the end-of-sequence token.
    arguments = ["--prompt-ids", "3,4", "--prompt-ids", "1,1", "--max-tokens", "6", "--json"]
    assert cli.main(["generate", "--address", address, *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    long, short = report["results"]
    assert (long["prompt_ids"], long["output_ids"], long["finish_reason"]) == ([3, 4], expected([3, 4], 6), "length")
    assert (short["output_ids"], short["finish_reason"], short["error"], short["text"]) == ([EOS], "stop", None, None)
    assert report["num_steps"] == 6
    assert 0 < long["timings"]["first_token_ms"] <= long["timings"]["total_ms"] <= report["total_ms"] + 1
    assert report["tokens_per_second"] > 0


def test_the_models_end_of_sequence_can_be_ignored(address: str, capsys: Output) -> None:
    assert cli.main(["generate", "--address", address, "--prompt-ids", "1,1", "--max-tokens", "3", "--ignore-eos"]) == 0
    assert capsys.readouterr().out.split() == ["2", "4", "8"]


def test_texts_are_printed_in_the_order_of_their_prompts(
    address: str, tokenizer_dir: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    monkeypatch.setattr("sys.stdin", io.StringIO("ab"))
    arguments = ["--tokenizer", str(tokenizer_dir), "--prompt", "-", "--prompt", "c", "--max-tokens", "3", "--no-chat"]
    assert cli.main(["generate", "--address", address, *arguments]) == 0
    texts = [inner.decode(expected(inner.encode(prompt).ids, 3)) for prompt in ("ab", "c")]
    assert capsys.readouterr().out == f"[1] ab\n{texts[0]}\n\n[2] c\n{texts[1]}\n"


@pytest.mark.parametrize(("flags", "prompt"), [([], "[x]"), (["--chat"], "[x]"), (["--no-chat"], "x")])
def test_prompts_go_through_the_models_chat_template_unless_told_otherwise(
    address: str, tokenizer_dir: Path, capsys: Output, flags: list[str], prompt: str
) -> None:
    inner = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    arguments = ["--tokenizer", str(tokenizer_dir / "tokenizer.json"), "--prompt", "x", "--max-tokens", "1", "--json", *flags]
    assert cli.main(["generate", "--address", address, *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["results"][0]["prompt_ids"] == inner.encode(prompt).ids


def test_a_text_that_can_not_be_served_is_named_by_its_own_flag(address: str, tokenizer_dir: Path, capsys: Output) -> None:
    arguments = ["--tokenizer", str(tokenizer_dir), "--prompt", "", "--no-chat"]
    assert cli.main(["generate", "--address", address, *arguments]) == 1
    assert ": --prompt: found no token, expected at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "no prompt: give --prompt TEXT or --prompt-ids IDS"),
        (["--prompt", "x"], 2, "--prompt needs --tokenizer"),
        (["--prompt", "x", "--tokenizer", "/nowhere"], 1, "/nowhere: not found"),
        (["--prompt-ids", "1,x"], 2, "--prompt-ids: '1,x' is not a list of token ids"),
        (["--prompt-ids", "1", "--temperature", "-1"], 2, " --temperature: found -1.0, expected 0 or at least 1e-5"),
        (["--prompt-ids", "1", "--top-k", "-1"], 2, " --top-k: found -1, expected at least 0"),
        (["--prompt-ids", "1", "--logprobs", "21"], 2, " --logprobs: found 21, expected -1 .. 20"),
        (["--prompt-ids", "1000"], 1, ": --prompt-ids[0]: found 1000, expected 0 .. 999"),
        (["--prompt-ids", "1", "--prompt-ids", ","], 1, ": prompt 2: --prompt-ids: found no token, expected at least 1"),
        (["--prompt-ids", "1", "--address", "127.0.0.1:1", "--timeout", "0.2"], 1, "not reachable after 0.2 s"),
    ],
)
def test_what_can_not_be_done_ends_with_one_line_that_says_why(
    address: str, capsys: Output, arguments: list[str], code: int, message: str
) -> None:
    assert cli.main(["generate", "--address", address, *arguments]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    *waiting, line = captured.err.splitlines()
    assert all(each.startswith("modelworker: waiting for the worker: not reachable") for each in waiting)
    assert line.startswith("modelworker: error: ")
    assert message in line
