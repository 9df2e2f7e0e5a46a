"""Token feedback and block maintenance through a real server, whose model's logits are known."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from modelworker.worker.client import (
    FEEDBACK_TOKEN,
    BlockCopies,
    Client,
    InvalidRequestError,
    KvCacheLostError,
    PreconditionFailedError,
    StepAnswer,
    WorkerBusyError,
    build_step,
)
from modelworker.worker.result import SequenceErrorCode
from modelworker_testing.checkpoints import random_table, save_table_model
from modelworker_testing.worker_process import worker_process

WANTED = random_table(1)
POISONED = 7
MAX_KEPT = 6
SIZES = (
    "--block-size",
    "4",
    "--num-blocks",
    "32",
    "--max-sequences",
    "4",
    "--max-tokens-per-step",
    "64",
    "--optimization-level",
    "0",
)


def after(token: int, times: int = 1) -> int:
    """The greedy token so many steps after another."""
    for _ in range(times):
        token = int(WANTED[token].argmax())
    return token


class Router:
    """Sends sequenced steps of one token per row, each row in a block of its own; a new router for every test."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.epoch = client.reset_kv_cache(client.info().worker_epoch)
        self.step_id = 1

    def send(self, sequence_ids: Sequence[int], tokens: Sequence[int], contexts: Sequence[int], /, **fields: Any) -> StepAnswer:
        """Sends the step that is due; a refused one leaves it due."""
        size = len(tokens)
        request = {
            "query_lens": [1] * size, "context_lens": contexts, "token_ids": tokens, "block_counts": [1] * size,
            "block_ids": [1 + sequence_id % 30 for sequence_id in sequence_ids], "sequence_ids": sequence_ids,
            "worker_epoch": self.epoch, "router_id": 1, "step_id": self.step_id,
        }  # fmt: skip
        answer = self.client.execute(build_step(**(request | fields)))
        self.step_id += 1
        return answer

    def count(self, key: str) -> int:
        return self.client.info().counters.get(key, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_table_model(tmp_path_factory.mktemp("table"), WANTED, poisoned_tokens=(POISONED,))


@pytest.fixture(scope="module")
def address(model: Path) -> Iterator[str]:
    with worker_process(model, *SIZES, "--max-feedback-sequences", str(MAX_KEPT)) as process:
        yield process.address


@pytest.fixture
def router(address: str) -> Iterator[Router]:
    with Client(address) as client:
        yield Router(client)


def test_a_worker_says_what_it_keeps_and_that_it_feeds_back_zeroes_and_copies(router: Router) -> None:
    info = router.client.info()
    assert info.limits.max_feedback_sequences == MAX_KEPT
    assert {"sequence_ids", "finished_sequence_ids", "zero_block_ids", "block_copies"} <= set(info.capabilities)


def test_a_router_that_never_looks_at_an_answer_gets_the_tokens_of_one_that_does(router: Router) -> None:
    answers = [router.send([20, 21], [5, 6], [0, 0])]
    answers += [router.send([21, 20], [FEEDBACK_TOKEN] * 2, [position] * 2) for position in (1, 2, 3)]
    assert answers[0].sampled_ids.tolist() == [after(5), after(6)]
    for number, answer in enumerate(answers[1:], 2):
        assert answer.sampled_ids.tolist() == [after(6, number), after(5, number)]
    assert router.count("feedback_tokens_total") >= 6


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"step_id": 0, "worker_epoch": 0, "router_id": 0}, "token_ids[1]", "step_id is 0"),
        ({"sequence_ids": []}, "token_ids[1]", "sequence_ids is empty"),
        ({"sequence_ids": [3, 3]}, "sequence_ids[1]", "found 3, which is that of row 0 as well"),
        ({"query_lens": [1, 2], "token_ids": [1, FEEDBACK_TOKEN, 2]}, "token_ids[1]", "query_len is 2"),
        ({"query_lens": [1, 2], "token_ids": [1, 2, FEEDBACK_TOKEN]}, "token_ids[2]", "only be the first token"),
        ({"zero_block_ids": [0]}, "zero_block_ids[0]", "block 0 is the null block"),
        ({"zero_block_ids": [4]}, "zero_block_ids[0]", "found block 4, which is context of row 0"),
        ({"block_copies": BlockCopies(source_ids=[9, 32], destination_ids=[8, 7])}, "block_copies.source_ids[1]", "found 32"),
        ({"block_copies": BlockCopies(source_ids=[9, 9], destination_ids=[8, 8])}, "block_copies.destination_ids[1]", "block 8"),
    ],
)
def test_what_can_not_be_is_refused_at_once_and_the_step_stays_due(
    router: Router, changes: dict[str, Any], field: str, message: str
) -> None:
    router.send([3, 4], [5, 6], [0, 0])
    with pytest.raises(InvalidRequestError) as error:
        router.send([3, 4], [1, FEEDBACK_TOKEN], [1, 1], **changes)
    assert field in [violation.field for violation in error.value.violations]
    assert any(message in violation.description for violation in error.value.violations)
    assert router.send([3, 4], [FEEDBACK_TOKEN] * 2, [1, 1]).sampled_ids.tolist() == [after(5, 2), after(6, 2)]


@pytest.mark.parametrize(
    ("sequence_ids", "context", "message"),
    [([3, 5], 1, "sequence 5, but no token is kept for it"), ([3, 4], 2, "sequence 4, but its last token has position 1")],
)
def test_feedback_that_does_not_fit_refuses_the_whole_step_before_it_is_executed(
    router: Router, sequence_ids: list[int], context: int, message: str
) -> None:
    router.send([3, 4], [5, 6], [0, 0])
    mismatches = router.count('feedback_refusals_total{reason="mismatch"}')
    with pytest.raises(PreconditionFailedError, match=message) as error:
        router.send(sequence_ids, [FEEDBACK_TOKEN] * 2, [1, context], finished_sequence_ids=[9], zero_block_ids=[9])
    assert (error.value.reason, error.value.metadata["row"]) == ("FEEDBACK_MISMATCH", "1")
    assert router.count('feedback_refusals_total{reason="mismatch"}') == mismatches + 1
    assert router.client.info().next_step_id == 2
    assert router.send([3, 4], [FEEDBACK_TOKEN] * 2, [1, 1]).sampled_ids.tolist() == [after(5, 2), after(6, 2)]


def test_a_failed_row_fails_what_feeds_on_it_until_a_real_token_comes_and_its_neighbours_run(router: Router) -> None:
    assert router.send([3, 4], [POISONED, 6], [0, 0]).row_errors[0].code is SequenceErrorCode.NON_FINITE_LOGITS
    for position in (1, 2):
        answer = router.send([3, 4], [FEEDBACK_TOKEN] * 2, [position] * 2)
        assert answer.sampled_counts.tolist() == [0, 1]
        assert answer.sampled_ids.tolist() == [after(6, position + 1)]
        assert [(error.index, error.code) for error in answer.row_errors] == [(0, SequenceErrorCode.FEEDBACK_SOURCE_FAILED)]
        assert answer.tainted_block_ids.tolist() == [4]
    # What stood in the slots of the failed rows is written anew.
    answer = router.send([3, 4], [8, FEEDBACK_TOKEN], [0, 3])
    assert answer.sampled_ids.tolist() == [after(8), after(6, 4)]
    assert router.send([3], [FEEDBACK_TOKEN], [1]).sampled_ids.tolist() == [after(8, 2)]
    assert router.count('sequence_errors_total{code="FEEDBACK_SOURCE_FAILED"}') >= 2


def test_a_full_table_refuses_the_step_and_keeps_what_it_has_until_a_sequence_is_finished(router: Router) -> None:
    router.send([1, 2, 3, 4], [5] * 4, [0] * 4)
    router.send([5, 6], [6] * 2, [0] * 2)
    with pytest.raises(WorkerBusyError, match=f"max_feedback_sequences = {MAX_KEPT}") as error:
        router.send([7], [8], [0])
    assert error.value.retry_after is not None
    assert 0 < error.value.retry_after <= 1
    assert router.send([7, 6], [8, FEEDBACK_TOKEN], [0, 1], finished_sequence_ids=[1]).sampled_ids.tolist() == [
        after(8), after(6, 2),
    ]  # fmt: skip
    with pytest.raises(PreconditionFailedError, match="sequence 1, but no token is kept"):
        router.send([1], [FEEDBACK_TOKEN], [1], finished_sequence_ids=[2])
    assert router.send([2], [FEEDBACK_TOKEN], [1]).sampled_ids.tolist() == [after(5, 2)]
    # An id that is finished may be that of a new sequence in the same step.
    assert router.send([2], [9], [0], finished_sequence_ids=[2]).sampled_ids.tolist() == [after(9)]
    assert router.send([2], [FEEDBACK_TOKEN], [1]).sampled_ids.tolist() == [after(9, 2)]


def test_a_retry_of_an_executed_step_leaves_the_table_as_it_is(router: Router) -> None:
    router.send([3], [5], [0])
    second = router.send([3], [FEEDBACK_TOKEN], [1])
    router.step_id = 2
    assert router.send([3], [FEEDBACK_TOKEN], [1]).sampled_ids.tolist() == second.sampled_ids.tolist()
    assert router.send([3], [FEEDBACK_TOKEN], [2]).sampled_ids.tolist() == [after(5, 3)]


def test_a_reset_forgets_all_sequences(router: Router) -> None:
    router.send([3], [5], [0])
    old_epoch, router.epoch = router.epoch, router.client.reset_kv_cache(router.epoch)
    with pytest.raises(KvCacheLostError):
        router.send([3], [FEEDBACK_TOKEN], [1], worker_epoch=old_epoch)
    router.step_id = 1
    with pytest.raises(PreconditionFailedError, match="sequence 3, but no token is kept"):
        router.send([3], [FEEDBACK_TOKEN], [1])
    assert router.send([3], [5], [0]).sampled_ids.tolist() == [after(5)]


def test_unsequenced_steps_keep_nothing(router: Router) -> None:
    unsequenced = {"worker_epoch": 0, "router_id": 0, "step_id": 0, "finished_sequence_ids": [3]}
    assert router.send([3], [5], [0], **unsequenced).sampled_ids.tolist() == [after(5)]
    router.step_id = 1
    with pytest.raises(PreconditionFailedError, match="sequence 3, but no token is kept"):
        router.send([3], [FEEDBACK_TOKEN], [1])


def test_zeroed_and_copied_blocks_are_counted(router: Router) -> None:
    zeroed, copied = router.count("kv_blocks_zeroed_total"), router.count("kv_blocks_copied_total")
    copies = BlockCopies(source_ids=[10, 10], destination_ids=[11, 12])
    router.send([3], [5], [0], zero_block_ids=[8, 9, 10], block_copies=copies)
    assert router.count("kv_blocks_zeroed_total") == zeroed + 3
    assert router.count("kv_blocks_copied_total") == copied + 2


def test_sequences_that_no_step_names_are_forgotten_after_the_given_time(model: Path) -> None:
    with worker_process(model, *SIZES, "--feedback-idle-seconds", "0.5") as process, Client(process.address) as client:
        assert client.info().limits.max_feedback_sequences == 4 * 4
        router = Router(client)
        router.send([3, 4], [5, 6], [0, 0])
        time.sleep(0.6)
        with pytest.raises(PreconditionFailedError, match="sequence 3, but no token is kept"):
            router.send([3], [FEEDBACK_TOKEN], [1])
        assert router.count('feedback_evictions_total{reason="idle"}') == 2
